"""Versions: what forwards read, how long it lives, and where gradients go."""

from __future__ import annotations

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


def test_the_modules_own_are_back_behind_an_error():
    model = Two()
    versions, own = made(model), [id(p) for p in model.parameters()]
    with pytest.raises(KeyError), versions.shown(forward(0, 0, 0), [0]):  # noqa: PT012
        assert [id(p) for p in model.parameters()] != own
        raise KeyError
    assert [id(p) for p in model.parameters()] == own


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
