"""Predicted weights in a flow, against gradients put together by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.plan import Plan, make_plan
from tests.references import asynchronous
from tests.runtime.partial_step.crews import NUM_STEPS, Crew, batch

LR = 0.1


def ahead_sgd(weights: Tensor, state: dict[str, Tensor], updates: int) -> Tensor:
    return weights - LR * updates * state["momentum_buffer"]


def ahead_adam(weights: Tensor, state: dict[str, Tensor], updates: int) -> Tensor:
    t = float(state["step"])
    mean = state["exp_avg"] / (1 - 0.9**t)
    square = state["exp_avg_sq"] / (1 - 0.999**t)
    return weights - LR * updates * mean / (square.sqrt() + 1e-8)


OPTIMIZERS: dict[str, Any] = {
    "sgd": (lambda ps: torch.optim.SGD(ps, LR, momentum=0.9), ahead_sgd),
    "adam": (lambda ps: torch.optim.Adam(ps, LR), ahead_adam),
}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))

    def step(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Seer(Crew):
    """Workers that predict with the formula of the test."""

    def __init__(
        self, plan: Plan, optimizer: str, *, make_model: Any = Chain, **options: Any
    ) -> None:
        make, self.ahead = OPTIMIZERS[optimizer]
        super().__init__(plan, make_model, make, **options)

    def guess(self, w: int, stage: Sequence[nn.Parameter], v: int, updates: int) -> list[Tensor]:
        state = self.optimizers[w].state
        assert all(state.get(p, {}).get("step", v) == v for p in stage)
        return [
            self.ahead(p.detach(), state[p], updates) if p in state else p.detach().clone()
            for p in stage
        ]


def compare(seer: Seer, *, runs_again: bool = False) -> None:
    model: Any = Chain()
    make = seer.make_optimizer
    asynchronous.train_predicted(
        model.layers, seer.plan.num_stages, make(model.parameters()), batch, seer.ahead,
        preset=seer.plan.preset, num_microbatches=seer.plan.num_microbatches, num_steps=NUM_STEPS,
        runs_again=runs_again,
    )  # fmt: skip
    seer.compare(model)


PLANS = [
    ("pipeoptim", 2, 2, 1), ("pipeoptim", 4, 4, 1), ("pipeoptim", 4, 2, 1), ("pipeoptim", 4, 1, 1),
    ("spectrain", 2, 2, 1), ("spectrain", 4, 4, 1), ("spectrain", 4, 2, 1),
]  # fmt: skip


def named(x: Any) -> str:
    return x if isinstance(x, str) else "-".join(map(str, x))


@cache
def plan_of(preset: str, num_stages: int, num_workers: int, num_microbatches: int) -> Plan:
    return make_plan(
        preset, num_stages=num_stages, num_workers=num_workers, num_microbatches=num_microbatches
    )


@pytest.mark.parametrize(
    ("numbers", "optimizer"), list(product(PLANS, ["sgd", "adam"])), ids=named
)
def test_the_rule_bit_by_bit(numbers: tuple[str, int, int, int], optimizer: str) -> None:
    seer = Seer(plan_of(*numbers), optimizer)
    seer.train()
    compare(seer)


@pytest.mark.parametrize("flush_after", [(0,), (3, 4, 8), tuple(range(NUM_STEPS))])
@pytest.mark.parametrize("numbers", PLANS[1::4], ids=lambda n: "-".join(map(str, n)))
def test_a_flush_changes_no_number(
    numbers: tuple[str, int, int, int], flush_after: tuple[int, ...]
) -> None:
    seer = Seer(plan_of(*numbers), "sgd")
    seer.train(flush_after)
    compare(seer)


@pytest.mark.parametrize("numbers", PLANS, ids=named)
def test_a_stage_that_is_run_again_has_the_weights_of_its_backward(
    numbers: tuple[str, int, int, int],
) -> None:
    seer = Seer(plan_of(*numbers), "sgd", remat="always")
    seer.train()
    compare(seer, runs_again=True)


class Autocast(Chain):
    def step(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().step(x).float()


def test_weights_are_guessed_under_autocast_too() -> None:
    seer = Seer(plan_of("pipeoptim", 2, 2, 1), "sgd", make_model=Autocast)
    seer.train()
    other = Seer(plan_of("pipeoptim", 2, 1, 1), "sgd", make_model=Autocast)
    other.train()
    for session in seer.sessions:
        (alone,) = other.sessions
        for j in session.own.ownership.stages:
            for name in seer.cuts.parameters[j]:
                given, wanted = (dict(x.module.named_parameters()) for x in (session, alone))
                assert torch.equal(given[name], wanted[name])
