"""stashed reads the newest version and keeps S-j of them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.dataflow import live_versions


@settings(deadline=None)
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
    for j, program in enumerate(plan.programs):
        assert plan.depth(j) == num_stages - j
        assert live_versions(program) == {j: num_stages - j}


@settings(deadline=None)
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
