"""Local weights over the local transport: each worker's own, and outer ones, of a plain loop."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.plan import LocalSteps, make_plan
from lightning_cyclic.runtime.codecs.base import AbstractCodec
from lightning_cyclic.runtime.codecs.coded import Codes
from lightning_cyclic.runtime.whole_step.engine import Engine
from lightning_cyclic.runtime.whole_step.engine_state import EngineState
from lightning_cyclic.runtime.whole_step.local_weights import LocalWeights
from tests.harness.local_transport import LocalTransport, PostOffice
from tests.harness.rows import more
from tests.runtime.whole_step.test_engine import adamw, find_stages, loss

NUM_STEPS, NUM_STAGES = 9, 3
Moments = dict[int, list[int]]  # step of a period -> stages that are exchanged behind it
ALL_OF_3: Moments = {2: [0, 1, 2]}
ALL_OF_2: Moments = {1: [0, 1, 2]}
IN_TURN: Moments = {1: [0], 2: [1], 3: [2]}


class Halves(AbstractCodec):
    """Sends half of the digits, and keeps the others for the next time."""

    least_elements: ClassVar[int] = 100
    has_memory: ClassVar[bool] = True

    def sent(self, like: Tensor) -> Sequence[Tensor]:
        return [like.new_empty(like.shape, dtype=torch.bfloat16)]

    def encode(self, gradient: Tensor, state: Any) -> Sequence[Tensor]:
        w = gradient + state.get("left", 0.0)
        state["left"] = w - w.bfloat16().float()
        return [w.bfloat16()]

    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        return sent[0].float()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(12, 3))


STAGE_MAP = find_stages(mlp(), NUM_STAGES)


# ---------------------------------------------------------------------- a plain loop


def by_rule(
    rule: LocalSteps, moments: Moments, n: int, codec: AbstractCodec | None
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Train workers one after the other; return what each has, and outer weights of each step."""
    torch.set_num_threads(1)
    module, left = mlp(), dict[Any, dict[str, Tensor]]()
    workers = [copy.deepcopy(module) for _ in range(n)]
    optimizers = [adamw(worker) for worker in workers]
    outer = {name: nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
    by_all = torch.optim.SGD(
        outer.values(), rule.outer_lr, momentum=rule.outer_momentum, nesterov=True
    )
    named = [dict(worker.named_parameters()) for worker in workers]
    seen = []
    for t in range(NUM_STEPS):
        for i, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(worker, t, i).backward()
            optimizer.step()
        for name in _names(moments.get(t % rule.every, [])):
            total = None
            for i in range(n):
                x = outer[name].detach() - named[i][name].detach()
                if codec is not None and codec.takes(x):
                    sent = codec.encode(x, left.setdefault((i, name), {}))
                    x = codec.decode(sent, x)
                total = x if total is None else total + x
            assert total is not None
            outer[name].grad = total / n
        by_all.step()
        by_all.zero_grad()
        used = t - rule.delay
        for name in _names(moments.get(used % rule.every, []) if used >= 0 else []):
            for own in named:
                p, part = own[name].data, rule.mixing or 0.0
                p.copy_(p * part + outer[name].data * (1 - part))
        seen.append({name: p.detach().clone() for name, p in outer.items()})
    return [worker.state_dict() for worker in workers], seen


def _names(stages: list[int]) -> list[str]:
    return [name for j in stages for name in STAGE_MAP.stages[j].parameters]


# ---------------------------------------------------------------------- workers in threads


class Worker(threading.Thread):
    """Train one worker from a step on, up to another.

    Args:
        flush_at: steps behind which it looks at its module.
    """

    def __init__(
        self, plan: Any, transport: LocalTransport, codec: AbstractCodec | None,
        flush_at: tuple[int, ...], begins: tuple[nn.Module, Any, EngineState] | None, end: int,
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.module = mlp() if begins is None else begins[0]
        self.optimizer = adamw(self.module) if begins is None else begins[1]
        self.given = None if begins is None else begins[2]
        self.plan, self.transport, self.flush_at, self.end = plan, transport, flush_at, end
        self.codes = None if codec is None else Codes(codec)
        self.error: BaseException | None = None
        self.seen: dict[int, dict[str, Tensor]] = {}

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            self.engine = engine = Engine(
                self.module, self.plan, STAGE_MAP, self.transport, self.update, self.given,
                codes=self.codes,
            )  # fmt: skip
            while engine.t < self.end:
                with engine.forward():
                    value = loss(self.module, engine.t, self.transport.worker)
                with engine.backward(last_of_window=True):
                    value.backward()
                engine.end_step()
                if engine.t - 1 in self.flush_at:
                    engine.flush()
                    self.seen[engine.t - 1] = copy.deepcopy(self.module.state_dict())
            engine.flush()
            self.state = engine.state()
            engine.close()
        except BaseException as error:
            self.error = error

    def update(self, t: int, stages: Any) -> None:
        self.optimizer.step()


def train(
    rule: LocalSteps, n: int, codec: AbstractCodec | None = None, *, sharding: str = "none",
    flush_at: tuple[int, ...] = (), after: list[Worker] | None = None, end: int = NUM_STEPS,
) -> list[Worker]:  # fmt: skip
    plan = make_plan(
        "diloco", weights=rule, num_stages=NUM_STAGES, num_workers=n, sharding=sharding,
        to_owners=codec is not None,
    )  # fmt: skip
    office, workers = PostOffice(), []
    for w in range(n):
        begins = None
        if after is not None:
            begins = after[w].module, after[w].optimizer, _written(after, w)
        transport = LocalTransport(office, w, n, 20.0)
        workers.append(Worker(plan, transport, codec, flush_at, begins, end))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    if errors := [worker.error for worker in workers if worker.error is not None]:
        raise errors[0]
    return workers


def _written(workers: list[Worker], w: int) -> EngineState:
    """Return the state of a worker, as it is in a file with that of all."""
    data = [worker.state.as_data(k, has_previous=k == 0) for k, worker in enumerate(workers)]
    local = [each["local"] for each in data]
    whole = {
        name: {key: x for each in local for key, x in each[name].items()} for name in local[0]
    }
    return EngineState.from_data(data[0] | {"local": whole}, w)


def assert_is(worker: Worker, outer: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Compare with a plain loop: outer weights, buffers of its own, and weights of its own."""
    expected = own | outer
    for name, x in worker.module.state_dict().items():
        assert torch.equal(x, expected[name]), name
    assert worker.state.local is not None
    kept = {
        name: x for name, x in own.items() if name in outer and not torch.equal(x, outer[name])
    }
    assert worker.state.local.own.keys() == kept.keys()
    for name, x in worker.state.local.own.items():
        assert torch.equal(x, kept[name]), name


# ---------------------------------------------------------------------- the rule


LATE = LocalSteps(every=3, delay=2)
ROWS: list[Any] = [
    (LocalSteps(every=3), ALL_OF_3, 2, None, "none"),
    (LATE, ALL_OF_3, 3, None, "optimizer"),
    (LocalSteps(every=4, in_turn=True, delay=3, mixing=0.25), IN_TURN, 2, None, "none"),
    (LocalSteps(every=2, delay=1, mixing=0.0), ALL_OF_2, 4, None, "optimizer"),
    (LocalSteps(every=4, in_turn=True), IN_TURN, 3, Halves(), "optimizer"),
    (LATE, ALL_OF_3, 2, Halves(), "none"),
    (LATE, ALL_OF_3, 1, None, "none"),
    more(LocalSteps(every=3, delay=1), ALL_OF_3, 4, Halves(), "optimizer"),
    more(LocalSteps(every=4, in_turn=True, delay=1), IN_TURN, 4, None, "none"),
]


@pytest.mark.parametrize(("rule", "moments", "n", "codec", "sharding"), ROWS, ids=repr)
def test_bits_are_those_of_a_plain_loop_wherever_all_look(
    rule: LocalSteps, moments: Moments, n: int, codec: Any, sharding: str
) -> None:
    own, outer = by_rule(rule, moments, n, codec)
    for flush_at in ((), (1, 2, 3, 6)):
        workers = train(rule, n, codec, sharding=sharding, flush_at=flush_at)
        for worker, mine in zip(workers, own, strict=True):
            assert_is(worker, outer[-1], mine)
            for t, seen in worker.seen.items():
                for name, x in outer[t].items():
                    assert torch.equal(seen[name], x), f"step {t} {name}"


@pytest.mark.parametrize("end", [3, more(4), 5, more(6)])
def test_a_run_goes_on_between_an_exchange_and_its_use(end: int) -> None:
    own, outer = by_rule(LATE, ALL_OF_3, 2, None)
    workers = train(LATE, 2, after=train(LATE, 2, end=end))
    for worker, mine in zip(workers, own, strict=True):
        assert_is(worker, outer[-1], mine)


# ---------------------------------------------------------------------- overlap


def test_steps_go_on_while_an_exchange_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outer weights of step t are not made before their owner has ended step t + 1."""
    ended: dict[int, threading.Event] = defaultdict(threading.Event)
    held: list[int] = []
    make, end_step = LocalWeights.make_outer, Engine.end_step

    def make_later(own: LocalWeights, t: int, j: int) -> None:
        if t + 1 < NUM_STEPS:
            assert ended[t + 1].wait(20), f"step {t + 1} waits for what step {t} has begun"
            held.append(t)
        make(own, t, j)

    def end_and_say(engine: Engine) -> None:
        end_step(engine)
        if engine.transport.worker == 1:  # who owns all stages
            ended[engine.t - 1].set()

    monkeypatch.setattr(LocalWeights, "make_outer", make_later)
    monkeypatch.setattr(Engine, "end_step", end_and_say)
    own, outer = by_rule(LATE, ALL_OF_3, 2, None)
    for worker, mine in zip(train(LATE, 2), own, strict=True):
        assert_is(worker, outer[-1], mine)
    assert held == [2, 2, 2, 5, 5, 5]
