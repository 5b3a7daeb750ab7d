"""Schedules, as pictures and by the facts that follow from them."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan, programs_of
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.check.proof import validate
from lightning_cyclic.plan.clock import Entry, picture
from lightning_cyclic.plan.dataflow import live_activations
from lightning_cyclic.plan.orders import longest_path
from lightning_cyclic.plan.schedules import Cyclic, Lockstep


@pytest.mark.parametrize(
    ("preset", "num_stages", "num_workers", "num_steps", "more", "expected"),
    [
        ("cyclic_dp", 2, 2, 2, {}, """
            slot   0   1   2   3   4   5   6   7   8   9
            w0   0F0 1F0 1B0 0B0 0F0 1F0 1B0 0B0   .   .
            w1     .   . 0F1 1F1 1B1 0B1 0F1 1F1 1B1 0B1"""),
        # fine stages make a longer delay
        ("cyclic_dp", 4, 2, 1, {}, """
            slot   0   1   2   3   4   5   6   7   8   9  10  11
            w0   0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0   .   .   .   .
            w1     .   .   .   . 0F1 1F1 2F1 3F1 3B1 2B1 1B1 0B1"""),
        # a fractional delay is rounded up: 4/3 of a slot, so that workers start at 0, 2 and 3
        ("cyclic_dp", 2, 3, 1, {}, """
            slot   0   1   2   3   4   5   6
            w0   0F0 1F0 1B0 0B0   .   .   .
            w1     .   . 0F1 1F1 1B1 0B1   .
            w2     .   .   . 0F2 1F2 1B2 0B2"""),
        # pipelined it is 1F1B without a flush
        ("cyclic_pipeline", 2, 2, 2, {}, """
            slot   0   1   2   3   4   5   6   7   8   9
            w0   0F0   . 0F1 0B0 0F0 0B1 0F1 0B0   . 0B1
            w1     . 1F0 1B0 1F1 1B1 1F0 1B0 1F1 1B1   ."""),
        # in rounds the timetable runs on
        ("cyclic_zero", 2, 2, 1, {"num_microbatches": 4}, """
            slot   0   1   2   3   4   5   6   7   8   9
            w0   0F0 1F0 1B0 0B0 0F2 1F2 1B2 0B2   .   .
            w1     .   . 0F1 1F1 1B1 0B1 0F3 1F3 1B3 0B3"""),
        # where buffers are relayed, workers come in succession
        ("cyclic_dp", 1, 2, 2, {"num_microbatches": 4, "relayed": [0]}, """
            slot   0   1   2   3   4   5   6   7   8   9  10  11  12
            w0   0F0 0B0 0F2 0B2   .   . 0F0 0B0 0F2 0B2   .   .   .
            w1     .   .   . 0F1 0B1 0F3 0B3   .   . 0F1 0B1 0F3 0B3"""),
        ("cyclic_dp", 1, 4, 1, {"group_size": 2}, """
            slot   0   1   2
            w0   0F0 0B0   .
            w1   0F1 0B1   .
            w2     . 0F2 0B2
            w3     . 0F3 0B3"""),
        ("lockstep_dp", 1, 2, 1, {"num_microbatches": 4}, """
            slot   0   1   2   3
            w0   0F0 0B0 0F2 0B2
            w1   0F1 0B1 0F3 0B3"""),
        ("lockstep_dp", 3, 2, 1, {}, """
            slot   0   1   2   3   4   5
            w0   0F0 1F0 2F0 2B0 1B0 0B0
            w1   0F1 1F1 2F1 2B1 1B1 0B1"""),
        ("gpipe", 3, 3, 1, {"num_microbatches": 2}, """
            slot   0   1   2   3   4   5   6   7
            w0   0F0 0F1   .   .   .   . 0B0 0B1
            w1     . 1F0 1F1   .   . 1B0 1B1   .
            w2     .   . 2F0 2F1 2B0 2B1   .   ."""),
        ("1f1b", 3, 3, 1, {"num_microbatches": 4}, """
            slot   0   1   2   3   4   5   6   7   8   9  10  11
            w0   0F0 0F1 0F2   .   . 0B0 0F3 0B1   . 0B2   . 0B3
            w1     . 1F0 1F1   . 1B0 1F2 1B1 1F3 1B2   . 1B3   .
            w2     .   . 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3   .   ."""),
        ("1f1b", 2, 4, 1, {"num_microbatches": 4, "replicas": 2}, """
            slot   0   1   2   3   4   5
            w0   0F0 0F2   . 0B0   . 0B2
            w1     . 1F0 1B0 1F2 1B2   .
            w2   0F1 0F3   . 0B1   . 0B3
            w3     . 1F1 1B1 1F3 1B3   ."""),
        # of four stages each worker has two that are no neighbours
        ("interleaved_1f1b", 4, 2, 1, {"num_microbatches": 2}, """
            slot   0   1   2   3   4   5   6   7   8   9
            w0   0F0 0F1 2F0 2F1   . 2B0   . 2B1 0B0 0B1
            w1     . 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1   ."""),
        # the last group of as many micro-batches as there are workers need not be full
        ("interleaved_1f1b", 4, 2, 1, {"num_microbatches": 3}, """
            slot   0   1   2   3   4   5   6   7   8   9  10  11  12  13  14
            w0   0F0 0F1 2F0 2F1 0F2 2B0   . 2B1 2F2 0B0 0B1   . 2B2   . 0B2
            w1     . 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2   . 1B2   ."""),
    ],
)  # fmt: skip
def test_timetables(preset, num_stages, num_workers, num_steps, more, expected):
    plan = make_plan(
        preset, num_stages=num_stages, num_workers=num_workers, num_steps=num_steps, **more
    )
    cells = (Entry(s, w, f"{a.j}{a.kind}{a.i}") for s, w, a in plan.timetable)
    assert picture(cells).splitlines() == [line.strip() for line in expected.splitlines()[1:]]


@pytest.mark.parametrize("preset", ["gpipe", "1f1b"])
@settings(deadline=None)
@given(num_stages=st.integers(1, 6), num_microbatches=st.integers(1, 8))
def test_published_bubbles_and_activations(preset, num_stages, num_microbatches):
    plan = make_plan(
        preset, num_stages=num_stages, num_workers=num_stages, num_microbatches=num_microbatches,
        num_steps=1, proved=False,
    )  # fmt: skip
    slots = {s for s, _, _ in plan.timetable}
    busy = [sum(1 for _, w, _ in plan.timetable if w == j) for j in range(num_stages)]
    assert {1 - Fraction(b, len(slots)) for b in busy} == {
        Fraction(num_stages - 1, num_microbatches + num_stages - 1)
    }
    assert [live_activations(program) for program in programs_of(plan)] == [
        num_microbatches if preset == "gpipe" else min(num_microbatches, num_stages - j)
        for j in range(num_stages)
    ]


@settings(deadline=None)
@given(
    num_workers=st.integers(1, 5), stages_each=st.integers(1, 3), groups=st.integers(1, 4),
)  # fmt: skip
def test_bubbles_and_activations_of_interleaved_stages(num_workers, stages_each, groups):
    """Megatron's: bubble (p - 1) / (v m + p - 1) where p divides m (section 2.2.2)."""
    p, v, m = num_workers, stages_each, groups * num_workers
    plan = make_plan(
        "interleaved_1f1b", num_stages=p * v, num_workers=p, num_microbatches=m, num_steps=1,
        proved=False,
    )  # fmt: skip
    assert {s for s, _, _ in plan.timetable} == set(range(2 * (v * m + p - 1)))
    assert Counter(w for _, w, _ in plan.timetable) == dict.fromkeys(range(p), 2 * v * m)
    assert [live_activations(program) for program in programs_of(plan)] == [
        min(v * m, 2 * (p - 1 - w) + (v - 1) * p + 1) for w in range(p)
    ]


@settings(deadline=None, max_examples=settings().max_examples // 5)
@given(
    num_workers=st.integers(1, 4), stages_each=st.integers(1, 3),
    num_microbatches=st.integers(1, 9),
)  # fmt: skip
def test_interleaved_stages_take_any_number_of_micro_batches(
    num_workers, stages_each, num_microbatches
):
    validate(
        make_plan(
            "interleaved_1f1b", num_stages=num_workers * stages_each, num_workers=num_workers,
            num_microbatches=num_microbatches, num_steps=2,
        )
    )  # fmt: skip


def test_an_order_in_which_nobody_can_go_on_is_refused():
    with pytest.raises(PlanError, match="in this order 0B0 would wait for ever for what is behin"):
        longest_path([[2, 0], [1, 3]], num_stages=2, num_microbatches=1)


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
            for start in (schedule.start(Kind.F, i, j), schedule.start(Kind.B, i, j))
            if in_slot(schedule, start, s)
        )
        assert uses == dict.fromkeys(range(n), 1)


@settings(deadline=None)
@given(sizes)
def test_live_activations_are_constant(n):
    schedule = Cyclic(num_stages=n, num_microbatches=n)
    for s in range(schedule.period):
        live = sum(
            (s - schedule.start(Kind.F, i, j)) % schedule.period
            <= schedule.start(Kind.B, i, j) - schedule.start(Kind.F, i, j)
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
        starts = [schedule.start(Kind.F, i, j) for j in range(num_stages)]
        starts += [schedule.start(Kind.B, i, j) for j in reversed(range(num_stages))]
        assert [Fraction(start, schedule.unit) for start in starts] == [
            spacing * i + n for n in range(2 * num_stages)
        ]
        slots = [schedule.slot(1, start) for start in starts]
        assert slots == list(range(slots[0], slots[0] + 2 * num_stages))


@pytest.mark.parametrize(("t", "i", "j", "newest"), [(0, 0, 0, 0), (1, 0, 2, 1), (1, 0, 1, 0)])
def test_updates_before(t, i, j, newest):
    schedule = Cyclic(num_stages=3, num_microbatches=3)
    assert schedule.updates_before(t, schedule.start(Kind.F, i, j), j) == newest


def test_slack_hides_an_update_for_as_many_slots():
    schedule = Cyclic(num_stages=3, num_microbatches=3)
    start = schedule.start(Kind.F, 1, 2)  # two slots after the update exists
    assert [schedule.updates_before(5, start, 2, slack) for slack in (0, 1, 2, 3, 8, 9)] == [
        5, 5, 5, 4, 4, 3,
    ]  # fmt: skip


@settings(deadline=None)
@given(st.integers(1, 9))
def test_live_activations_peak_at_n_squared(n):
    schedule = Lockstep(num_stages=n, num_microbatches=n)
    live = [
        sum(
            schedule.start(Kind.F, i, j) <= s <= schedule.start(Kind.B, i, j)
            for i in range(n)
            for j in range(n)
        )
        for s in range(schedule.period)
    ]
    assert max(live) == n * n
