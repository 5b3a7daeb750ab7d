"""Ownership: own and foreign parameters, borrowed gradients, and sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_cyclic.plugin.precision.compressed import Layout, ParameterState
from lightning_cyclic.plugin.precision.sparse_state import SparseForms
from lightning_cyclic.runtime.partial_step.ownership import Ownership
from lightning_cyclic.runtime.weight_forms import ALL
from tests.runtime.partial_step.hand import cuts_of


class Model(nn.Module):
    """Three stages; the first weight is used by the last one, too."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.b = nn.Linear(3, 3)
        self.c = nn.Linear(3, 3)
        self.c.weight = self.a.weight
        self.b.bias.requires_grad_(False)


TIED = {"a.weight": (0, 2)}
STATISTICS = ["norm.running_mean", "norm.running_var"]


def held(*stages, model=None, forms=ALL):
    model = model or Model()
    cuts = cuts_of(model, ["b", "c"], tied=TIED, changed=STATISTICS)
    return model, Ownership(model, cuts, stages, forms)


@pytest.mark.parametrize(
    ("stages", "foreign"),
    [
        ((0,), ["b.weight", "b.bias", "c.bias"]),
        ((1,), ["a.weight", "a.bias", "norm.weight", "norm.bias", "c.bias"]),
        ((2,), ["a.bias", "norm.weight", "norm.bias", "b.weight", "b.bias"]),
        ((0, 1, 2), []),
    ],
)
def test_foreign_is_what_no_stage_of_the_worker_uses(stages, foreign):
    model, ownership = held(*stages)
    assert ownership.foreign == tuple(foreign)
    own = {id(p) for p in ownership.own}
    first_users = [n for n, p in model.named_parameters() if id(p) in own]
    assert set(first_users).isdisjoint(foreign)
    assert ("a.weight" in first_users) == (0 in stages)


def test_a_parameter_that_no_stage_is_known_of_is_kept():
    model = Model()
    cuts = cuts_of(model, ["b", "c"])
    model.late = nn.Parameter(torch.ones(2))
    assert "late" not in Ownership(model, cuts, [1]).foreign


def test_of_what_is_trained_in_place_of_a_weight_its_gradients_are_kept_apart():
    model = Model()
    weight = model.a.weight
    state = ParameterState("a", weight, Layout.of(torch.eye(3).bool()), torch.float32)
    state.watch()
    _, ownership = held(0, 2, model=model, forms=SparseForms([state], [state], lambda: None))
    state.master.grad = before = torch.full((3,), 5.0)
    with ownership.apart(ownership.borrowed(2)) as taken:
        model.c(torch.ones(1, 3)).sum().backward()
    assert list(taken) == ["a.weight"]
    assert torch.equal(taken["a.weight"], torch.ones(3))
    assert state.master.grad is before
    assert torch.equal(before, torch.full((3,), 5.0))
