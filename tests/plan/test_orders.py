"""Orders of cells: what papers say of idle time and memory comes out of the programs."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan, programs_of
from lightning_cyclic.plan.actions import COMPUTE, Kind
from lightning_cyclic.plan.dataflow import live_activations
from lightning_cyclic.plan.orders import longest_path
from lightning_cyclic.simulate import Costs, simulate
from tests.harness.programs import shaped

SPLIT = ["zb_h1", "zb_v", "dualpipe_v"]


def idle(plan, each):
    """Return the most time that a worker idles from its first cell to its last, and in all.

    A forward of a worker takes 1, and so do both halves of its backward.
    """
    costs = Costs(
        forward_s=(1 / each,) * plan.num_stages,
        backward_s=(2 / each,) * plan.num_stages,
        param_bytes=(0.0,) * plan.num_stages,
    )
    result = simulate(programs_of(plan), costs, plan=plan)
    busy = 3 * plan.num_microbatches
    own = []
    for w in range(plan.num_workers):
        cells = [e for e in result.events if e.worker == w and e.action.kind in COMPUTE]
        own.append(max(e.end_s for e in cells) - min(e.start_s for e in cells) - busy)
    return max(own), result.makespan_s - busy


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize(
    ("preset", "each", "own", "overall", "kept"),
    [
        ("1f1b", 1, lambda p: 3 * (p - 1), lambda p: 3 * (p - 1), lambda p: p),
        # Megatron-LM, section 2.2: a v-th of it; 1 + (p - 1) / (p v) times the activations
        ("interleaved_1f1b", 2, lambda p: 3 * (p - 1) / 2, lambda p: 3 * (p - 1) / 2,
         lambda p: p + (p - 1) / 2),
        ("interleaved_1f1b", 3, lambda p: p - 1, lambda p: p - 1, lambda p: p + (p - 1) / 3),
        # Zero Bubble, table 1: (p - 1) (F + I - W); no more activations than 1F1B
        ("zb_h1", 1, lambda p: p - 1, lambda p: p - 1, lambda p: p),
        # and none at all, but that workers begin one after the other
        ("zb_v", 2, lambda p: 0, lambda p: (p - 1) / 2, lambda p: p),
        # DualPipe's table: (p - 1) (F&B + B - 3 W) of half stages, if F beside B is free; 2p + 1
        ("dualpipe_v", 2, lambda p: (p - 1) / 2, lambda p: (p - 1) / 2, lambda p: p + 1 / 2),
    ],
)  # fmt: skip
def test_idle_time_and_activations_are_those_of_the_papers(
    preset, each, own, overall, kept, p, rounds
):
    plan = make_plan(
        preset, num_stages=each * p, num_workers=p, num_microbatches=rounds * p, num_steps=1
    )
    found = idle(plan, each)
    assert found == pytest.approx((own(p), overall(p)))
    assert max(map(live_activations, programs_of(plan))) == pytest.approx(each * kept(p))


def cells_of(plan):
    return [
        [a for a in program if a.kind in COMPUTE and a.t == 0] for program in programs_of(plan)
    ]


@given(
    preset=st.sampled_from(SPLIT),
    num_workers=st.integers(1, 8),
    num_microbatches=st.integers(1, 30),
)
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_split_backwards_are_whole_in_the_end_and_bounded_in_between(
    preset, num_workers, num_microbatches
):
    numbers = shaped(preset, 2 * num_workers if preset != "zb_h1" else num_workers, num_workers)
    plan = make_plan(
        preset, **numbers, num_microbatches=num_microbatches, num_steps=1, proved=False
    )
    p, most = plan.num_workers, {"zb_h1": 1, "zb_v": 2, "dualpipe_v": 2}[preset]
    bound = most * p + (preset == "dualpipe_v" and num_microbatches >= plan.num_stages)
    for w, cells in enumerate(cells_of(plan)):
        assert live_activations(cells) <= bound
        for j in {a.j for a in cells}:
            of_stage = [a for a in cells if a.j == j]
            for i in range(num_microbatches):
                kinds = [a.kind for a in of_stage if a.i == i]
                assert kinds in ([Kind.F, Kind.B], [Kind.F, Kind.I, Kind.W])
            gradients = [a.i for a in of_stage if a.kind in (Kind.B, Kind.W)]
            assert gradients == list(range(num_microbatches))
        for a, b in pairwise(cells):  # a whole backward takes two slots
            assert b.s >= a.s + 1 + (a.kind is Kind.B)
        if w > 0:  # and somebody waits
            continue
        halves = [(a, b) for a, b in pairwise(cells) if (a.kind, b.kind) == (Kind.I, Kind.W)]
        assert not any((a.i, a.j) == (b.i, b.j) and a.j == 0 for a, b in halves)


def test_what_is_split_has_halves_of_a_slot_each():
    # F0 B0 in one, whose backward takes two slots; I1 and W1 apart
    times = longest_path([[0, 2, 1, 3, 5]], num_stages=1, num_microbatches=2, whole=2)
    assert times.starts[:4] == [0, 3, 1, 4]
    assert times.starts[5] == 5
    assert times.period == 6


@pytest.mark.parametrize(
    ("orders", "whole", "text"),
    [
        ([[2, 0]], 1, r"0B0 would wait for ever.*later\n0B0 0F0\n\^$"),
        ([[0, 4, 2], [1, 3, 5]], 2, r"0W0 would wait .*later\n0F0 0W0 0I0\n    \^$"),
    ],
)
def test_orders_that_wait_for_ever_are_refused(orders, whole, text):
    num_stages = len(orders)
    num_microbatches = 2 if num_stages == 1 else 1
    with pytest.raises(PlanError, match=text):
        longest_path(orders, num_stages, num_microbatches, whole)


@pytest.mark.parametrize(
    ("preset", "numbers", "text"),
    [
        ("zb_v", {"num_stages": 4, "num_workers": 4},
         "num_stages=4 with 4 workers.*each has two stages.*use num_stages=8"),
        ("dualpipe_v", {"num_stages": 6, "num_workers": 2}, "use num_stages=4"),
        ("zb_v", {"num_stages": 3, "num_workers": 1}, "use num_stages=4"),
        ("zb_h1", {"num_stages": 2, "num_workers": 2, "weights": "delayed"},
         "'delayed' do not fit schedule 'zb_h1', which puts off gradients.*sync"),
        ("zb_h1", {"num_stages": 2, "num_workers": 2, "placement": "replicated"},
         "'zb_h1' does not fit placement 'replicated'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_split_schedule_is_refused(preset, numbers, text):
    with pytest.raises(PlanError, match=text):
        make_plan(preset, **numbers)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_dualpipe_with_few_micro_batches_is_zb_v(num_microbatches):
    numbers = {"num_stages": 4, "num_workers": 2, "num_microbatches": num_microbatches}
    few, same = (make_plan(preset, **numbers) for preset in ("dualpipe_v", "zb_v"))
    assert programs_of(few) == programs_of(same)
