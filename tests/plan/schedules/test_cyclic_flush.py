"""Cyclic with a flush: workers a slot apart, and each step ends before the next begins."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import ValidationError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.clock import Entry, picture
from lightning_cyclic.plan.schedules.cyclic_flush import CyclicFlush

numbers = {"num_stages": st.integers(1, 7), "num_workers": st.integers(1, 6)}


def synchronous(num_stages, num_workers, **more):
    return make_plan(
        "lockstep_dp", schedule="cyclic_flush", num_stages=num_stages, num_workers=num_workers,
        **more,
    )  # fmt: skip


def test_a_picture():
    plan = synchronous(2, 2, num_steps=2)
    entries = (Entry(s, w, f"{a.j}{a.kind}{a.i}") for s, w, a in plan.timetable)
    assert picture(entries).splitlines() == [
        "slot   0   1   2   3   4   5   6   7   8   9",
        "w0   0F0 1F0 1B0 0B0   . 0F0 1F0 1B0 0B0   .",
        "w1     . 0F1 1F1 1B1 0B1   . 0F1 1F1 1B1 0B1",
    ]


@given(**numbers)
@settings(deadline=None, max_examples=40)
def test_steps_do_not_overlap_and_leave_no_slot_between(num_stages, num_workers):
    plan = synchronous(num_stages, num_workers, num_steps=3, proved=False)
    slots = [[s for s, _, a in plan.timetable if a.t == t] for t in range(3)]
    assert all(min(after) == max(before) + 1 for before, after in pairwise(slots))
    assert all(a.v == a.t for _, _, a in plan.timetable)


@given(**numbers)
@settings(deadline=None, max_examples=40)
def test_a_worker_is_a_slot_behind_the_one_before_it(num_stages, num_workers):
    plan = synchronous(num_stages, num_workers, num_steps=1, proved=False)
    slots = {(w, a.kind, a.j): s for s, w, a in plan.timetable}
    behind = {slots[w, kind, j] - slots[0, kind, j] - w for w, kind, j in slots}
    assert behind == {0}
    assert max(slots.values()) == 2 * num_stages + num_workers - 2


def test_a_shorter_period_is_refused(monkeypatch):
    period = CyclicFlush.period.fget
    monkeypatch.setattr(CyclicFlush, "period", property(lambda self: period(self) - self.unit))
    with pytest.raises(ValidationError, match="read version 1 of stage 0 before its update"):
        synchronous(3, 3)


def test_workers_that_begin_together_are_not_kept_apart():
    plan = synchronous(4, 4)
    assert not any(a.payload == "K" for p in plan.programs for a in p)
    assert sum(a.kind is Kind.UPDATE for p in plan.programs for a in p) == 4 * plan.num_steps
