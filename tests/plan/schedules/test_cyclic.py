"""Cyclic, as pictures and by the facts that follow from them."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.clock import Entry, picture
from lightning_cyclic.plan.schedules import Cyclic


def draw(preset, num_stages, num_workers, num_steps=2):
    plan = make_plan(preset, num_stages=num_stages, num_workers=num_workers, num_steps=num_steps)
    return picture(Entry(s, w, f"{a.j}{a.kind}{a.i}") for s, w, a in plan.timetable).splitlines()


def test_two_replicas():
    assert draw("cyclic_dp", 2, 2) == [
        "slot   0   1   2   3   4   5   6   7   8   9",
        "w0   0F0 1F0 1B0 0B0 0F0 1F0 1B0 0B0   .   .",
        "w1     .   . 0F1 1F1 1B1 0B1 0F1 1F1 1B1 0B1",
    ]


def test_three_replicas():
    assert draw("cyclic_dp", 3, 3, num_steps=1) == [
        "slot   0   1   2   3   4   5   6   7   8   9",
        "w0   0F0 1F0 2F0 2B0 1B0 0B0   .   .   .   .",
        "w1     .   . 0F1 1F1 2F1 2B1 1B1 0B1   .   .",
        "w2     .   .   .   . 0F2 1F2 2F2 2B2 1B2 0B2",
    ]


def test_fine_stages_make_a_longer_delay():
    assert draw("cyclic_dp", 4, 2, num_steps=1) == [
        "slot   0   1   2   3   4   5   6   7   8   9  10  11",
        "w0   0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0   .   .   .   .",
        "w1     .   .   .   . 0F1 1F1 2F1 3F1 3B1 2B1 1B1 0B1",
    ]


def test_a_fractional_delay_is_rounded_up():  # 4/3 of a slot: workers start at 0, 2 and 3
    assert draw("cyclic_dp", 2, 3, num_steps=1) == [
        "slot   0   1   2   3   4   5   6",
        "w0   0F0 1F0 1B0 0B0   .   .   .",
        "w1     .   . 0F1 1F1 1B1 0B1   .",
        "w2     .   .   . 0F2 1F2 1B2 0B2",
    ]


def test_pipelined_it_is_1f1b_without_a_flush():
    assert draw("cyclic_pipeline", 2, 2) == [
        "slot   0   1   2   3   4   5   6   7   8   9",
        "w0   0F0   . 0F1 0B0 0F0 0B1 0F1 0B0   . 0B1",
        "w1     . 1F0 1B0 1F1 1B1 1F0 1B0 1F1 1B1   .",
    ]


sizes = st.integers(1, 8)


def in_slot(schedule, start, s):
    """Say in how many steps something that starts at a tick of step 0 starts at slot s."""
    return (s - start) % schedule.period == 0


@settings(deadline=None)
@given(sizes)
def test_every_stage_is_in_use_by_exactly_one_worker_in_every_slot(n):
    schedule = Cyclic(num_stages=n, num_microbatches=n)
    for s in range(schedule.period):
        uses = Counter(
            j
            for i in range(n)
            for j in range(n)
            for start in (schedule.forward(i, j), schedule.backward(i, j))
            if in_slot(schedule, start, s)
        )
        assert uses == dict.fromkeys(range(n), 1)


@settings(deadline=None)
@given(sizes)
def test_live_activations_are_constant(n):
    schedule = Cyclic(num_stages=n, num_microbatches=n)
    for s in range(schedule.period):
        live = sum(
            (s - schedule.forward(i, j)) % schedule.period
            <= schedule.backward(i, j) - schedule.forward(i, j)
            for i in range(n)
            for j in range(n)
        )
        assert live == n * (n + 1) // 2


@settings(deadline=None)
@given(num_stages=sizes, num_workers=sizes)
def test_replicas_never_idle_and_keep_exact_distance(num_stages, num_workers):
    spacing = Fraction(2 * num_stages, num_workers)
    schedule = Cyclic(num_stages=num_stages, num_microbatches=num_workers, spacing=spacing)
    assert Fraction(schedule.period, schedule.unit) == 2 * num_stages
    for i in range(num_workers):
        starts = [schedule.forward(i, j) for j in range(num_stages)]
        starts += [schedule.backward(i, j) for j in reversed(range(num_stages))]
        assert [Fraction(start, schedule.unit) for start in starts] == [
            spacing * i + n for n in range(2 * num_stages)
        ]
        slots = [schedule.slot(1, start) for start in starts]
        assert slots == list(range(slots[0], slots[0] + 2 * num_stages))


@pytest.mark.parametrize(("t", "i", "j", "newest"), [(0, 0, 0, 0), (1, 0, 2, 1), (1, 0, 1, 0)])
def test_updates_before(t, i, j, newest):
    schedule = Cyclic(num_stages=3, num_microbatches=3)
    assert schedule.updates_before(t, schedule.forward(i, j), j) == newest


def test_slack_hides_an_update_for_as_many_slots():
    schedule = Cyclic(num_stages=3, num_microbatches=3)
    start = schedule.forward(1, 2)  # two slots after the update exists
    assert [schedule.updates_before(5, start, 2, slack) for slack in (0, 1, 2, 3, 8, 9)] == [
        5, 5, 5, 4, 4, 3,
    ]  # fmt: skip
