"""What stands against cuts: each kind, with the line that is at fault."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric

from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.stages.cuts import choose_cuts
from lightning_cyclic.runtime.stages.places import CutPoints
from lightning_cyclic.runtime.stages.survey import survey
from tests.harness.runs import line_of


def surveyed(model, *batch):
    return survey(model, lambda: model(*batch))


def hard(model, *batch):
    """Return path of each place -> kinds of the hard obstacles there."""
    points = CutPoints(surveyed(model, *batch))
    return {p.path: [o.kind for o in p.obstacles if o.is_hard] for p in points.places}


def opened(model, *batch):
    """Return path of each place -> modules that are entered, as stages begin there."""
    points = CutPoints(surveyed(model, *batch))
    assert not any(o.is_hard for p in points.places for o in p.obstacles)
    return {p.path: sorted(p.split) for p in points.places}


def soft(model, *batch):
    points = CutPoints(surveyed(model, *batch))
    return {p.path: [o.kind for o in p.obstacles if not o.is_hard] for p in points.places}


def refusal(model, path, *batch):
    with pytest.raises(PlanError) as caught:
        choose_cuts(surveyed(model, *batch), [path])
    return str(caught.value)


class Row(nn.Module):
    """Layers, and modules of the kinds below, of which subclasses say how they are used."""

    parts = "a b c d"

    def __init__(self):
        super().__init__()
        for part in self.parts.split():
            name, _, kind = part.partition(":")
            self.add_module(name, globals()[kind]() if kind else nn.Linear(4, 4))


X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Plain(Row):
    def forward(self, x):
        return self.d(self.c(F.relu(self.b(self.a(x)))) + x).sum()


def test_nothing_stands_against_a_plain_row():
    assert hard(Plain(), X) == {"b": [], "c": [], "d": []}
    assert soft(Plain(), X) == {"b": [], "c": [], "d": []}


class Reads(Row):
    def forward(self, x):
        x = self.b(self.a(x))
        if x.sum() > 0:  # read
            x = -x
        return self.d(self.c(x)).sum()


def test_a_value_of_an_earlier_stage_read_in_glue():
    assert hard(Reads(), X) == {"b": [], "c": ["read"], "d": ["read"]}


def test_a_refused_cut_names_the_line_and_the_nearest_cut_that_works():
    message = refusal(Reads(), "d", X)
    assert line_of(Reads, "read").name in message
    assert "Python reads a value that an earlier stage computes, by __bool__" in message
    assert "the nearest place is 'b'; use stages=[\"b\"]" in message


def read_item(x):
    return x * x.sum().item()


def read_list(x):
    return x * x.sum(0).tolist()[0]


def read_float(x):
    return x * float(x.sum())


def read_int(x):
    return x * int(x.sum())


def read_index(x):
    return x * [1.0, 2.0][x.argmax() * 0]


def read_numpy(x):
    return x * x.detach().numpy().shape[0]


def read_equal(x):
    return x * torch.equal(x, x)


def read_while(x):
    while x.norm() > 0.1:
        x = x / 2
    return x


@pytest.mark.parametrize(
    "read",
    [read_item, read_list, read_float, read_int, read_index, read_numpy, read_equal, read_while],
)
def test_every_way_to_read_a_value(read):
    class Model(Row):
        def forward(self, x):
            return self.c(read(self.b(self.a(x)))).sum()

    assert hard(Model(), X) == {"b": [], "c": ["read"]}


class ReadsBatch(Row):
    def forward(self, x):
        x = self.a(x[: int(x.abs().sum())]) if x.sum() <= 1e-6 else x
        return self.c(self.b(x)).sum()


def test_values_of_the_batch_may_be_read():
    assert hard(ReadsBatch(), X) == {"b": [], "c": []}


class ReadsInside(Row):
    parts = "first gate last inner:Gated"

    def forward(self, x):
        return self.last(self.inner(self.first(x))).sum()


class Gated(Row):
    parts = "one two"

    def forward(self, x):
        x = self.one(x)
        if x.mean() > 100:  # read
            return x
        return self.two(x)


def test_a_finished_module_may_read_but_not_one_under_way():
    assert hard(ReadsInside(), X) == {"inner": [], "inner.two": ["read"], "last": []}


class ReadsLate(Row):
    """A cut within ``gated`` before the read and one behind the module exclude each other."""

    parts = "first gated:GatedLate last"

    def forward(self, x):
        return self.last(self.gated(self.first(x))).sum()


class GatedLate(Row):
    parts = "one two three"

    def forward(self, x):
        x = self.two(self.one(x))
        if x.mean() > 100:  # read
            return x
        return self.three(x)


def test_cuts_that_only_exclude_each_other():
    model = ReadsLate()
    seen = surveyed(model, X)
    assert choose_cuts(seen, ["gated.two"]).starts == ("gated.two",)
    assert choose_cuts(seen, ["last"]).starts == ("last",)
    with pytest.raises(PlanError, match="stage 2 cannot begin at 'last': Python reads"):
        choose_cuts(seen, ["gated.two", "last"])
    assert choose_cuts(seen, 3).starts in {("gated", "gated.two"), ("gated", "last")}
    with pytest.raises(PlanError, match="at most 3; allowed: 1 to 3"):
        choose_cuts(seen, 4)


class Stashes(Row):
    parts = "one:Stasher two:Stasher last"

    def forward(self, x):
        x = self.two(self.one(x))
        loss = self.last(x).sum()
        return loss + self.one.aux_loss  # use


class Stasher(Row):
    parts = "layer"

    def forward(self, x):
        y = self.layer(x)
        self.aux_loss = (y * y).mean()
        return y


def test_a_tensor_stashed_on_an_attribute():
    model = Stashes()
    # "one" is entered wherever the loss that it leaves behind is needed later
    assert opened(model, X) == {"two": ["one"], "last": ["one"]}


class StashesWithin(Row):
    parts = "body:StashUser last"

    def forward(self, x):
        return self.last(self.body(x)).sum()


class StashUser(Row):
    parts = "one:Stasher two"

    def forward(self, x):
        y = self.one(x)
        return self.two(y) * self.one.aux_loss  # use


def test_a_stash_that_a_finished_module_uses_up_itself():
    assert opened(StashesWithin(), X) == {"body.two": ["body", "body.one"], "last": []}


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.b(self.norm(self.a(x)))
        return self.c(self.norm(x)).sum()  # second


def test_a_module_with_changing_buffers_called_on_both_sides():
    model = Normed()
    assert hard(model, X) == {"norm": [], "b": ["buffer"], "c": []}
    message = refusal(model, "b", X)
    assert line_of(type(model), "second").name in message
    assert "'norm' has buffers that training changes, used on both sides" in message


def test_buffers_that_nothing_changes_may_be_used_on_both_sides():
    assert hard(Normed().eval(), X) == {"norm": [], "b": [], "c": []}


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head, self.out = nn.Linear(8, 4), nn.Linear(4, 1)

    def forward(self, x, y):
        both = torch.cat([self.encoder(x), self.encoder(y)], 1)
        return self.out(self.head(both)).sum()


def test_a_module_called_twice_is_a_soft_obstacle():
    model = Siamese()
    assert hard(model, X, X) == {"encoder.1": [], "encoder.2": [], "head": [], "out": []}
    shared = {"encoder.1", "encoder.2"}
    assert {path for path, kinds in soft(model, X, X).items() if kinds} == shared
    seen = surveyed(model, X, X)
    assert choose_cuts(seen, 2).starts[0] in {"head", "out"}
    assert choose_cuts(seen, 3).starts == ("head", "out")
    # only for want of others
    assert choose_cuts(seen, 4).starts == ("encoder.2", "head", "out")
    both = {"encoder.0.weight": (0, 1), "encoder.0.bias": (0, 1)}
    assert choose_cuts(seen, ["encoder.2"]).tied == both


class Writes(Row):
    def forward(self, x):
        x = x.clone()
        x[:, 0] = self.a(x)[:, 0]  # write
        return self.c(self.b(x)).sum()


def test_a_tensor_of_the_batch_overwritten_by_a_derived_value():
    model = Writes()
    assert hard(model, X) == {"b": ["in_place"], "c": []}
    message = refusal(model, "b", X)
    assert line_of(type(model), "write").name in message
    assert 'use stages=["c"]' in message


class WritesInside(Row):
    parts = "one:Doubler two"

    def forward(self, x):
        y = self.one(x)
        return (self.two(y) * x).sum()


class Doubler(Row):
    parts = "layer"

    def forward(self, x):
        x.mul_(2)  # write
        return self.layer(x)


def test_the_batch_changed_within_a_module():
    model, x = WritesInside(), X.clone()
    assert hard(model, x) == {"two": ["in_place"]}
    assert torch.equal(x, X), "the survey leaves the batch as it was"
    assert "test_obstacles.py" in refusal(model, "two", x)


class Residual(Row):
    parts = "a b c"

    def forward(self, x):
        x = self.a(x)
        y = self.b(x)
        y += x
        return self.c(F.relu(y, inplace=True)).sum()


def test_changes_of_derived_tensors_are_fine():
    assert hard(Residual(), X) == {"b": [], "c": []}


class Masker(Row):
    parts = "one two"

    def forward(self, x):
        return self.two(self.one(x)), x > 100


class ReadsMask(Row):
    parts = "masker:Masker last"

    def forward(self, x):
        h, mask = self.masker(x)
        return x if mask.any() else self.last(h).sum()  # read


def test_what_a_skipped_module_made_of_the_batch_cannot_be_read_but_of_a_split_one_it_can():
    model = ReadsMask()
    assert hard(model, X) == {"masker.two": [], "last": ["read"]}
    assert choose_cuts(surveyed(model, X), ["masker.two", "last"]).num_stages == 3


class Returned(Row):
    parts = "first outer:OuterStasher last"

    def forward(self, x):
        y, loss = self.outer(self.first(x))
        return self.last(y).sum() + loss


class OuterStasher(Row):
    parts = "inner:Stasher layer"

    def forward(self, x):
        return self.layer(self.inner(x)), self.inner.aux_loss


def test_a_stash_that_an_outer_module_returns():
    inner = ["outer", "outer.inner"]
    assert opened(Returned(), X) == {"outer": [], "outer.layer": inner, "last": []}


class UsesAtOnce(Row):
    parts = "one:Stasher two"

    def forward(self, x):
        return self.two(self.one(x) * self.one.aux_loss).sum()


def test_a_stash_that_glue_uses_before_the_cut():
    assert opened(UsesAtOnce(), X) == {"two": ["one"]}


class UsesHook(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = Deepened(), nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen = []
        self.one.body.gate.register_forward_hook(lambda m, args, out: self.seen.append(out))

    def forward(self, x):
        self.seen.clear()
        return self.last(self.two(self.one(x))).sum() + self.seen[0].sum()


class Deepened(Row):
    parts = "body:Routed"

    def forward(self, x):
        return self.body(x)


class Routed(Row):
    parts = "gate layer"

    def forward(self, x):
        return self.layer(x) * self.gate(x)


def test_an_output_that_a_hook_collects_opens_the_modules_around_its_maker():
    around = ["one", "one.body"]
    found = opened(UsesHook(), X)
    assert found["two"] == found["last"] == around


class ChangesBatch(Row):
    parts = "first change:Changer last"

    def forward(self, x):
        x = x.clone()
        y = self.change(self.first(x), x)
        return (self.last(y) * x).sum()


class Changer(Row):
    parts = "one two"

    def forward(self, y, x):
        x.mul_(2)
        return self.two(self.one(y))


def test_a_change_of_the_batch_in_a_module_that_is_split_is_repeated():
    assert hard(ChangesBatch(), X) == {
        "change": [],
        "change.one": [],
        "change.two": [],
        "last": ["in_place"],
    }


class Fills(Row):
    parts = "filler:Filler last"

    def forward(self, x):
        return self.last(self.filler(x)).sum()


class Filler(Row):
    parts = "one two"

    def forward(self, x):
        out = torch.zeros(2, 4)
        out[:, 1:] = self.one(x)[:, 1:]
        out[:, :1] = self.two(out)[:, :1]
        return out


def test_a_module_may_fill_its_own_tensors_but_not_around_a_cut():
    assert hard(Fills(), X) == {"filler.two": ["in_place"], "last": []}


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.out = nn.Linear(4, 4), nn.GRUCell(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.embed(x)
        h = torch.zeros(2, 4)
        for _ in range(3):
            h = self.cell(x, h)
        return self.out(h).sum()


def test_a_cell_unrolled_by_glue_stays_in_one_stage():
    assert hard(Unrolled(), X) == {"cell": [], "out": []}
    assert not any(soft(Unrolled(), X).values())


class ReadsMetric(Row):
    def __init__(self):
        super().__init__()
        self.metric = MeanMetric()

    def forward(self, x):
        x = self.a(x)
        self.metric(x.sum())
        return self.b(x).sum()


def test_a_metric_reads_what_it_likes():
    assert hard(ReadsMetric(), X) == {"b": []}
