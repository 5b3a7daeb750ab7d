"""Schedules of rematerialisation, against all that there are and a count of bytes by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cyclic import make_plan
from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner.rematerialisation import (
    Again,
    Keep,
    Schedule,
    Unit,
    best_schedule,
    least_bytes,
    rooms,
)
from lightning_cyclic.simulate.costs import Costs
from lightning_cyclic.simulate.memory import memory, steps_to_count
from tests.planner.walk import Walk, need

UNITS = st.builds(
    Unit,
    forward_s=st.integers(1, 4).map(float),
    kept_bytes=st.integers(3, 9),
    output_bytes=st.integers(1, 3),
    is_joined=st.sampled_from([True, True, True, False]),
    must_keep=st.sampled_from([False, False, False, True]),
)
CHAINS = st.lists(UNITS, min_size=1, max_size=4)


@cache
def schedules(
    units: tuple[Unit, ...], first: int, end: int, *, is_inside: bool = False
) -> list[Schedule]:
    """Return all schedules of some units; inside a segment none has that segment once more."""
    return list(_schedules(units, first, end, end - is_inside))


def _schedules(units: tuple[Unit, ...], first: int, end: int, most: int) -> Iterator[Schedule]:
    if first == end:
        yield ()
        return
    for rest in schedules(units, first + 1, end):
        yield (Keep(first), *rest)
    for last in range(first, most):
        if any(u.must_keep for u in units[first : last + 1]):
            return
        if not all(u.is_joined for u in units[first + 1 : last + 1]):
            return
        for inside in schedules(units, first, last + 1, is_inside=True):
            for rest in schedules(units, last + 1, end):
                yield (Again(first, last, inside), *rest)


@given(CHAINS, st.integers(1, 3))
def test_no_schedule_is_better_at_any_limit(units, at_once):
    every = [Walk(units, x) for x in schedules(tuple(units), 0, len(units))]
    needs = sorted({need(w, at_once) for w in every})
    assert least_bytes(units, at_once=at_once) == needs[0]
    for limit in needs[:: 1 + len(needs) // 12]:
        found = best_schedule(units, limit, at_once=at_once)
        walk = Walk(units, found.schedule)
        assert found.peak_bytes == need(walk, at_once) <= limit
        assert found.runs_again == walk.runs
        assert found.again_s == walk.seconds - sum(u.forward_s for u in units)
        assert walk.seconds == min(w.seconds for w in every if need(w, at_once) <= limit)
        if limit > needs[0]:
            assert found.peak_bytes == min(
                need(w, at_once) for w in every if w.seconds == walk.seconds
            )


@given(st.lists(UNITS, min_size=1, max_size=9), st.integers(1, 4))
def test_never_worse_than_to_run_the_whole_stage_again(units, at_once):
    units = [u._replace(is_joined=True, must_keep=False) for u in units]
    all_kept = tuple(map(Keep, range(len(units))))
    always = Walk(units, (Again(0, len(units) - 1, all_kept),))
    found = best_schedule(units, need(always, at_once), at_once=at_once)
    assert found.peak_bytes <= need(always, at_once)
    assert found.again_s <= sum(u.forward_s for u in units)


def test_with_room_for_all_nothing_is_run_again():
    units = [Unit(1.0, 5, 2), Unit(3.0, 4, 1), Unit(2.0, 9, 3)]
    found = best_schedule(units, 18 * 3, at_once=3)
    assert found == ((Keep(0), Keep(1), Keep(2)), 18 * 3, 0.0)
    assert best_schedule(units, 18 * 3 - 1, at_once=3).again_s > 0


@pytest.mark.parametrize("at_once", [1, 2])
def test_of_equal_schedules_the_one_is_taken_that_runs_the_first_units_again(at_once):
    units = [Unit(1.0, 5, 2)] * 4
    again = [
        (*map(Keep, range(k)), Again(k, k, (Keep(k),)), *map(Keep, range(k + 1, 4)))
        for k in range(3)
    ]
    assert len({need(Walk(units, schedule), at_once) for schedule in again}) == 1
    limit = need(Walk(units, again[0]), at_once)
    assert best_schedule(units, limit, at_once=at_once).schedule == again[0]


@pytest.mark.parametrize(
    ("num_units", "snapshots", "runs"),
    [(10, 3, 15), (10, 2, 20), (7, 1, 21), (20, 4, 39)],
)
def test_equal_units_are_run_as_often_as_revolve_runs_them(num_units, snapshots, runs):
    """Look at the numbers of Algorithm 799, whose first snapshot is what enters the chain.

    t(l, c) = r l - beta(c + 1, r - 1) steps are made besides those of which all is kept.
    """
    units = [Unit(1.0, 100, 1)] * num_units  # no two of which fit
    # what enters the unit that is kept lies beside the snapshots, but for the first one
    found = best_schedule(units, 100 + snapshots)
    assert found.again_s == runs


def test_a_limit_that_nothing_meets_names_the_nearest():
    units = [Unit(1.0, 5, 2)] * 3
    least = least_bytes(units)
    with pytest.raises(PlanError, match=f"{least} or more"):
        best_schedule(units, least - 1)
    assert best_schedule(units, least).peak_bytes == least


def test_long_chains_are_planned_at_once_and_thinned_ones_are_right():
    units = [Unit(1.0 + k % 7, 1000 + 37 * k % 401, 100 + k % 13) for k in range(24)]
    whole = sum(u.kept_bytes for u in units)
    found = best_schedule(units, whole // 3, most_steps=16)
    walk = Walk(units, found.schedule)
    assert found.peak_bytes == walk.most <= whole // 3
    assert found.again_s == walk.seconds - sum(u.forward_s for u in units) > 0


@pytest.mark.parametrize(
    ("preset", "num_stages", "num_workers"),
    [("1f1b", 4, 4), ("gpipe", 3, 3), ("interleaved_1f1b", 4, 2), ("pipedream_2bw", 3, 3),
     ("zb_v", 4, 2), ("cyclic_mp", 3, 3)],
)  # fmt: skip
def test_what_stages_have_room_for_fills_the_limit_and_no_more(preset, num_stages, num_workers):
    plan = make_plan(
        preset, num_stages=num_stages, num_workers=num_workers, num_microbatches=num_stages
    )
    sizes, limit = [100 * (j + 1) for j in range(num_stages)], 10**6
    shown = replace(plan, num_steps=steps_to_count(num_stages, num_stages))
    for w, found in enumerate(rooms(plan, sizes, limit, 2.0)):
        each = [
            found[j].bytes / found[j].at_once if j in found else 0.0 for j in range(num_stages)
        ]
        nothing = (0.0,) * num_stages
        costs = Costs(
            forward_s=nothing, backward_s=nothing, param_bytes=tuple(map(float, sizes)),
            cut_bytes=nothing, activation_bytes=tuple(each),
        )  # fmt: skip
        assert limit * 0.75 < memory(shown, costs, state_per_param=2.0)[w].total <= limit
        for room in found.values():
            assert limit - num_workers * 8 < room.limit_for(room.bytes) <= limit
            assert room.limit_for(room.bytes + 1) > limit
