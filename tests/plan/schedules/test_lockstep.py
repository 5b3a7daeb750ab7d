"""Lockstep, as a picture and by its peak."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.clock import Entry, picture
from lightning_cyclic.plan.schedules import Lockstep


def test_timetable():
    plan = make_plan("lockstep_dp", num_stages=3, num_workers=2, num_steps=1)
    cells = [Entry(s, w, f"{a.j}{a.kind}{a.i}") for s, w, a in plan.timetable]
    assert picture(cells).splitlines() == [
        "slot   0   1   2   3   4   5",
        "w0   0F0 1F0 2F0 2B0 1B0 0B0",
        "w1   0F1 1F1 2F1 2B1 1B1 0B1",
    ]


@settings(deadline=None)
@given(st.integers(1, 9))
def test_live_activations_peak_at_n_squared(n):
    schedule = Lockstep(num_stages=n, num_microbatches=n)
    live = [
        sum(
            schedule.forward(i, j) <= s <= schedule.backward(i, j)
            for i in range(n)
            for j in range(n)
        )
        for s in range(schedule.period)
    ]
    assert max(live) == n * n
