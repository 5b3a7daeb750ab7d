"""What a step does to a module is undone."""

import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from lightning_cyclic.runtime.snapshot import untouched
from lightning_cyclic.runtime.stages.survey import survey


class Busy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.slow = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("replaced", torch.zeros(2))
        self.count, self.outputs, self.queue = 0, [], deque([1])
        self.by_kind = {"a": [1], "b": {2}}
        self.state = torch.zeros(2)
        self.own = torch.Generator().manual_seed(3)
        self.draws, self.dice = np.random.default_rng(4), random.Random(5)
        self.array = np.zeros(3)

    def forward(self, x):
        h = self.norm(self.layer(x.mul_(2))) + torch.rand(2) + random.random() + np.random.rand()
        self.eval()
        self.replaced = h.mean(0)
        self.count += 1
        self.outputs.append(h)
        self.queue.append(2)
        self.by_kind["a"].append(2)
        self.by_kind["c"] = self.by_kind["b"].add(3)
        self.stash = h
        self.state += 1
        self.array += torch.rand((), generator=self.own).item()
        self.array[0] = self.draws.random() + self.dice.random()
        for mine, fast in zip(self.slow.parameters(), self.layer.parameters(), strict=True):
            mine.mul_(0.9).add_(fast, alpha=0.1)
        self.layer.register_forward_hook(lambda *_: None)
        return h


def picture(model):
    plain = {
        path: {k: repr(v) for k, v in m.__dict__.items() if not k.startswith("_") or "hook" in k}
        for path, m in model.named_modules()
    }
    return plain, {k: v.clone() for k, v in model.state_dict().items()}


def test_a_survey_leaves_no_trace():
    model, x = Busy(), torch.ones(3, 2)
    before, weights = picture(model)
    array, rows = model.array, model.array.copy()
    own, draws, dice = (
        model.own.get_state(), model.draws.bit_generator.state, model.dice.getstate(),
    )  # fmt: skip
    buffer, states = model.replaced, (random.getstate(), torch.get_rng_state(), np.random.rand)
    drawn = np.random.get_state()[1].tolist(), np.random.get_state()[2]
    survey(model, lambda: model(x), clock="measured")
    after, weights_after = picture(model)
    assert after == before
    for name, value in weights.items():
        assert torch.equal(weights_after[name], value), name
    assert model.replaced is buffer
    assert torch.equal(x, torch.ones(3, 2))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == drawn
    assert torch.equal(model.own.get_state(), own)
    assert (model.draws.bit_generator.state, model.dice.getstate()) == (draws, dice)
    assert model.array is array
    assert array.tolist() == rows.tolist()
    assert all(m.training for m in model.modules())


def test_it_also_works_when_the_body_raises():
    model = Busy()

    def raise_late():
        with untouched(model) as keeper:
            model(torch.ones(3, 2))
            assert set(keeper.changed_buffers()) >= {"replaced", "norm.running_mean"}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raise_late()
    assert model.count == 0
    assert not model.norm.running_mean.any()
    assert not hasattr(model, "stash")


def test_what_the_keeper_was_told_comes_back():
    model, x = nn.Linear(2, 2), torch.ones(2)
    with untouched(model) as keeper:
        keeper.keep(x)
        x.add_(1)
        keeper.keep(x)  # the first copy counts
    assert torch.equal(x, torch.ones(2))
