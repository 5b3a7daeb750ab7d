"""Places and what lies between them."""

import torch
from torch import nn

from lightning_cyclic.runtime.stages.places import CutPoints
from lightning_cyclic.runtime.stages.survey import survey

from .scripts import Writer

LAYER = ("layer", 1, 4, 1)


def test_modules_that_begin_with_nothing_between_are_one_place():
    points = CutPoints(Writer([LAYER, ("box", [("box", [LAYER, LAYER]), LAYER])]).survey())
    assert [p.names for p in points.places] == [("1", "1.0", "1.0.0"), ("1.0.1",), ("1.1",)]
    assert [p.path for p in points.places] == ["1", "1.0.1", "1.1"]
    assert [p.before_ns for p in points.places] == [1, 2, 3]
    assert points.places[1].split == {"1", "1.0"}


def test_second_calls_and_what_comes_before_any_parameter_are_no_places():
    points = CutPoints(Writer([LAYER, ("old", 0), LAYER, ("old", 0)]).survey())
    assert [p.path for p in points.places] == ["2"]


def test_parameters_count_in_every_stage_that_uses_them_and_unused_ones_beside_others():
    model = nn.ModuleDict({k: nn.Linear(2, 2, bias=False) for k in "abc"})
    seen = survey(model, lambda: model["a"](model["b"](model["a"](torch.ones(2, 2)))))
    points = CutPoints(seen)
    cut = points.at("b").tick
    assert points.parameter_bytes(0, cut) == 16  # a
    assert points.parameter_bytes(cut, seen.end + 1) == 16 + 16 + 16  # b, a and, unused, c
    assert points.at("c") is None


def test_views_cross_apart_and_expanded_tensors_unexpanded():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            twice, again, wide = h.view(-1), h[:1], h.mean(0, keepdim=True).expand(9, 4)
            return self.b(h).sum() + twice.sum() + again.sum() + wide.sum()

    model = Views()
    seen = survey(model, lambda: model(torch.ones(2, 4)))
    assert [p.crossing_bytes for p in CutPoints(seen).places] == [4 * (2 * 4 + 2 * 4 + 4 + 4)]


def test_what_depends_on_the_batch_alone_does_not_cross_unless_a_module_made_it():
    class Masked(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.a, self.b, self.inside = Masker(), nn.Linear(4, 4), inside

        def forward(self, x):
            h, mask = self.a(x)
            mask = mask if self.inside else x > 0
            return (self.b(h) * mask).sum()

    class Masker(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x), x > 0

    sizes = {}
    for inside in (False, True):
        model = Masked(inside)
        seen = survey(model, lambda model=model: model(torch.ones(2, 4)))
        sizes[inside] = CutPoints(seen).at("b").crossing_bytes
    assert sizes == {False: 32, True: 32 + 8}
