"""What a stage that is run again leaves behind: gradients, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_cyclic.runtime.partial_step.module_state import ModuleState, Seen, state_of
from tests.runtime.partial_step.hand import cuts_of

NOTHING = Seen({}, [], [])
X = torch.linspace(-1, 1, 8).reshape(4, 2)
STATISTICS = [f"{m}.{n}" for m in ("one", "two") for n in ("running_mean", "running_var")]
COUNTS = [f"{m}.num_batches_tracked" for m in ("one", "two")]


class Model(nn.Module):
    """A normalization and a metric in each of two stages, and a buffer that is replaced."""

    def __init__(self):
        super().__init__()
        self.one, self.mean = nn.BatchNorm1d(2), MeanMetric()
        self.two, self.cat = nn.BatchNorm1d(2), CatMetric()
        self.two.register_buffer("moving", torch.zeros(2))

    def forward(self, x):
        h = self.one(x)
        self.mean(h.detach() + 3)
        h = self.two(h)
        self.cat.update(h.detach())
        self.two.moving = self.two.moving * 0.5 + h.detach().mean(0) + 1
        return h.sum()


def made():
    model = Model()
    model(X * 2)
    cuts = cuts_of(
        model, ["two"], metrics={"mean": 0, "cat": 1}, changed=[*STATISTICS, *COUNTS, "two.moving"]
    )
    return model, ModuleState(model, cuts, vars(model), [0], 1, print)


def state(model):
    buffers = {n: b.tolist() for n, b in model.named_buffers()}
    metrics = {n: repr(state_of(getattr(model, n))) for n in ("mean", "cat")}
    return buffers | metrics


def of_stage(j, picture):
    first = ("one", "mean")
    return {n: x for n, x in picture.items() if n.startswith(first) == (j == 0)}


@pytest.mark.parametrize("j", [0, 1])
def test_statistics_and_metrics_of_a_stage_are_undone(j):
    model, effects = made()
    before = state(model)
    with effects.again(j, NOTHING):
        model(X - 1)
        inside = state(model)
    after = state(model)
    assert of_stage(j, after) == of_stage(j, before)
    assert of_stage(1 - j, after) == of_stage(1 - j, inside) != of_stage(1 - j, before)
    assert all(inside[n] != before[n] for n in [*STATISTICS, *COUNTS, "two.moving", "mean", "cat"])


def test_buffers_are_the_same_objects():
    model, effects = made()
    before = {n: id(b) for n, b in model.named_buffers()}
    with effects.again(1, NOTHING):
        model(X - 1)
        assert id(model.two.moving) != before["two.moving"]
    assert {n: id(b) for n, b in model.named_buffers()} == before


def test_metrics_go_on_as_if_nothing_had_been():
    model, effects = made()
    reference, _ = made()
    with effects.again(0, NOTHING):
        model.mean(X)
        model.mean.update(X - 1)
    for m in (model, reference):
        m.mean.update(torch.tensor([7.0]))
    assert model.mean.compute() == reference.mean.compute()
    assert model.mean.update_count == reference.mean.update_count


def test_a_computed_value_and_the_last_batch_are_remembered():
    model, effects = made()
    computed, forward = model.mean.compute(), model.mean._forward_cache
    with effects.again(0, NOTHING):
        model.mean(torch.tensor(99.0))
        assert model.mean._computed is None
        assert model.mean._forward_cache == 99
    assert model.mean._computed == computed
    assert torch.equal(model.mean._forward_cache, forward)


def test_a_list_of_states_is_cut_back():
    model, effects = made()
    before = [x.clone() for x in model.cat.value]
    with effects.again(1, NOTHING):
        model.cat.update(X)
        assert len(model.cat.value) == len(before) + 1
    assert len(model.cat.value) == len(before)
    assert all(map(torch.equal, model.cat.value, before))


def test_everything_is_undone_behind_an_error():
    model, effects = made()
    before = state(model)
    with pytest.raises(KeyError), effects.again(0, NOTHING):  # noqa: PT012
        model.one(X)
        model.mean.update(X)
        raise KeyError
    assert state(model) == before


def test_gradients_stay():
    model, effects = made()
    with effects.again(1, NOTHING):
        model.two(X).square().sum().backward()
        inside = model.two.weight.grad.clone()
    assert torch.equal(model.two.weight.grad, inside)
    assert inside.any()


def test_graphs_that_hold_buffers_do_not_notice():
    model, effects = made()
    model.two.eval()  # the backward needs the statistics
    loss = model.two(X.clone().requires_grad_()).sum()
    with effects.again(1, NOTHING):
        pass
    loss.backward()
    assert model.two.weight.grad is not None


def test_buffers_that_do_not_change_are_left_alone():
    model = Model()
    effects = ModuleState(model, cuts_of(model, ["two"]), vars(model), [0], 1, print)
    with effects.again(0, NOTHING):
        model.one(X)
    assert model.one.num_batches_tracked == 1
