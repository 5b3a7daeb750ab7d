"""Places named by the user: what is refused, and what is proposed instead."""

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.stages.places import CutPoints, named_places

from .scripts import Writer

LAYER = ("layer", 1, 1, 1)
POINTS = CutPoints(
    Writer([LAYER, LAYER, ("box", [LAYER, LAYER]), LAYER, ("read",), LAYER]).survey()
)


def test_places_in_order():
    assert [p.path for p in named_places(POINTS, ["1", "2.1", "3"])] == ["1", "2.1", "3"]
    assert named_places(POINTS, []) == []


def test_an_inner_module_that_begins_with_its_parent_splits_it():
    (outer,), (inner,) = named_places(POINTS, ["2"]), named_places(POINTS, ["2.0"])
    assert outer.tick < inner.tick
    assert (outer.split, inner.split) == (frozenset(), {"2"})


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["9"], r"names '9', which is no module of Script; allowed: 1, 2, 2.1, 3; name some"),
        ([""], r"names '', which is no module"),
        (["2.2"], r"names '2.2', which is no module .*; did you mean '2.[01]'\?"),
        (["3", "1"], r'not begin one after the other; .*use stages=\["1", "3"\]'),
        (["1", "1"], r'one after the other; .*each once; use stages=\["1"\]'),
        (["0"], r"'0': stage 0, from the step's beginning to '0', would be without parameters"),
        (["0"], r'nearest place is \'1\'; use stages=\["1"\]'),
        (["2", "2.0"], r"stage 1, from '2' to '2.0', would be without parameters of its own"),
        (["5"], r"stage 1 cannot begin at '5': Python reads a value .* by item, at script.py:1"),
        (["1", "5"], r'nearest place is \'3\'; use stages=\["1", "3"\]'),
        (["2.1", "3", "5"], r"no place between its neighbours; leave it out, or give a number"),
    ],
)
def test_refusals(paths, message):
    with pytest.raises(PlanError, match=message):
        named_places(POINTS, paths)


def test_what_is_proposed_works():
    with pytest.raises(PlanError) as caught:
        named_places(POINTS, ["1", "5"])
    proposed = eval(str(caught.value).partition("stages=")[2].removesuffix(")"))
    assert [p.path for p in named_places(POINTS, proposed)] == proposed
