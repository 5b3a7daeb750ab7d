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
    assert ownership.num_stages == 3


def test_a_parameter_that_no_stage_is_known_of_is_kept():
    model = Model()
    cuts = cuts_of(model, ["b", "c"])
    model.late = nn.Parameter(torch.ones(2))
    assert "late" not in Ownership(model, cuts, [1]).foreign


def test_freed_parameters_have_one_element_of_memory_and_their_shapes():
    model, ownership = held(1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    kept, known = model.b.weight.clone(), dict(model.named_parameters())
    shapes = {n: p.shape for n, p in known.items()}
    assert not ownership.is_freed
    ownership.free_foreign()
    assert ownership.is_freed
    for n, p in model.named_parameters():
        assert p is known[n]
        assert p.shape == shapes[n]
        assert (p.untyped_storage().nbytes() == 4) == (n in ownership.foreign)
        assert (p.grad is None) == (n in ownership.foreign)
    assert torch.equal(model.b.weight, kept)
    assert model.state_dict()["a.weight"].shape == (3, 3)


def test_restored_parameters_can_be_written():
    model, ownership = held(0)
    kept = model.a.weight.clone()
    ownership.restore()  # nothing was freed
    assert torch.equal(model.a.weight, kept)
    weight = model.b.weight
    ownership.free_foreign()
    ownership.restore()
    assert not ownership.is_freed
    assert model.b.weight is weight
    assert weight.untyped_storage().nbytes() == 36
    with torch.no_grad():
        weight.copy_(torch.arange(9.0).reshape(3, 3))
    assert weight.sum() == 36
    assert torch.equal(model.a.weight, kept)


def test_stages_lend_and_borrow():
    model, ownership = held(0)
    assert [(n, p is model.a.weight) for n, p in ownership.lent(0)] == [("a.weight", True)]
    assert ownership.lent(1) == ownership.lent(2) == []
    assert [ownership.borrowed(j) for j in range(3)] == [[], [], ["a.weight"]]
    assert [ownership.lenders(j) for j in range(3)] == [set(), set(), {0}]
    assert [p is model.a.weight for p in ownership.shared(0, [1, 2])] == [True]
    assert ownership.shared(0, [1]) == ownership.shared(2, [0, 1]) == []


def test_stages_own_what_they_use_first_and_train_what_needs_it():
    model, ownership = held(1)
    assert [id(p) for p in ownership.owned(1)] == [id(model.b.weight), id(model.b.bias)]
    assert list(ownership.trained(1)) == ["b.weight"]
    assert list(ownership.trained(2)) == ["c.bias"]
    assert [id(x) for x in ownership.own] == [id(model.b.weight), id(model.b.bias)]


def test_statistics_that_change_are_the_modules_own_memory():
    model, ownership = held(0)
    changing = ownership.changing(0)
    assert [x.data_ptr() for x in changing] == [
        model.norm.running_mean.data_ptr(),
        model.norm.running_var.data_ptr(),
    ]
    assert ownership.changing(1) == []


def test_gradients_of_borrowed_parameters_are_kept_apart():
    model, ownership = held(0, 2)
    model.a.weight.grad = before = torch.full((3, 3), 5.0)
    with ownership.apart(2) as taken:
        model.c(torch.ones(1, 3)).sum().backward()
    assert list(taken) == ["a.weight"]
    assert torch.equal(taken["a.weight"], torch.ones(3, 3))
    assert model.a.weight.grad is before
    assert torch.equal(before, torch.full((3, 3), 5.0))
    assert torch.equal(model.c.bias.grad, torch.ones(3))


def test_of_what_is_trained_in_place_of_a_weight_its_gradients_are_kept_apart():
    model = Model()
    weight = model.a.weight
    state = ParameterState("a", weight, Layout.of(torch.eye(3).bool()), torch.float32)
    state.watch()
    _, ownership = held(0, 2, model=model, forms=SparseForms([state], [state], lambda: None))
    state.master.grad = before = torch.full((3,), 5.0)
    with ownership.apart(2) as taken:
        model.c(torch.ones(1, 3)).sum().backward()
    assert list(taken) == ["a.weight"]
    assert torch.equal(taken["a.weight"], torch.ones(3))
    assert state.master.grad is before
    assert torch.equal(before, torch.full((3,), 5.0))


def test_the_lenders_own_gradients_are_not_kept_apart():
    model, ownership = held(0, 2)
    with ownership.apart(0) as taken:
        model.a(torch.ones(1, 3)).sum().backward()
    assert taken == {}
    assert torch.equal(model.a.weight.grad, torch.ones(3, 3))


def test_borrowed_parameters_without_gradients_give_none():
    model, ownership = held(0, 2)
    with ownership.apart(2) as taken:
        pass
    assert taken == {}
    assert model.a.weight.grad is None
