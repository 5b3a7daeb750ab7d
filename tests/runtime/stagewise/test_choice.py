"""The choice of places is the best of all, by trying them all."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.stagewise.choice import best_places, split_by
from lightning_cyclic.runtime.stagewise.places import Terrain

from .scripts import Writer

layers = st.tuples(st.just("layer"), st.integers(0, 9), st.integers(0, 5), st.integers(0, 5))
leaves = (
    layers | layers | layers | st.just(("read",)) | st.tuples(st.just("old"), st.integers(0, 5))
)
scripts = st.recursive(
    st.lists(leaves, min_size=1, max_size=4),
    lambda inner: st.lists(leaves | st.tuples(st.just("box"), inner), min_size=1, max_size=4),
    max_leaves=7,
)


def allowed(terrain, places, limit):
    """Say whether stages may begin at all of these places."""
    split = split_by(places)
    ticks = [0, *(p.tick for p in places), terrain.survey.end + 1]
    return (
        not any(o.is_hard for p in places for o in terrain.obstacles.against(p.tick, split))
        and all(
            terrain.first_uses_before(a) < terrain.first_uses_before(b) for a, b in pairwise(ticks)
        )
        and (limit is None or all(terrain.kept_bytes(a, b) <= limit for a, b in pairwise(ticks)))
    )


def slowest(terrain, places):
    ends = [0, *(p.before_ns for p in places), terrain.survey.duration_ns]
    return max(b - a for a, b in pairwise(ends))


def best_of_all(terrain, stages, limit):
    """Return the slowest stage's time for the best choice without shared modules, else with."""
    for places in ([p for p in terrain.places if not p.obstacles], terrain.places):
        choices = combinations(places, stages - 1)
        found = [slowest(terrain, c) for c in choices if allowed(terrain, c, limit)]
        if found:
            return min(found)
    return None


@settings(max_examples=300, deadline=None)
@given(scripts, st.integers(1, 5), st.none() | st.integers(0, 40))
def test_as_good_as_the_best_of_all(script, stages, limit):
    terrain = Terrain(Writer([("layer", 1, 1, 1), *script]).survey())
    best = best_of_all(terrain, stages, limit)
    if best is None:
        with pytest.raises(PlanError):
            best_places(terrain, stages, limit)
        return
    places = best_places(terrain, stages, limit)
    assert len(places) == stages - 1
    assert allowed(terrain, places, limit)
    assert slowest(terrain, places) == best


@settings(max_examples=100, deadline=None)
@given(scripts)
def test_the_number_that_a_refusal_allows_is_the_largest(script):
    terrain = Terrain(Writer([("layer", 1, 1, 1), *script]).survey())
    most = max(k for k in range(1, 20) if best_of_all(terrain, k, None) is not None)
    assert len(best_places(terrain, most)) == most - 1
    with pytest.raises(PlanError, match=rf"at most {most}; allowed: 1 to {most}; use .*={most}\)"):
        best_places(terrain, most + 1)


@settings(max_examples=100, deadline=None)
@given(scripts, st.integers(1, 3))
def test_the_memory_that_a_refusal_allows_is_the_least(script, stages):
    terrain = Terrain(Writer([("layer", 1, 1, 1), *script]).survey())
    if best_of_all(terrain, stages, None) is None:
        return
    with pytest.raises(PlanError, match=rf"stages={stages}; allowed: \d+ bytes") as caught:
        best_places(terrain, stages, -1)
    least = int(str(caught.value).split("allowed: ")[1].split()[0])
    assert best_of_all(terrain, stages, least) is not None
    assert least == 0 or best_of_all(terrain, stages, least - 1) is None


ROW = [("layer", ns, 1, 1) for ns in (3, 1, 1, 2, 5)]


@pytest.mark.parametrize(
    ("stages", "starts"), [(1, []), (2, ["3"]), (3, ["1", "4"]), (5, ["1", "2", "3", "4"])]
)
def test_a_row_of_layers(stages, starts):
    terrain = Terrain(Writer(ROW).survey())
    assert [p.path for p in best_places(terrain, stages)] == starts


def test_places_that_share_a_module_are_used_only_for_want_of_others():
    script = [("layer", ns, 1, 1) for ns in (4, 4, 1)] + [("old", 0), ("layer", 1, 1, 1)]
    terrain = Terrain(Writer(script).survey())
    assert [p.path for p in best_places(terrain, 2)] == ["4"]
    assert [p.path for p in best_places(terrain, 3)] == ["1", "2"]


def test_a_memory_limit_moves_the_cut():
    script = [("layer", 1, 8, 1), ("layer", 1, 8, 1), ("layer", 1, 1, 1), ("layer", 6, 1, 1)]
    terrain = Terrain(Writer(script).survey())
    assert [p.path for p in best_places(terrain, 2)] == ["3"]
    assert [p.path for p in best_places(terrain, 2, 13)] == ["1"]


@pytest.mark.parametrize("stages", [0, -1, 6])
def test_impossible_numbers(stages):
    terrain = Terrain(Writer(ROW).survey())
    with pytest.raises(PlanError, match=rf"stages={stages} .* at most 5; allowed: 1 to 5"):
        best_places(terrain, stages)


def test_stages_of_equal_activations_do_not_depend_on_times():
    sizes = (1, 1, 1, 6, 1)
    for times in ((3, 1, 1, 2, 5), (9, 1, 1, 1, 1)):
        script = [("layer", ns, 1, n) for ns, n in zip(times, sizes, strict=True)]
        terrain = Terrain(Writer(script).survey(), "activations")
        assert [p.path for p in best_places(terrain, 2)] == ["3"]
