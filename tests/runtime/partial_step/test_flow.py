"""Pipelines without a flush, all workers in one process over the local transport."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.plan import Plan, make_plan
from lightning_cyclic.runtime.partial_step.versions import Version
from tests.harness.rows import more
from tests.references import asynchronous

from .crews import NUM_STEPS, Crew, batch

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01),
}


class Net(nn.Module):
    """Eight layers, a convolution among them, and a skip made by glue code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.layers[3] = nn.Conv1d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3)

    def step(self, x: Tensor) -> Tensor:
        skip = y = x
        for k, layer in enumerate(self.layers):
            y = torch.tanh(self.norm(layer(y.unsqueeze(0))).squeeze(0) if k == 3 else layer(y))
            skip = y if k == 1 else skip
        return (y + skip).square().mean()


def reference(crew: Crew) -> tuple[Net, dict[int, float]]:
    """Train by the rule, one micro-batch after the other; return the mean losses, too."""
    model, losses = crew.make_model(), {}
    named = dict(model.named_parameters())
    m = crew.plan.num_microbatches

    def loss(module: Any, t: int, i: int) -> Tensor:
        value: Tensor = module.step(batch(t * m + i))
        losses.setdefault(t, []).append(value.detach())
        return value

    asynchronous.train(
        model, [[named[n] for n in names] for names in crew.cuts.parameters],
        crew.make_optimizer(model.parameters()), loss,
        rule=crew.plan.weights, num_microbatches=m, num_steps=NUM_STEPS,
    )  # fmt: skip
    return model, {t: float(torch.stack(values).mean()) for t, values in losses.items()}


def compare(crew: Crew) -> None:
    """Compare what each worker holds, and was told, bit by bit."""
    expected, losses = reference(crew)
    crew.compare(expected)
    for told in crew.losses:
        assert told == losses


@cache
def plan_of(preset: str, num_stages: int, num_workers: int, num_microbatches: int) -> Plan:
    return make_plan(
        preset,
        num_stages=num_stages,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        relayed=(),
    )


PLANS = [
    ("pipedream_2bw", 2, 2, 1), ("pipedream_2bw", 2, 2, 4), ("pipedream_2bw", 4, 4, 3),
    ("pipedream_2bw", 4, 2, 4), ("pipedream_2bw", 4, 1, 4), ("cyclic_pipeline", 2, 2, 1),
    ("cyclic_pipeline", 2, 2, 3), ("cyclic_pipeline", 4, 4, 3), ("cyclic_pipeline", 4, 4, 6),
    ("cyclic_pipeline", 4, 2, 4), ("cyclic_pipeline", 4, 1, 4), ("pipedream", 2, 2, 1),
    ("pipedream", 4, 4, 1), ("pipedream", 4, 2, 1), ("pipedream", 8, 4, 1),
    ("cyclic_mp", 2, 3, 2), ("cyclic_mp", 2, 2, 4), ("cyclic_mp", 4, 10, 4),
    ("cyclic_mp", 4, 4, 4), ("cyclic_mp", 4, 4, 7), ("cyclic_mp", 4, 1, 4),
]  # fmt: skip
SOME = [PLANS[k] for k in (2, 3, 7, 10, 12, 15, 19)]  # of each preset the ones that differ most
EACH = [  # with one optimizer and the other in turn
    (numbers, optimizer) if numbers in SOME and (j + k) % 2 == 0 else more(numbers, optimizer)
    for j, numbers in enumerate(PLANS)
    for k, optimizer in enumerate(("sgd", "adamw"))
]
FLUSHES = [(0,), (3, 4, 8), tuple(range(NUM_STEPS))]  # behind which steps


def named(x: Any) -> str:
    return x if isinstance(x, str) else "-".join(map(str, x))


@pytest.mark.parametrize(("numbers", "optimizer"), EACH, ids=named)
def test_the_rule_bit_by_bit(numbers: tuple[str, int, int, int], optimizer: str) -> None:
    crew = Crew(plan_of(*numbers), Net, OPTIMIZERS[optimizer])
    crew.train()
    compare(crew)


@pytest.mark.parametrize(
    ("numbers", "flush_after"),
    [
        (numbers, flush) if (n, k) in ((0, 0), (2, 1), (4, 2), (5, 1)) else more(numbers, flush)
        for n, numbers in enumerate(PLANS[2::3])
        for k, flush in enumerate(FLUSHES)
    ],
    ids=named,
)
def test_a_flush_changes_no_number(
    numbers: tuple[str, int, int, int], flush_after: tuple[int, ...]
) -> None:
    crew = Crew(plan_of(*numbers), Net, OPTIMIZERS["sgd"])
    crew.train(flush_after)
    compare(crew)


@pytest.mark.parametrize("numbers", [n if n in SOME else more(n) for n in PLANS[3::4]], ids=named)
def test_running_a_stage_again_reads_the_same_version(
    numbers: tuple[str, int, int, int],
) -> None:
    crew = Crew(plan_of(*numbers), Net, OPTIMIZERS["sgd"], remat="always")
    crew.train(flush_after=(5,))
    compare(crew)


def alive(crew: Crew, versions: list[Any], j: int) -> int:
    """Count the memories that versions of a stage have, its own parameters' among them."""
    name = crew.cuts.parameters[j][0]
    w = crew.plan.owner(j)
    found = {dict(crew.models[w].named_parameters())[name].data_ptr()}
    found |= {v[name].data_ptr() for r in versions if (v := r()) is not None and v.j == j}
    return len(found)


@pytest.mark.parametrize("numbers", [n if n in SOME else more(n) for n in PLANS[:15]], ids=named)
def test_as_many_versions_are_alive_as_the_program_says(
    numbers: tuple[str, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(*numbers)
    crew = Crew(plan, Net, OPTIMIZERS["sgd"])
    versions: list[Any] = []
    most = [1] * plan.num_stages
    made = Version.__init__

    def noted(self: Version, j: int, *args: Any) -> None:
        made(self, j, *args)
        versions.append(weakref.ref(self))

    def counted(w: int, t: int, j: int) -> None:
        crew.optimizers[w].step()
        most[j] = max(most[j], alive(crew, versions, j))  # the most are alive behind an update

    monkeypatch.setattr(Version, "__init__", noted)
    monkeypatch.setattr(crew, "apply", counted)
    gc.disable()  # by reference count alone
    try:
        crew.train()
    finally:
        gc.enable()
    assert most == [plan.depth(j) for j in range(plan.num_stages)]
    assert most == [_depth(plan, j) for j in range(plan.num_stages)]


def _depth(plan: Plan, j: int) -> int:
    """Return what the papers say."""
    if plan.weights == "stashed":
        return plan.num_stages - j
    return 1 if plan.weights == "freshest" and j == plan.num_stages - 1 else 2


class Tied(Net):
    """Use the first layer's weights again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[7] = nn.Linear(6, 6)
        self.layers[7].weight = self.layers[0].weight


@pytest.mark.parametrize(("numbers", "optimizer"), EACH[:30], ids=named)
def test_tied_parameters_have_one_value_for_each_micro_batch(
    numbers: tuple[str, int, int, int], optimizer: str
) -> None:
    crew = Crew(plan_of(*numbers), Tied, OPTIMIZERS[optimizer])
    assert crew.cuts.tied == {"layers.0.weight": (0, numbers[1] - 1)}
    crew.train(flush_after=(4,))
    compare(crew)
