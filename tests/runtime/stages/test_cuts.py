"""From surveys of real modules to stages."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.stages.cuts import Cuts, choose_cuts
from lightning_cyclic.runtime.stages.places import CutPoints
from lightning_cyclic.runtime.stages.survey import survey


@pytest.fixture(scope="module")
def gpt2():
    config = GPT2Config(
        n_layer=4,
        n_embd=16,
        n_head=2,
        vocab_size=32,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    ids = torch.arange(16).reshape(2, 8)
    return survey(model, lambda: model(input_ids=ids, labels=ids).loss)


def test_gpt2_has_a_tied_weight_in_the_first_and_the_last_stage(gpt2):
    cuts = choose_cuts(gpt2, ["transformer.h.1", "transformer.h.3"])
    assert cuts.tied == {"transformer.wte.weight": (0, 2)}
    assert cuts.split == {"transformer"}
    assert cuts.parameters[0][:3] == (
        "transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight",
    )  # fmt: skip
    assert cuts.parameters[2][-1] == "transformer.ln_f.bias"
    assert {n for names in cuts.parameters for n in names} == set(gpt2.parameters)
    assert sum(map(len, cuts.parameters)) == len(gpt2.parameters)


def test_nothing_stands_against_any_place_of_gpt2_but_its_bare_end(gpt2):
    places = CutPoints(gpt2).places
    assert [p.path for p in places if p.obstacles] == ["lm_head"]
    assert [o.kind for o in places[-1].obstacles] == ["bare"]
    assert next(p for p in places if p.path == "transformer.h.2").names == (
        "transformer.h.2", "transformer.h.2.ln_1",
    )  # fmt: skip


def test_only_the_hidden_state_crosses_between_blocks(gpt2):
    place = CutPoints(gpt2).at("transformer.h.2")
    assert place.crossing_bytes == 2 * 8 * 16 * 4
    within = CutPoints(gpt2).at("transformer.h.2.mlp")
    assert within.crossing_bytes == 2 * place.crossing_bytes  # and the residual
    assert within.split == {"transformer", "transformer.h.2"}


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_any_number_of_stages(gpt2, stages):
    cuts = choose_cuts(gpt2, stages)
    assert cuts.num_stages == stages == len(cuts.parameters) == len(cuts.buffers)
    assert all(cuts.parameters)
    assert choose_cuts(gpt2, cuts.starts) == cuts
    assert Cuts.from_data(json.loads(json.dumps(cuts.as_data()))) == cuts
    older = cuts.as_data()
    del older["written"]  # by which a weight that the step may change was not known
    assert Cuts.from_data(older).written == {n for names in cuts.parameters for n in names}


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1, self.d2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.mid = nn.Conv2d(4, 4, 3, padding=1)
        self.u2, self.u1 = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        a = F.relu(self.d1(x))
        b = F.relu(self.d2(F.max_pool2d(a, 2)))
        m = F.relu(self.mid(F.max_pool2d(b, 2)))
        u = F.relu(self.u2(torch.cat([F.interpolate(m, scale_factor=2), b], 1)))
        return F.mse_loss(self.u1(torch.cat([F.interpolate(u, scale_factor=2), a], 1)), x)


def test_skips_made_by_glue_cross():
    model, x = UNet(), torch.ones(1, 3, 8, 8)
    seen = survey(model, lambda: model(x))
    sizes = {p.path: p.crossing_bytes // 4 for p in CutPoints(seen).places}
    a, b, pooled = 4 * 64, 4 * 16, 4 * 4
    assert sizes["d2"] == a + b  # the second is the input, pooled
    assert sizes["mid"] == a + b + pooled
    assert sizes["u2"] == a + 2 * b
    assert sizes["u1"] == 2 * a


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.metric, self.never = MeanMetric(), MeanMetric()
        self.register_buffer("own", torch.ones(4))
        self.unused = nn.Linear(4, 4)
        self.idle = nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.a(x)
        self.metric(x.detach().sum())
        x = self.b(self.act(self.norm(x)))
        return x.sum()


@pytest.fixture
def everything():
    model, x = Everything(), torch.ones(2, 4)
    return survey(model, lambda: model(x))


def test_buffers_metrics_and_unused_parameters(everything):
    cuts = choose_cuts(everything, ["norm", "b"])
    assert cuts.parameters == (
        ("a.weight", "a.bias", "unused.weight", "unused.bias", "idle.weight", "idle.bias"),
        ("norm.weight", "norm.bias"),
        ("b.weight", "b.bias"),
    )
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert set(cuts.buffers[0]) == {"own", *(f"idle.{name}" for name in statistics)}
    assert set(cuts.buffers[1]) == {f"norm.{name}" for name in statistics}
    assert cuts.buffers[2] == ()
    assert cuts.changed == {f"norm.{name}" for name in statistics}
    assert cuts.metrics == {"metric": 0, "never": 2}
    assert cuts.tied == {}


class Resting(nn.Module):
    """Keep two layers, of which a step uses the first."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.always(x)


def test_unused_parameters_are_where_the_module_around_them_is_called():
    model, x = nn.Sequential(nn.Linear(4, 4), Resting(), nn.Linear(4, 1)), torch.ones(2, 4)
    seen = survey(model, lambda: model(x).sum())
    one, two = choose_cuts(seen, ["1"]), choose_cuts(seen, ["1", "2"])
    assert {"1.sometimes.weight", "1.sometimes.bias"} <= set(one.parameters[1])
    assert {"1.always.weight", "1.sometimes.weight"} <= set(two.parameters[1])


def test_a_module_without_parameters_begins_a_stage_by_name_only(everything):
    assert choose_cuts(everything, ["act"]).starts == ("act",)
    assert choose_cuts(everything, "act").starts == ("act",)
    assert not any(p.has_parameters for p in CutPoints(everything).places if p.path == "act")
    assert choose_cuts(everything, 3).starts == ("norm", "b")


def test_a_metric_before_a_cut_is_no_obstacle(everything):
    assert not any(p.obstacles for p in CutPoints(everything).places)
    with pytest.raises(PlanError, match="'unused', a module that the step does not call"):
        choose_cuts(everything, ["unused"])
