"""Versions: what forwards read, how long it lives, and where gradients go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.runtime.partial_step.versions import Versions

X = torch.linspace(-1, 1, 6).reshape(2, 3)
# stage 0 of step t reads t-1 and then t, stage 1 reads t
PLAN = make_plan("cyclic_pipeline", num_stages=2, num_workers=2, num_microbatches=2)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def forward(t, i, j):
    return Action(kind=Kind.F, t=t, i=i, j=j, v=PLAN.reads(t, i, j))


def stages_of(model):
    """Return the parameters of each child, by name."""
    stages = {0: {}, 1: {}}
    for name, p in model.named_parameters():
        stages["ab".index(name[0])][name] = p
    return stages


def made(model, stages=None, newest=0):
    return Versions(model, PLAN, stages or stages_of(model), newest, {0: [0], 1: [1]})


def update(model, versions, j):
    """Let the parameters of a stage grow by 1."""
    versions.begin_update(j)
    with torch.no_grad():
        for p in model.get_submodule("ab"[j]).parameters():
            p.add_(1)


def value(model, j):
    """Return by how much the shown parameters of a stage have grown."""
    bias = model.get_submodule("ab"[j]).bias
    return round(float((bias - getattr(Two(), "ab"[j]).bias)[0].detach()))


def test_forwards_read_what_the_plan_says():
    model = Two()
    versions = made(model)
    read = []
    for t in range(3):
        for i in range(2):
            for j in range(2):
                with versions.shown(forward(t, i, j), [j]):
                    read.append((t, i, j, value(model, j)))
                assert value(model, j) == versions.newest(j) == t
        for j in (1, 0):
            update(model, versions, j)
    assert read == [(t, i, j, PLAN.reads(t, i, j)) for t, i, j, _ in read]
    assert [v for t, i, j, v in read if t == 2] == [1, 2, 2, 2]


def test_the_modules_own_are_back_behind_an_error():
    model = Two()
    versions, own = made(model), [id(p) for p in model.parameters()]
    with pytest.raises(KeyError), versions.shown(forward(0, 0, 0), [0]):  # noqa: PT012
        assert [id(p) for p in model.parameters()] != own
        raise KeyError
    assert [id(p) for p in model.parameters()] == own


def test_the_newest_version_shares_the_modules_memory_until_an_update():
    model = Two()
    versions = made(model)
    with versions.shown(forward(0, 0, 0), [0]) as (first,):
        pass
    before = model.a.weight.data_ptr()
    assert first["a.weight"].data_ptr() == before
    update(model, versions, 0)
    assert first["a.weight"].data_ptr() == before
    assert model.a.weight.data_ptr() != before


def test_nothing_is_copied_that_no_one_reads():
    model = Two()
    versions = made(model)
    for i in range(2):
        with versions.shown(forward(0, i, 1), [1]):
            pass
    before = model.b.weight.data_ptr()
    update(model, versions, 1)  # step 1 reads version 1 on the last stage
    assert model.b.weight.data_ptr() == before


def test_a_version_dies_with_its_last_reader():
    model = Two()
    versions = made(model)
    with versions.shown(forward(0, 0, 0), [0]) as (first,):
        graph = model.a(X).sum()
    known = weakref.ref(first)
    with versions.shown(forward(0, 1, 0), [0]):
        pass
    update(model, versions, 0)
    gc.disable()
    try:
        del first
        assert known() is not None  # F(1,0) reads it, too
        with versions.shown(forward(1, 0, 0), [0]):
            assert value(model, 0) == 0
        with versions.shown(forward(1, 1, 0), [0]):
            assert value(model, 0) == 1
        update(model, versions, 0)
        assert known() is None
    finally:
        gc.enable()
    graph.backward()  # autograd holds what it needs by itself


def test_the_backward_of_an_old_version_sees_its_own_weights():
    reference = Two()
    reference(X).square().sum().backward()
    model = Two()
    versions = made(model)
    with versions.shown(forward(0, 0, 0), [0, 1]) as shown:
        loss = model(X).square().sum()
    for j in range(2):
        update(model, versions, j)
    with versions.backward(shown):
        loss.backward()
    for (n, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, expected.grad), n
        assert all(n not in v or v[n].grad is None for v in shown)


def test_gradients_are_added_to_those_of_earlier_micro_batches():
    model = Two()
    versions = made(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    with versions.shown(forward(0, 0, 1), [1]) as shown:
        loss = model(X).sum()
    with versions.backward(shown):
        loss.backward()
    assert torch.equal(model.b.bias.grad, torch.full((3,), 4.0))  # 2 + one for each row
    assert all(p.grad is None for v in shown for p in v.values())


def test_gradients_are_at_home_behind_a_backward_that_fails():
    model = Two()
    versions = made(model)
    grads = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    for n, p in model.named_parameters():
        p.grad = grads[n]
    with versions.shown(forward(0, 0, 0), [0, 1]) as shown:
        pass
    with pytest.raises(KeyError), versions.backward(shown):
        raise KeyError
    for n, p in model.named_parameters():
        assert p.grad is grads[n]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.GRU(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.b(self.a(x)[0])


def test_recurrent_layers_that_keep_their_weights_in_a_list():
    model = Recurrent()
    versions, expected = made(model), model(X)
    with versions.shown(forward(0, 0, 0), [0]) as kept:
        pass
    update(model, versions, 0)
    assert not torch.equal(model(X), expected)
    with versions.shown(forward(1, 0, 0), [0]) as shown:
        assert torch.equal(model(X), expected)
    assert kept == shown
    assert not torch.equal(model(X), expected)


class Tied(Two):
    def __init__(self):
        super().__init__()
        self.b.weight = self.a.weight


def test_tied_parameters_are_shown_in_every_module_that_has_them():
    model = Tied()
    versions = made(model)
    own = model.a.weight
    with versions.shown(forward(0, 0, 0), [0]) as (version,):
        assert model.a.weight is model.b.weight is version["a.weight"]
    assert model.a.weight is model.b.weight is own


def test_what_a_checkpoint_needs_comes_back():
    model = Two()
    versions = made(model)
    for t in range(2):
        for i in range(2):
            for j in range(2):
                with versions.shown(forward(t, i, j), [j]):
                    pass
        for j in range(2):
            update(model, versions, j)
    kept = versions.previous()["versions"]
    assert {n: sorted(values) for n, values in kept.items()} == {"a.weight": [1], "a.bias": [1]}
    again = made(model, newest=2)
    again.put_previous({"versions": kept, "owed": {}})
    for j in range(2):
        with again.shown(forward(2, 0, j), [j]):
            assert value(model, j) == PLAN.reads(2, 0, j) == (1, 2)[j]
