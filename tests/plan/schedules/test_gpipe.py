"""GPipe, as a picture, and its bubble."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.clock import Entry, picture
from lightning_cyclic.plan.dataflow import live_activations


def test_timetable():
    plan = make_plan("gpipe", num_stages=3, num_workers=3, num_microbatches=2, num_steps=1)
    cells = [Entry(s, w, f"{a.j}{a.kind}{a.i}") for s, w, a in plan.timetable]
    assert picture(cells).splitlines() == [
        "slot   0   1   2   3   4   5   6   7",
        "w0   0F0 0F1   .   .   .   . 0B0 0B1",
        "w1     . 1F0 1F1   .   . 1B0 1B1   .",
        "w2     .   . 2F0 2F1 2B0 2B1   .   .",
    ]


@settings(deadline=None)
@given(num_stages=st.integers(1, 6), num_microbatches=st.integers(1, 8))
def test_bubble_and_activations(num_stages, num_microbatches):
    plan = make_plan(
        "gpipe",
        num_stages=num_stages,
        num_workers=num_stages,
        num_microbatches=num_microbatches,
        num_steps=1,
        proved=False,
    )
    slots = {s for s, _, _ in plan.timetable}
    busy = [sum(1 for _, w, _ in plan.timetable if w == j) for j in range(num_stages)]
    assert {1 - Fraction(b, len(slots)) for b in busy} == {
        Fraction(num_stages - 1, num_microbatches + num_stages - 1)
    }
    assert {live_activations(program) for program in plan.programs} == {num_microbatches}
