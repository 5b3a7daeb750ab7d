"""freshest is the mask of CDP-v2, and with slack goes over into delayed."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.dataflow import live_versions
from lightning_cyclic.plan.weights import Freshest


def test_never_older_than_two_versions_nor_newer_than_there_is():
    assert [Freshest().forward(5, newest) for newest in (0, 3, 4, 5, 6)] == [4, 4, 4, 5, 5]
    assert Freshest().forward(0, 0) == 0


@pytest.mark.parametrize("n", range(1, 9))
def test_replicated_it_is_the_mask_of_cdp_v2(n):
    plan = make_plan("cyclic_dp", num_stages=n, num_workers=n)
    for t in range(4):
        for i in range(n):
            for j in range(n):
                assert plan.reads(t, i, j) == (t if i + j >= n - 1 else max(t - 1, 0))


@settings(deadline=None)
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


@settings(deadline=None)
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
    assert [live_versions(p)[j] for j, p in enumerate(plan.programs)] == depths


def test_replicated_two_versions_are_alive_but_no_worker_keeps_two():
    plan = make_plan("cyclic_dp", num_stages=4, num_workers=4)
    assert [plan.depth(j) for j in range(4)] == [2, 2, 2, 1]  # all read the last stage fresh
    assert {peak for p in plan.programs for peak in live_versions(p).values()} == {1}
