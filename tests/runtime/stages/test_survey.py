"""One run of a step: what is noted."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_cyclic.runtime.stages.survey import survey

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("fixed", torch.ones(3))

    def forward(self, x):
        h = self.body(x) * self.scale * self.fixed
        self.seen += len(x)
        h = self.norm(h)
        return self.head(h).sum() + self.head(h).mean()


def seen_of(model, *batch):
    return survey(model, lambda: model(*batch))


def users(seen, name):
    paths = []
    for use in seen.parameters[name].uses:
        paths.append(None if use.call is None else seen.calls[use.call].path)
    return paths


def test_uses_of_parameters_by_their_module_by_glue_and_by_nobody():
    seen = seen_of(Net(), X)
    assert users(seen, "body.0.weight") == ["body.0"]
    assert users(seen, "scale") == [""]
    assert users(seen, "head.bias") == ["head", "head"]
    assert users(seen, "unused.weight") == []
    assert seen.parameters["body.0.weight"].num_bytes == 48


def test_a_parameter_that_only_an_unseen_kernel_uses_counts_where_its_module_is_called():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            with torch._C.DisableTorchFunction():
                return x * self.weight

    model = nn.Sequential(nn.Linear(4, 4), Hidden(), nn.Linear(4, 4))
    seen = seen_of(model, X)
    assert users(seen, "1.weight") == ["1"]
    returned = next(iter(next(c for c in seen.calls if c.path == "1").outputs))
    assert seen.values[returned].derived


def test_buffers_that_change():
    seen = seen_of(Net(), X)
    assert set(seen.changed) == {
        "seen",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    first, last = seen.changed["norm.running_mean"][:2]
    norm = next(c for c in seen.calls if c.path == "norm")
    assert norm.begin < first.tick <= last.tick < norm.end
    assert seen.calls[0].begin < seen.buffers["fixed"] < norm.begin
    assert seen.buffers["norm.running_mean"] == first.tick
    assert set(seen_of(Net().eval(), X).changed) == {"seen"}


class Measured(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.accuracy = MulticlassAccuracy(3)
        self.loss = MeanMetric()
        self.never = MeanMetric()
        self.many = MetricCollection(
            {"a": MulticlassAccuracy(3), "b": MulticlassAccuracy(3, average="micro")}
        )

    def training_step(self, batch):
        x, y = batch
        z = self.net(x)
        loss = F.cross_entropy(z, y)
        self.accuracy(z, y)
        self.loss.update(loss)
        self.many.update(z, y)
        return {"loss": loss, "z": z}


def test_metrics_are_seen_and_left_alone():
    model, batch = Measured(), (X, torch.tensor([0, 2]))
    model.loss.update(3.0)
    seen = survey(model, lambda: model.training_step(batch))
    assert {path: len(ticks) > 0 for path, ticks in seen.metrics.items()} == {
        "accuracy": True, "loss": True, "never": False, "many.a": True, "many.b": True,
    }  # fmt: skip
    assert model.loss.compute() == 3.0
    assert model.accuracy.update_count == 0
    assert not model.accuracy.tp.any()
    assert not model.many._groups_checked
    assert not seen.reads or all(seen.in_metric(seen.calls[r.at.call].path) for r in seen.reads)


def test_the_step_s_result_is_used_at_its_end():
    model, batch = Measured(), (X, torch.tensor([0, 2]))
    seen = survey(model, lambda: model.training_step(batch))
    last = [v for v in seen.values if v.uses and v.uses[-1].tick == seen.end]
    assert sorted(v.num_bytes for v in last) == [4, 24]


def test_a_step_that_raises_says_so_and_leaves_no_hands_behind():
    class Bad(Net):
        def forward(self, x):
            super().forward(x)
            raise KeyError("mine")

    model = Bad()
    with pytest.raises(KeyError, match="mine"):
        seen_of(model, X)
    assert all("_call_impl" not in m.__dict__ for m in model.modules())
    assert not model.norm.running_mean.any()
