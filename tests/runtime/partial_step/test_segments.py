"""Units that are run again: the bits, the runs and the bytes are those that the schedule says."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_cyclic.errors import StepError
from lightning_cyclic.planner.rematerialisation import (
    Again,
    Keep,
    Schedule,
    best_schedule,
    least_bytes,
)
from lightning_cyclic.runtime import generators
from lightning_cyclic.runtime.partial_step.call_router import CallRouter
from lightning_cyclic.runtime.partial_step.observed import Chain, Observation
from lightning_cyclic.runtime.partial_step.segments import Recorder
from lightning_cyclic.runtime.stages.cuts import whole

CPU = torch.device("cpu")
TORCHS = generators.of_torch(CPU)


class Count:
    """Count bytes of storages that are alive, and runs of units."""

    def __init__(self) -> None:
        self.alive = self.most = self.runs = 0

    def made(self, x: Tensor) -> None:
        self.alive += x.nbytes
        weakref.finalize(x.untyped_storage(), self._gone, x.nbytes)

    def _gone(self, num_bytes: int) -> None:
        self.alive -= num_bytes


class Waves(torch.autograd.Function):
    """Give sin(x w), and save what it has been given, has made on the way and gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, count: Count) -> Tensor:
        made = torch.outer(x * w, torch.ones(1 + len(w) % 3)).sum(1)
        y = made.sin()
        count.runs += 1
        count.made(made)
        count.made(y)
        ctx.save_for_backward(x, w, made, y)
        ctx.count = count
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w, made, y = ctx.saved_tensors
        ctx.count.most = max(ctx.count.most, ctx.count.alive)
        through = grad * (1 - y * y).sqrt().copysign(made.cos()) * (1 + len(w) % 3)
        return through * w, through * x, None


class Unit(nn.Module):
    def __init__(self, size: int, count: Count) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return Waves.apply(x, self.w, self.count)


class Row(nn.Module):
    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.count = Count()
        self.units = nn.Sequential(*(Unit(8, self.count) for _ in range(num_units)))

    def forward(self, x: Tensor) -> Tensor:
        return self.units(x).sum()


class Net(nn.Module):
    """Have what must come out alike: draws, BatchNorm, ties, checkpoints, frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Tanh())
            for _ in range(4)
        )
        self.blocks[2][0].weight = self.first.weight
        self.blocks[1][0].weight.requires_grad_(False)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.first(x)
        for n, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if n == 3 else block(x)
        x = x + functional.dropout(skip, 0.2)
        x = self.blocks[0](x)  # whose buffers change twice
        return self.attention(x[None], x[None], x[None])[0].square().mean()


def no_moments(paths: Any) -> Callable[[], AbstractContextManager[None]]:
    return nullcontext


def moments(module: nn.Module, paths: Any) -> Callable[[], AbstractContextManager[None]]:
    """Note buffers and generators, as a stage does."""
    states = generators.states_of(TORCHS)
    buffers = [x.clone() for x in module.buffers()]

    @contextmanager
    def resumed() -> Iterator[None]:
        before = [x.clone() for x in module.buffers()]
        with generators.untouched(TORCHS), torch.no_grad():
            generators.put(states)
            for x, value in zip(module.buffers(), buffers, strict=True):
                x.data.copy_(value)
            try:
                yield
            finally:
                for x, value in zip(module.buffers(), before, strict=True):
                    x.data.copy_(value)

    return resumed


def observed(module: nn.Module, x: Tensor) -> list[Chain]:
    router = CallRouter(module, whole(module), CPU)
    seen = Observation([*module.parameters(), *module.buffers()], {}, ())
    with router.open(), router.followed(seen):
        module(x)
    return seen.chains(48)


def followed(module: nn.Module, chain: Chain, schedule: Schedule, x: Tensor, note: Any) -> Tensor:
    router = CallRouter(module, whole(module), CPU)
    with router.open(), router.followed(Recorder(chain.paths, chain.opened, schedule, note)):
        return module(x)


def finest(chains: list[Chain]) -> Chain:
    return max(chains, key=lambda c: len(c.units))


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("num_units", [1, 3, 6])
def test_peak_and_runs_are_those_of_the_plan(num_units: int, at_once: int) -> None:
    x = torch.linspace(0.1, 1, 8, requires_grad=True)
    chain = finest(observed(Row(num_units), x))
    assert [(u.kept_bytes, u.output_bytes, u.is_joined, u.must_keep) for u in chain.units] == [
        (64, 32, k > 0, False) for k in range(num_units)
    ]
    least = least_bytes(chain.units, at_once=at_once)
    for limit in range(least, 64 * num_units * at_once + 1, 32):
        plan = best_schedule(chain.units, limit, at_once=at_once)
        row = Row(num_units)
        losses = [followed(row, chain, plan.schedule, x, no_moments) for _ in range(at_once)]
        runs = row.count.runs
        while losses:
            losses.pop().backward()
            if len(losses) == at_once - 1:
                assert row.count.runs - runs == plan.runs_again
        assert row.count.most == plan.peak_bytes <= limit
        assert row.count.alive == 0


SCHEDULES = {
    "each": lambda n: tuple(Again(k, k, (Keep(k),)) for k in range(n)),
    "all": lambda n: (Again(0, n - 1, tuple(map(Keep, range(n)))),),
    "inner": lambda n: (
        Again(0, 2, (Again(0, 1, (Again(0, 0, (Keep(0),)), Keep(1))), Keep(2))),
        *map(Keep, range(3, n)),
    ),
    "some": lambda n: (Keep(0), Again(1, n - 2, tuple(map(Keep, range(1, n - 1)))), Keep(n - 1)),
}


def gradients(module: nn.Module, loss: Tensor) -> list[Any]:
    loss.backward()
    return [
        loss.detach(),
        *(p.grad for p in module.parameters() if p.grad is not None),
        *(b.clone() for b in module.buffers()),
    ]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bits_are_those_without(name: str, autocast: bool) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    around = partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast)
    plain, net = Net(), Net()
    chain = finest(observed(Net(), x))
    assert chain.paths == ("first", "blocks.0", "blocks.1", "blocks.2", "blocks.0", "attention")
    torch.manual_seed(7)
    with around():
        loss = plain(x)
    expected = [*gradients(plain, loss), x.grad]
    x.grad = None
    torch.manual_seed(7)
    schedule = SCHEDULES[name](len(chain.units))
    with around():
        loss = followed(net, chain, schedule, x, partial(moments, net))
    state = torch.get_rng_state()
    found = [*gradients(net, loss), x.grad]
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, expected, found))


def test_what_changes_its_input_is_not_run_again() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    module = nn.Sequential(nn.Linear(4, 4), Doubling(4, 4), nn.Linear(4, 4))
    chain = finest(observed(module, torch.ones(2, 4)))
    assert [u.must_keep for u in chain.units] == [False, True, False]


def test_what_is_given_a_cache_is_not_run_again() -> None:
    class Cache:
        pass

    class Block(nn.Linear):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            return super().forward(x)

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(4, 4), Block(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x), Cache())

    chain = finest(observed(Blocks(), torch.ones(2, 4)))
    assert [u.must_keep for u in chain.units] == [False, True]


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).mul(1))
        if self.training:
            x.mul_(2)
        return y.sum()


def test_an_input_that_is_changed_later_is_refused_by_name() -> None:
    module, x = Later(), torch.ones(2, 4)
    module.eval()
    chain = finest(observed(module, x))
    module.train()
    loss = followed(module, chain, (Again(0, 0, (Keep(0),)), Keep(1)), x, no_moments)
    with pytest.raises(StepError, match="'a' is given was changed in place"):
        loss.backward()


def test_another_way_than_expected_keeps_what_comes() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.order = [0, 1, 2]

        def forward(self, x: Tensor) -> Tensor:
            for n in self.order:
                x = self.units[n](x).tanh()
            return x.sum()

    torch.manual_seed(0)
    module, x = Turning(), torch.ones(2, 4, requires_grad=True)
    chain = finest(observed(module, x))
    module.order = [0, 2, 1, 1]
    expected = gradients(module, module(x))
    module.zero_grad()
    loss = followed(module, chain, SCHEDULES["each"](3), x, no_moments)
    assert all(map(torch.equal, expected, gradients(module, loss)))


def test_a_second_backward_runs_units_once_more() -> None:
    row, x = Row(4), torch.linspace(0.1, 1, 8, requires_grad=True)
    chain = finest(observed(row, x))
    loss = followed(row, chain, SCHEDULES["inner"](4), x, no_moments)
    runs = row.count.runs
    loss.backward(retain_graph=True)
    first, row_runs = [p.grad.clone() for p in row.parameters()], row.count.runs
    loss.backward()
    assert row.count.runs - row_runs == row_runs - runs == 6
    assert all(torch.equal(2 * a, p.grad) for a, p in zip(first, row.parameters(), strict=True))
