"""Predicted weights: any optimizer is asked where it goes, and what it cannot say is no NaN.

Stages that are not trained go nowhere, under these presets and the other ones without a flush.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.harness import processes
from tests.harness.rows import more
from tests.harness.trainers import assert_same
from tests.references.delayed import FACTORS, Chain, fit
from tests.references.rules import ONE_EACH

pytestmark = pytest.mark.multi

NUM_STEPS = 8


class Halving(Optimizer):
    """An optimizer of which nobody knows the updates: half a step of SGD."""

    updates_apart = "parameter"

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / 2)
        return loss


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.5),
    "nesterov": partial(torch.optim.SGD, momentum=0.5, nesterov=True),
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "halving": Halving,
}


class Edge(Chain):
    """A chain with any optimizer, learning rate and frozen layers."""

    def __init__(
        self, name: str, lr: float = 0.05, frozen: tuple[int, ...] = (), *, dropped: bool = False
    ) -> None:
        super().__init__("sgd", "sawtooth")
        self.edge = (name, lr, dropped)
        for j in frozen:
            self.layers[j].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        name, lr, dropped = self.edge
        trained = [p for p in self.parameters() if p.requires_grad or not dropped]
        optimizer = OPTIMIZERS[name](trained, lr=lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, FACTORS["sawtooth"])
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit_and_listen(
    make: Callable[[], Edge], strategy: dict[str, Any], **flags: Any
) -> tuple[dict[str, Tensor], list[str]]:
    """Train on this rank; return weights, and what was said of displacements."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        weights = fit(make, strategy, NUM_STEPS, **flags)
    return weights, [str(w.message) for w in said if "last displacement" in str(w.message)]


def train(make: Any, num_ranks: int, preset: str, **given: Any) -> tuple[dict[str, Tensor], Any]:
    """Train on so many ranks; return the weights, which all agree on, and what ranks have said."""
    flags = given.pop("flags", {})
    strategy = {"preset": preset, "num_microbatches": 1 if preset in ONE_EACH else 4} | given
    function = partial(fit_and_listen, make, strategy, **flags)
    ranks = processes.run(function, num_ranks, time_limit_s=90.0)
    for weights, _ in ranks:
        assert all(x.isfinite().all() for x in weights.values())
        assert_same(weights, ranks[0][0])
    return ranks[0][0], [said for _, said in ranks]


# ---------------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    ("name", "preset"),
    [more("momentum", "pipeoptim"), ("adamw", "spectrain"), ("nesterov", "pipeoptim")],
)
def test_an_optimizer_without_state_knows_no_direction_yet(name: str, preset: str) -> None:
    one, said = train(partial(Edge, name), 1, preset)
    assert said == [[]]
    flushed, _ = train(partial(Edge, name), 2, preset, flags={"val_check_interval": 1})
    assert_same(flushed, one)


@pytest.mark.parametrize(
    "name", ["sgd", more("adagrad"), more("rmsprop"), more("rprop"), "halving"]
)
def test_an_optimizer_whose_direction_is_unknown_is_displaced_and_that_is_said_once(
    name: str,
) -> None:
    one, said = train(partial(Edge, name), 1, "spectrain")
    assert len(said[0]) == 1
    assert OPTIMIZERS[name].__name__ in said[0][0]
    # flushes make updates early, when the scheduler gives another rate than the update has
    two, said = train(partial(Edge, name), 2, "spectrain", flags={"val_check_interval": 3})
    assert [len(each) for each in said] == [1, 0]  # on rank 0 alone
    assert_same(two, one)


# ---------------------------------------------------------------------- frozen stages


@pytest.mark.parametrize(
    ("preset", "frozen", "num_ranks"),
    [
        ("pipedream_2bw", (0,), 2), more("pipedream", (1, 2), 2), more("cyclic_pipeline", (3,), 4),
        ("cyclic_mp", (0, 1), 2), more("pipeoptim", (0,), 2), ("spectrain", (2, 3), 4),
        more("pipeoptim", (1,), 1),
    ],
)  # fmt: skip
def test_a_stage_may_be_frozen(preset: str, frozen: tuple[int, ...], num_ranks: int) -> None:
    weights, _ = train(partial(Edge, "adamw", frozen=frozen), num_ranks, preset)
    start = Edge("adamw").weights()
    for j in range(4):
        same = torch.equal(weights[f"layers.{j}.weight"], start[f"layers.{j}.weight"])
        assert same == (j in frozen)


@pytest.mark.parametrize("preset", [more("pipedream"), "pipeoptim"])
def test_a_frozen_stage_may_be_left_out_of_the_optimizer(preset: str) -> None:
    make = partial(Edge, "momentum", frozen=(0, 1), dropped=True)
    options = {"error_feedback": True}
    one, _ = train(make, 1, preset, **options)
    two, _ = train(make, 2, preset, **options)
    assert_same(two, one)
