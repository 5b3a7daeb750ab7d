"""Which version is read, rule by rule."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan, programs_of
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.dataflow import live_versions
from lightning_cyclic.plan.weights import Delayed, Freshest, Sync


def test_reads_the_step():
    assert [Sync().forward(t, newest=0) for t in range(4)] == [0, 1, 2, 3]


def test_keeps_one_version():
    plan = make_plan("1f1b", num_stages=4, num_workers=4, num_microbatches=6)
    assert [plan.depth(j) for j in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("newest", [0, 2, 50])
def test_reads_the_step_before_whatever_exists(newest):
    assert [Delayed().forward(t, newest) for t in range(4)] == [0, 0, 1, 2]


@settings(deadline=None, max_examples=settings().max_examples // 3)
@given(num_stages=st.integers(2, 6), more=st.integers(0, 4))
def test_pipelined_keeps_two_versions(num_stages, more):
    plan = make_plan(
        "pipedream_2bw",
        num_stages=num_stages,
        num_workers=num_stages,
        num_microbatches=num_stages - 1 + more,
    )
    for j, program in enumerate(programs_of(plan)):
        assert live_versions(program) == {j: 2}
        assert plan.depth(j) == 2


@pytest.mark.parametrize("preset", ["pipedream_2bw", "cyclic_pipeline", "cyclic_mp"])
@pytest.mark.parametrize("num_stages", [3, 4, 7])
def test_too_few_micro_batches_are_refused(preset, num_stages):
    numbers = {"num_stages": num_stages, "num_workers": num_stages}
    make_plan(preset, **numbers, num_microbatches=num_stages - 1)
    with pytest.raises(PlanError, match=f"use num_microbatches={num_stages - 1} or more"):
        make_plan(preset, **numbers, num_microbatches=num_stages - 2)


def test_never_older_than_two_versions_nor_newer_than_there_is():
    assert [Freshest().forward(5, newest) for newest in (0, 3, 4, 5, 6)] == [4, 4, 4, 5, 5]
    assert Freshest().forward(0, 0) == 0


@settings(deadline=None, max_examples=settings().max_examples // 3)
@given(
    num_stages=st.integers(1, 9),
    num_workers=st.integers(1, 6),
    slack=st.sampled_from([0, 1, 2, 3, 5, 8, 100]),
)
def test_general_rule_with_slack(num_stages, num_workers, slack):
    plan = make_plan(
        "cyclic_dp", num_stages=num_stages, num_workers=num_workers, slack=slack, proved=False
    )
    d = Fraction(2 * num_stages, num_workers)
    for t in range(4):
        for i in range(num_workers):
            for j in range(num_stages):
                is_fresh = d * i + 2 * j >= d * (num_workers - 1) + slack
                assert plan.reads(t, i, j) == (t if is_fresh else max(t - 1, 0))
                assert plan.backward_reads(t, i, j) == plan.reads(t, i, j)


@settings(deadline=None, max_examples=settings().max_examples // 3)
@given(num_stages=st.integers(2, 6), more=st.integers(0, 4))
def test_pipelined_only_the_first_micro_batches_are_stale(num_stages, more):
    num_microbatches = num_stages - 1 + more
    plan = make_plan(
        "cyclic_pipeline",
        num_stages=num_stages,
        num_workers=num_stages,
        num_microbatches=num_microbatches,
    )
    for t in range(4):
        for i in range(num_microbatches):
            for j in range(num_stages):
                is_fresh = i >= num_stages - 1 - j
                assert plan.reads(t, i, j) == (t if is_fresh else max(t - 1, 0))
    depths = [2] * (num_stages - 1) + [1]
    assert [plan.depth(j) for j in range(num_stages)] == depths
    assert [live_versions(p)[j] for j, p in enumerate(programs_of(plan))] == depths


def test_replicated_two_versions_are_alive_but_no_worker_keeps_two():
    plan = make_plan("cyclic_dp", num_stages=4, num_workers=4)
    assert [plan.depth(j) for j in range(4)] == [2, 2, 2, 1]  # all read the last stage fresh
    assert {peak for p in programs_of(plan) for peak in live_versions(p).values()} == {1}


@settings(deadline=None, max_examples=settings().max_examples // 3)
@given(st.integers(1, 6))
def test_reads_and_keeps_what_pipedream_does(num_stages):
    plan = make_plan(
        "pipedream", num_stages=num_stages, num_workers=num_stages, num_steps=2 * num_stages
    )
    assert plan.num_microbatches == 1
    for k in range(2 * num_stages):
        for j in range(num_stages):
            assert plan.reads(k, 0, j) == max(0, k - (num_stages - 1 - j))
            assert plan.backward_reads(k, 0, j) == plan.reads(k, 0, j)
    for j, program in enumerate(programs_of(plan)):
        assert plan.depth(j) == num_stages - j
        assert live_versions(program) == {j: num_stages - j}


@settings(deadline=None, max_examples=settings().max_examples // 3)
@given(num_stages=st.integers(1, 6), num_microbatches=st.integers(1, 6))
def test_accumulating_it_reads_as_many_updates_as_were_made(num_stages, num_microbatches):
    plan = make_plan(
        "pipedream",
        num_stages=num_stages,
        num_workers=num_stages,
        num_microbatches=num_microbatches,
    )
    for t in range(4):
        for i in range(num_microbatches):
            for j in range(num_stages):
                backwards_done = max(0, t * num_microbatches + i - (num_stages - 1 - j))
                assert plan.reads(t, i, j) == backwards_done // num_microbatches


@pytest.mark.parametrize("num_stages", [1, 2, 4, 5])
def test_horizon_is_the_true_distance_also_in_warm_up(num_stages):
    plan = make_plan("pipeoptim", num_stages=num_stages, num_workers=num_stages)
    for k in range(8):
        for j in range(num_stages):
            assert plan.horizon(k, 0, j) == min(k, num_stages - 1 - j)
            assert plan.backward_reads(k, 0, j) == k


@settings(deadline=None, max_examples=settings().max_examples // 3)
@given(num_stages=st.integers(1, 6), num_microbatches=st.integers(1, 6))
def test_horizon_counts_the_updates_in_the_program(num_stages, num_microbatches):
    plan = make_plan(
        "pipeoptim",
        num_stages=num_stages,
        num_workers=num_stages,
        num_microbatches=num_microbatches,
    )
    for program in programs_of(plan):
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
    assert {peak for p in programs_of(plan) for peak in live_versions(p).values()} == {1}


def test_other_rules_do_not_look_ahead():
    plan = make_plan("pipedream", num_stages=4, num_workers=4)
    assert {plan.horizon(k, 0, j) for k in range(8) for j in range(4)} == {0}


def test_spectrain_looks_to_the_end_of_the_round_trip():
    plan = make_plan("spectrain", num_stages=4, num_workers=4)
    assert [plan.horizon(9, 0, j) for j in range(4)] == [3, 2, 2, 1]  # floor(j/2) + S-1-j
    assert [plan.backward_horizon(j) for j in range(4)] == [0, 0, 1, 1]
