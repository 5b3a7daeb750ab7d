"""Steps of a warm-up end before the next begins; behind it the schedule is as ever."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.schedules.cyclic import Cyclic
from lightning_cyclic.plan.schedules.warm_up import WarmUp
from lightning_cyclic.viz import draw

numbers = st.integers(1, 5)


def late_plan(num_stages, num_micro, warmup_steps, preset="pipedream_2bw", **more):
    return make_plan(
        preset, num_stages=num_stages, num_workers=num_stages, num_micro=num_micro,
        warmup_steps=warmup_steps, **more,
    )  # fmt: skip


def test_a_picture():
    plan = late_plan(2, 2, 1, "cyclic_pipeline", num_steps=2)
    rows = [line.split() for line in draw(plan, colour=False).splitlines()]
    first = "0F0@0     . 0F1@0 0B0@0     . 0B1@0 0F0@1     . 0F1@1 0B0@1     . 0B1@1"
    second = "    . 1F0@0 1B0@0 1F1@0 1B1@0     .     . 1F0@1 1B0@1 1F1@1 1B1@1     ."
    assert rows[1:] == [["w0", *first.split()], ["w1", *second.split()]]


@given(numbers, st.integers(1, 3), st.integers(0, 4), st.fractions(1, 3, max_denominator=3))
def test_steps_begin_in_order_and_updates_are_counted_by_their_ends(
    num_stages, num_steps, slack, spacing
):
    base = Cyclic(num_stages=num_stages, num_micro=num_stages, spacing=Fraction(spacing))
    schedule = WarmUp(num_stages=num_stages, num_micro=num_stages, base=base, num_steps=num_steps)
    ends = [
        [
            schedule.begin(t) + schedule.backward(num_stages - 1, j) + (1 + slack) * schedule.unit
            for t in range(40)
        ]
        for j in range(num_stages)
    ]
    for t in range(8):
        assert schedule.begun(schedule.begin(t)) == t + 1
        assert schedule.begun(schedule.begin(t) - 1) == t
        for j in range(num_stages):
            for start in range(0, 3 * schedule.period, 2):
                time = schedule.begin(t) + start
                expected = sum(end <= time for end in ends[j])
                assert schedule.updates_before(t, start, j, slack) == expected


@given(numbers, numbers, st.integers(1, 4))
@settings(deadline=None, max_examples=settings().max_examples // 5)  # the first plan is proved
def test_every_forward_of_a_warm_up_reads_the_newest_version(num_stages, extra, warmup_steps):
    num_micro = num_stages + extra - 1
    warm = late_plan(num_stages, num_micro, warmup_steps)
    cold = late_plan(num_stages, num_micro, 0, proved=False)
    for i in range(num_micro):
        for j in range(num_stages):
            for t in range(warmup_steps):
                assert warm.reads(t, i, j) == warm.backward_reads(t, i, j) == t
                last = warm.slot(Kind.B, t, num_micro - 1, 0)
                assert last < warm.slot(Kind.F, t + 1, i, j)
            for t in range(5):
                assert warm.reads(warmup_steps + t, i, j) == warmup_steps + cold.reads(t, i, j)
                slots = warm.slot(Kind.F, warmup_steps + t, i, j)
                assert slots - warm.slot(Kind.F, warmup_steps, 0, 0) == cold.slot(Kind.F, t, i, j)
    assert [warm.delay(j) for j in range(num_stages)] == [1] * num_stages
    assert [warm.depth(j) for j in range(num_stages)] == [cold.depth(j) for j in range(num_stages)]


@pytest.mark.parametrize("preset", ["pipeoptim", "spectrain"])
def test_nothing_is_predicted_in_a_warm_up(preset):
    warm = late_plan(4, None, 3, preset)
    cold = late_plan(4, None, 0, preset)
    for j in range(4):
        assert [warm.horizon(t, 0, j) for t in range(3)] == [0, 0, 0]
        assert [warm.backward_horizon(t, j) for t in range(3)] == [0, 0, 0]
        for t in range(6):
            assert warm.horizon(3 + t, 0, j) == cold.horizon(t, 0, j)
            assert warm.backward_horizon(3 + t, j) == cold.backward_horizon(t, j)


@pytest.mark.parametrize("preset", ["gpipe", "1f1b", "cyclic_dp", "cyclic_dp_v1"])
def test_plans_without_late_pipelines_have_no_warm_up(preset):
    with pytest.raises(PlanError, match=r"warmup_steps=2 does not fit .*; allowed.*: 0"):
        late_plan(2, 2, 2, preset)
