"""1F1B, as a picture, its bubble, and what it keeps in flight."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.clock import Entry, picture
from lightning_cyclic.plan.dataflow import live_activations


def test_timetable():
    plan = make_plan("1f1b", num_stages=3, num_workers=3, num_microbatches=4, num_steps=1)
    cells = [Entry(s, w, f"{a.j}{a.kind}{a.i}") for s, w, a in plan.timetable]
    assert picture(cells).splitlines() == [
        "slot   0   1   2   3   4   5   6   7   8   9  10  11",
        "w0   0F0 0F1 0F2   .   . 0B0 0F3 0B1   . 0B2   . 0B3",
        "w1     . 1F0 1F1   . 1B0 1F2 1B1 1F3 1B2   . 1B3   .",
        "w2     .   . 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3   .   .",
    ]


sizes = {"num_stages": st.integers(1, 6), "num_microbatches": st.integers(1, 8)}


@settings(deadline=None)
@given(**sizes)
def test_bubble_and_activations(num_stages, num_microbatches):
    plan = make_plan(
        "1f1b",
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
    assert [live_activations(program) for program in plan.programs] == [
        min(num_microbatches, num_stages - j) for j in range(num_stages)
    ]


@settings(deadline=None)
@given(**sizes)
def test_order_is_warm_up_then_pairs_then_the_rest(num_stages, num_microbatches):
    plan = make_plan(
        "1f1b",
        num_stages=num_stages,
        num_workers=num_stages,
        num_microbatches=num_microbatches,
        num_steps=1,
        proved=False,
    )
    for j, program in enumerate(plan.programs):
        order = "".join(a.kind for a in program if a.kind in (Kind.F, Kind.B))
        warm_up = min(num_stages - 1 - j, num_microbatches)
        assert order == "F" * warm_up + "FB" * (num_microbatches - warm_up) + "B" * warm_up


@settings(deadline=None)
@given(**sizes)
def test_no_worker_has_two_actions_in_a_slot(num_stages, num_microbatches):
    plan = make_plan(
        "1f1b",
        num_stages=num_stages,
        num_workers=num_stages,
        num_microbatches=num_microbatches,
        num_steps=2,
    )
    cells = [(s, w) for s, w, _ in plan.timetable]
    assert len(cells) == len(set(cells))
