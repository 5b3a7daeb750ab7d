"""predicted looks ahead by the true number of updates between a forward and its backward."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.dataflow import live_versions


@pytest.mark.parametrize("num_stages", [1, 2, 4, 5])
def test_horizon_is_the_true_distance_also_in_warm_up(num_stages):
    plan = make_plan("pipeoptim", num_stages=num_stages, num_workers=num_stages)
    for k in range(8):
        for j in range(num_stages):
            assert plan.horizon(k, 0, j) == min(k, num_stages - 1 - j)
            assert plan.backward_reads(k, 0, j) == k


@settings(deadline=None)
@given(num_stages=st.integers(1, 6), num_microbatches=st.integers(1, 6))
def test_horizon_counts_the_updates_in_the_program(num_stages, num_microbatches):
    plan = make_plan(
        "pipeoptim",
        num_stages=num_stages,
        num_workers=num_stages,
        num_microbatches=num_microbatches,
    )
    for program in plan.programs:
        version, at_forward = 0, {}
        for a in program:
            version = a.v if a.kind is Kind.UPDATE else version
            if a.kind is Kind.F:
                assert a.v == version
                at_forward[a.t, a.i] = version
            elif a.kind is Kind.B:
                assert a.v == version
                distance = version - at_forward[a.t, a.i]
                assert plan.horizon(a.t, a.i, a.j) == distance


def test_keeps_one_version_beside_what_it_predicts():
    plan = make_plan("pipeoptim", num_stages=4, num_workers=4)
    assert [plan.depth(j) for j in range(4)] == [1, 1, 1, 1]
    assert {peak for p in plan.programs for peak in live_versions(p).values()} == {1}


def test_other_rules_do_not_look_ahead():
    plan = make_plan("pipedream", num_stages=4, num_workers=4)
    assert {plan.horizon(k, 0, j) for k in range(8) for j in range(4)} == {0}


def test_spectrain_looks_to_the_end_of_the_round_trip():
    plan = make_plan("spectrain", num_stages=4, num_workers=4)
    assert [plan.horizon(9, 0, j) for j in range(4)] == [3, 2, 2, 1]  # floor(j/2) + S-1-j
    assert [plan.backward_horizon(j) for j in range(4)] == [0, 0, 1, 1]
