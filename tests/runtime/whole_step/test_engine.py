"""The engine over the local transport: all workers of a plan in threads of one process."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cyclic.plan import make_plan, programs_of
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.updates import up_to_call
from lightning_cyclic.runtime.stages.stage_map import Recorder, StageMap, make_stages
from lightning_cyclic.runtime.transport import CountingTransport
from lightning_cyclic.runtime.whole_step.engine import Engine
from tests.harness.local_transport import LocalTransport, PostOffice
from tests.harness.rows import more
from tests.references.sequential import train

PRESETS = {"cyclic_dp": "freshest", "cyclic_dp_v1": "delayed", "lockstep_dp": "sync",
           "cyclic_dp_v1/optimizer": "delayed"}  # fmt: skip


def plan_of(name: str, **numbers: Any) -> Any:
    preset, _, sharding = name.partition("/")
    return make_plan(preset, sharding=sharding or None, **numbers)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(9):
        layers += [nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(12, 3))


def loss(module: nn.Module, t: int, i: int) -> Tensor:
    g = torch.Generator().manual_seed(1000 * t + i)
    x, y = torch.randn(7, 12, generator=g), torch.randint(0, 3, (7,), generator=g)
    return F.cross_entropy(module(x), y)


def find_stages(module: nn.Module, num_stages: int) -> StageMap:
    module = copy.deepcopy(module)
    recorder = Recorder(module, dict(module.named_parameters()))
    with recorder.recording():
        loss(module, 0, 0)
    sizes = {n: p.numel() for n, p in module.named_parameters()}
    return make_stages(recorder.profile(), sizes, num_stages)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


class Worker(threading.Thread):
    """Run one worker of a plan in a thread."""

    def __init__(
        self,
        module: nn.Module,
        plan: Any,
        stages: StageMap,
        transport: Any,
        make_optimizer: Any,
        num_steps: int,
        flush_at: tuple[int, ...] = (),
    ) -> None:
        super().__init__(daemon=True)
        self.module = copy.deepcopy(module)
        self.optimizer = make_optimizer(self.module)
        self.plan, self.stages, self.transport = plan, stages, transport
        self.num_steps, self.flush_at = num_steps, flush_at
        self.error: BaseException | None = None
        self.depths: list[int] = []
        self.kept_long: list[tuple[int, int]] = []  # step, and stage with an older version behind

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            self.engine = Engine(self.module, self.plan, self.stages, self.transport, self.update)
            for t in range(self.num_steps):
                self.step(t)
                if t in self.flush_at:
                    self.engine.flush()
            self.engine.flush()
            self.depths = [s.depth for s in self.engine.stores]
            self.engine.close()
        except BaseException as error:
            self.error = error

    def step(self, t: int) -> None:
        with self.engine.forward():
            value = loss(self.module, t, self.transport.worker)
        with self.engine.backward(last_of_window=True):
            (value / self.plan.num_microbatches).backward()
        self.engine.end_step()
        if self.plan.axes.sharding.gathers:  # elsewhere older versions stay for the next step
            self.kept_long += [(t, j) for j in self.engine.owned if not self.goes(t, j)]

    def goes(self, t: int, j: int) -> bool:
        """Say whether versions before that of a step go, as soon as lanes have sent them."""
        until = time.monotonic() + 2
        while min(self.engine.stores[j].versions) < t and time.monotonic() < until:
            time.sleep(0.001)
        return min(self.engine.stores[j].versions) >= t

    def update(self, t: int, stages: Any) -> None:
        self.optimizer.step()


def run_workers(
    module: nn.Module,
    preset: str,
    n: int,
    s: int,
    slack: int,
    make_optimizer: Any,
    num_steps: int,
    flush_at: tuple[int, ...] = (),
    timeout_s: float = 20.0,
    check: bool = True,
) -> list[Worker]:
    stages = find_stages(module, s)
    plan = plan_of(preset, num_stages=s, num_workers=n, slack=slack, relayed=stages.relayed)
    office = PostOffice()
    workers = [
        Worker(
            module,
            plan,
            stages,
            CountingTransport(LocalTransport(office, w, n, timeout_s)),
            make_optimizer,
            num_steps,
            flush_at,
        )
        for w in range(n)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    errors = [w.error for w in workers if w.error is not None]
    if errors and check:
        raise errors[0]
    return workers


def reference(
    module: nn.Module, preset: str, n: int, s: int, slack: int, make_optimizer: Any, num_steps: int
) -> nn.Module:
    module = copy.deepcopy(module)
    named = dict(module.named_parameters())
    stages = [[named[x] for x in st.parameters] for st in find_stages(module, s).stages]
    train(
        module,
        stages,
        make_optimizer(module),
        loss,
        rule=PRESETS[preset],
        num_workers=n,
        num_steps=num_steps,
        slack=slack,
    )
    return module


@pytest.mark.parametrize(("n", "stages"), [(2, 2), more(2, 8), (3, 5)])
def test_owners_of_shards_keep_an_older_version_only_until_its_last_use(
    n: int, stages: int
) -> None:
    for worker in run_workers(mlp(), "cyclic_zero", n, stages, 0, sgd, 5, flush_at=(2,)):
        assert worker.kept_long == []
        assert max(worker.depths[j] for j in worker.engine.owned) == 2  # meanwhile it was there


RULES_OF_READS = [
    ("cyclic_dp", 0), ("cyclic_dp", 2), ("cyclic_dp", 4), ("cyclic_dp_v1", 0),
    ("cyclic_dp_v1/optimizer", 0), ("lockstep_dp", 0),
]  # fmt: skip
STAGES = [("N", sgd), (8, adamw), ("N", adamw), (8, sgd)]
USUAL = [  # of each rule: workers, and which of these stages
    [(1, 1), (2, 1), (3, 0), (4, 0)], [(3, 1)], [(2, 0), (4, 1)], [(2, 1), (3, 0)],
    [(2, 0), (3, 1)], [(3, 1)],
]  # fmt: skip


@pytest.mark.parametrize(
    ("n", "preset", "slack", "stages", "make_optimizer"),
    [
        (n, *rule, *stages) if (n, k) in USUAL[j] else more(n, *rule, *stages)
        for n in (1, 2, 3, 4)
        for j, rule in enumerate(RULES_OF_READS)
        for k, stages in enumerate(STAGES)
    ],
)
def test_every_worker_ends_with_the_bits_of_the_sequential_run(
    n: int, preset: str, slack: int, stages: Any, make_optimizer: Any
) -> None:
    s = n if stages == "N" else stages
    workers = run_workers(mlp(), preset, n, s, slack, make_optimizer, 12)
    expected = reference(mlp(), preset, n, s, slack, make_optimizer, 12).state_dict()
    for worker in workers:
        for name, value in worker.module.state_dict().items():
            assert torch.equal(value, expected[name]), (worker.transport.worker, name)


@pytest.mark.parametrize(
    ("preset", "slack"),
    [("cyclic_dp", 0), ("cyclic_dp", 3), ("cyclic_dp_v1", 0), ("cyclic_dp_v1/optimizer", 0)],
)
@pytest.mark.parametrize("n", [more(2), 3, more(4)])
def test_a_flush_changes_nothing(n: int, preset: str, slack: int) -> None:
    workers = run_workers(mlp(), preset, n, 8, slack, adamw, 12, flush_at=(0, 1, 4, 5, 8))
    expected = reference(mlp(), preset, n, 8, slack, adamw, 12).state_dict()
    for worker in workers:
        for name, value in worker.module.state_dict().items():
            assert torch.equal(value, expected[name]), (worker.transport.worker, name)


def test_the_rules_differ_so_that_equality_can_fail() -> None:
    runs = [
        reference(mlp(), p, 2, 2, c, sgd, 12)
        for p, c in [("cyclic_dp", 0), ("cyclic_dp", 2), ("cyclic_dp_v1", 0), ("lockstep_dp", 0)]
    ]
    firsts = [next(run.parameters()) for run in runs]
    assert all(not torch.equal(a, b) for k, a in enumerate(firsts) for b in firsts[:k])


@pytest.mark.parametrize("n", [more(2), 3, more(4)])
@pytest.mark.parametrize("preset", list(PRESETS))
def test_messages_and_bytes_are_those_of_the_program(n: int, preset: str) -> None:
    num_steps, s = 6, 4
    workers = run_workers(mlp(), preset, n, s, 0, sgd, num_steps)
    plan = plan_of(
        preset, num_stages=s, num_workers=n, num_steps=num_steps, relayed=tuple(range(s)),
    )  # fmt: skip
    for worker in workers:
        sends = [a for a in programs_of(plan)[worker.transport.worker] if a.kind == "SEND"]
        starts = preset != "lockstep_dp" and worker.transport.worker < n - 1
        assert worker.transport.messages[Payload.K] == int(starts)
        for payload in set(Payload) - {Payload.K}:
            expected = sum(a.payload is payload for a in sends)
            assert worker.transport.messages[payload] == expected, payload
        for payload in (Payload.S, Payload.T, Payload.P):
            sizes = [store.layout.num_bytes for store in worker.engine.stores]
            num_bytes = sum(sizes[a.j] for a in sends if a.payload is payload)
            assert worker.transport.num_bytes[payload] == num_bytes


def test_a_call_of_the_optimizer_tells_norms_though_a_later_receive_is_between() -> None:
    def at(kind: Kind, payload: Payload | None = None, t: int = 0) -> Action:
        return Action(kind=kind, payload=payload, t=t, j=0, s=1)

    told, update = at(Kind.SEND, Payload.N), at(Kind.UPDATE)
    begun = at(Kind.RECV, Payload.R, t=1)
    behind = [at(Kind.RECV, Payload.N, t=1), at(Kind.F, t=1)]
    call = [told, begun, at(Kind.RECV, Payload.N), update, begun, update]
    assert up_to_call([*call, *behind], 0, apart=False) == call
    assert up_to_call([*call, *behind], 0, apart=True) == call[:4]
    with pytest.raises(ValueError, match="empty"):  # never without an update
        up_to_call([told, begun, at(Kind.F), update], 0, apart=False)
    with pytest.raises(ValueError, match="empty"):
        up_to_call([at(Kind.UPDATE, t=1)], 0, apart=True)
