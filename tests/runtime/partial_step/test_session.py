"""All workers of a plan in one process, over the local transport: the oracle of all else."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.runtime.stages.places import CutPoints
from lightning_cyclic.runtime.stages.survey import survey
from lightning_cyclic.runtime.transport import CountingTransport
from tests.harness.local_transport import LocalTransport, PostOffice
from tests.harness.rows import in_turn

from . import crews

NUM_STEPS = 5
ROWS = 8  # so that what crosses needs no padding
HEAD_BYTES = 512  # of a message


class Net(nn.Module):
    """Eight layers, a skip made by glue code, and the first weight used again at the end."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) if norm else nn.Identity() for _ in range(8))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.layers[0].weight

    def step(self, x: Tensor) -> Tensor:
        skip = y = x
        for k, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            y = torch.tanh(norm(layer(y)))
            skip = y if k == 1 else skip
        return self.head(y + skip).square().mean()


def batch(k: int) -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(k))


def sequential(model: Net, num_microbatches: int) -> Net:
    """Train on the micro-batches one after the other."""
    optimizer = sgd(model.parameters())
    for t in range(NUM_STEPS):
        optimizer.zero_grad()
        for i in range(num_microbatches):
            (model.step(batch(t * num_microbatches + i)) / num_microbatches).backward()
        optimizer.step()
    return model


class Crew(crews.Crew):
    """Workers whose steps end with a flush, and whose messages are counted."""

    def __init__(
        self, model: Any, preset: str, num_workers: int, starts: Sequence[str] = (),
        **numbers: int,
    ) -> None:  # fmt: skip
        remat = "always" if numbers.pop("remat", 0) else "never"
        plan = make_plan(preset, num_workers=num_workers, **numbers)
        super().__init__(
            plan, lambda: copy.deepcopy(model), sgd, remat=remat, join=counted, starts=starts,
            apply=None,
        )  # fmt: skip
        self.sent: list[list[Counter[Any]]] = [[] for _ in self.sessions]
        self.sent_bytes: list[list[Counter[Any]]] = [[] for _ in self.sessions]

    def _train(self, w: int, flush_after: tuple[int, ...]) -> None:
        torch.set_num_threads(1)
        session, plan, optimizer = self.sessions[w], self.plan, self.optimizers[w]
        session.begin(self.cuts)
        model: Any = session.module
        replica = w // len(session.replica)
        for t in range(NUM_STEPS):
            optimizer.zero_grad()
            mine = [
                batch(t * plan.num_microbatches + i)
                for i in range(replica, plan.num_microbatches, plan.replicas)
            ]
            given = torch.cat(mine) if w == session.replica[0] else torch.zeros(1, 6)
            session.train(given, model.step, crews.summarise)
            optimizer.step()
            session.end_step()
            assert isinstance(session.transport, CountingTransport)
            self.sent[w].append(Counter(session.transport.messages))
            self.sent_bytes[w].append(Counter(session.transport.num_bytes))


def counted(office: PostOffice, w: int, num_workers: int) -> CountingTransport:
    return CountingTransport(LocalTransport(office, w, num_workers, timeout_s=30.0))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


PLANS = {
    "two stages": ("gpipe", 2, {"num_stages": 2, "num_microbatches": 4}),
    "four stages": ("1f1b", 4, {"num_stages": 4, "num_microbatches": 6}),
    "four stages on two workers": ("1f1b", 2, {"num_stages": 4, "num_microbatches": 4}),
    "two replicas": ("1f1b", 4, {"num_stages": 2, "num_microbatches": 4, "replicas": 2}),
    "two replicas of two workers with four stages": (
        "gpipe", 4, {"num_stages": 4, "num_microbatches": 4, "replicas": 2},
    ),
    "run again": ("1f1b", 2, {"num_stages": 4, "num_microbatches": 4, "remat": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "norm"), in_turn(list(PLANS), [True, False]))
def test_all_workers_in_one_process_equal_the_sequential_run(name: str, norm: bool) -> None:
    preset, num_workers, numbers = PLANS[name]
    crew = Crew(Net(norm), preset, num_workers, **numbers)
    crew.train()
    crew.compare(sequential(Net(norm), numbers["num_microbatches"]))


@pytest.mark.parametrize("name", ["two stages", "four stages", "two replicas"])
def test_messages_are_those_of_the_program(name: str) -> None:
    preset, num_workers, numbers = PLANS[name]
    crew = Crew(Net(), preset, num_workers, **numbers)
    crew.train()
    for w, session in enumerate(crew.sessions):
        last = session.own.program.step(w, NUM_STEPS - 1)
        sends = Counter(a.payload for a in last if a.kind is Kind.SEND)
        # in the first steps descriptions of what crosses travel, too
        assert crew.sent[w][-1] - crew.sent[w][-2] == sends


class Branches(nn.Module):
    """Two branches, a skip past both of them, and a view of it that travels apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 16)
        self.left1, self.left2 = nn.Linear(16, 48), nn.Linear(48, 16)
        self.right1, self.right2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.join = nn.Linear(32, 16)

    def step(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        halves = h.view(-1, 8)
        left = self.left2(torch.tanh(self.left1(h)))
        right = self.right2(torch.tanh(self.right1(h)))
        y = self.join(torch.cat([left, right], 1)) + h
        return (y.view(-1, 8) * halves).square().mean()


def test_messages_have_the_bytes_that_stages_are_cut_by() -> None:
    starts = ["left1", "left2", "right1", "right2", "join"]
    model = Branches()
    crew = Crew(model, "1f1b", 6, starts, num_stages=6, num_microbatches=2)
    crew.train()
    points = CutPoints(survey(model, lambda: model.step(batch(0))))
    crossing = [p.crossing_bytes for p in points.places]
    h, wide, narrow = 4 * ROWS * 16, 4 * ROWS * 48, 4 * ROWS * 32
    both = 2 * h  # and its view, to the end
    assert crossing == [both, both + wide, both + h, both + h + narrow, both + narrow]
    for w, num_bytes in enumerate(crossing):
        in_one_step = crew.sent_bytes[w][-1] - crew.sent_bytes[w][-2]
        assert in_one_step[Payload.A] == 2 * (num_bytes + HEAD_BYTES)


def test_what_other_workers_hold_takes_no_memory() -> None:
    crew = Crew(Net(), "gpipe", 4, num_stages=4, num_microbatches=4)
    crew.train()
    for session in crew.sessions:
        foreign = dict(session.module.named_parameters())
        for name in session.own.ownership.foreign:
            assert foreign[name].shape == dict(Net().named_parameters())[name].shape
            assert foreign[name].untyped_storage().nbytes() == 4
