"""delayed reads version t-1 everywhere."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.dataflow import live_versions
from lightning_cyclic.plan.weights import Delayed


@settings(deadline=None)
@given(st.integers(0, 50))
def test_reads_the_step_before_whatever_exists(newest):
    assert [Delayed().forward(t, newest) for t in range(4)] == [0, 0, 1, 2]


@settings(deadline=None)
@given(num_stages=st.integers(2, 6), more=st.integers(0, 4))
def test_pipelined_keeps_two_versions(num_stages, more):
    plan = make_plan(
        "pipedream_2bw",
        num_stages=num_stages,
        num_workers=num_stages,
        num_microbatches=num_stages - 1 + more,
    )
    for j, program in enumerate(plan.programs):
        assert live_versions(program) == {j: 2}
        assert plan.depth(j) == 2


@pytest.mark.parametrize("preset", ["pipedream_2bw", "cyclic_pipeline", "cyclic_mp"])
@pytest.mark.parametrize("num_stages", [3, 4, 7])
def test_too_few_micro_batches_are_refused(preset, num_stages):
    numbers = {"num_stages": num_stages, "num_workers": num_stages}
    make_plan(preset, **numbers, num_microbatches=num_stages - 1)
    with pytest.raises(PlanError, match=f"use num_microbatches={num_stages - 1} or more"):
        make_plan(preset, **numbers, num_microbatches=num_stages - 2)
