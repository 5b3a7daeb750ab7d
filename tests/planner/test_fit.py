from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner import (
    Problem,
    Stages,
    Tie,
    memory,
)
from lightning_cyclic.planner.fit import Fitter, paces_s
from lightning_cyclic.simulate import Network

from .profiles import candidate, profile_of, unit


@st.composite
def profiles(draw, count=5):
    numbers = st.integers(0, 9)
    costs = ("forward_s", "backward_s", "param_bytes", "activation_bytes", "crossing_bytes")
    return profile_of(
        unit(f"h.{k}", **{name: draw(numbers) for name in costs}) for k in range(count)
    )


def problem(profile, memory_bytes, *, num_workers=3, bandwidth=2.0):
    network = Network(bandwidth_bytes_per_s=bandwidth)
    return Problem(
        profiles=(profile,), num_workers=num_workers, memory_bytes=memory_bytes, network=network
    )


@settings(deadline=None, max_examples=30)
@given(
    profiles(),
    st.sampled_from(["gpipe", "1f1b", "pipedream", "pipedream_2bw", "cyclic_pipeline"]),
    st.booleans(),
    st.integers(30, 250),
)
def test_the_fastest_of_all_cuts_that_fit(profile, preset, remat, limit):
    asked = candidate(preset, remat=remat)
    given_ = problem(profile, limit)
    fitter = Fitter(given_)
    plan = asked.plan(given_, num_steps=6)
    outcomes = []
    for cut in combinations(range(1, 5), 2):
        stages = Stages.of(profile, [0, *cut])
        stages = stages.running_again(stages.forward_s if remat else ())
        kept = max(worker.total for worker in memory(plan, stages.costs(), remat=remat))
        outcomes.append((kept, max(paces_s(stages, asked, given_.network))))
    fit = fitter.fit(asked)
    fitting = [pace for kept, pace in outcomes if kept <= limit]
    assert (fit is None) == (not fitting)
    if fit is not None:
        assert fit.memory_bytes <= limit
        assert max(paces_s(fit.stages, asked, given_.network)) == min(fitting)
    assert fitter.least(asked).memory_bytes == min(kept for kept, _ in outcomes)


def test_the_first_stages_of_a_pipeline_get_less():
    # each unit leaves 10 bytes; stage 0 keeps three micro-batches of them, stage 2 one
    units = tuple(unit(f"h.{k}", forward_s=1, backward_s=1, activation_bytes=10) for k in range(6))
    profile = profile_of(units)
    roomy = Fitter(problem(profile, 60)).fit(candidate("1f1b"))
    tight = Fitter(problem(profile, 40)).fit(candidate("1f1b"))
    assert roomy.stages.names == ("h.0", "h.2", "h.4")
    assert tight.stages.names == ("h.0", "h.1", "h.3")
    assert [worker.activations for worker in tight.memory] == [30, 40, 30]
    assert Fitter(problem(profile, 29)).fit(candidate("1f1b")) is None


def test_a_stage_ends_where_little_crosses():
    units = tuple(
        unit(f"h.{k}", forward_s=1, backward_s=1, crossing_bytes=size)
        for k, size in enumerate([0, 1, 90, 1])
    )
    profile = profile_of(units)
    asked = candidate("1f1b", num_stages=2)
    slow = Fitter(problem(profile, 1e9, num_workers=2, bandwidth=10)).fit(asked)
    fast = Fitter(problem(profile, 1e9, num_workers=2, bandwidth=1e9)).fit(asked)
    assert fast.stages.names == ("h.0", "h.2")
    assert slow.stages.names in (("h.0", "h.1"), ("h.0", "h.3"))


def tied():
    units = tuple(unit(f"h.{k}", forward_s=1, backward_s=1, param_bytes=8) for k in range(3))
    return profile_of(units, ties=(Tie(units=(0, 2), bytes=8),))


def test_stages_that_share_parameters_are_part_of_the_plan():
    fit = Fitter(problem(tied(), 1e9)).fit(candidate("1f1b"))
    assert fit.plan.tied == ((0, 2),)
    with pytest.raises(PlanError, match="do not fit tied"):
        Fitter(problem(tied(), 1e9)).fit(candidate("pipeoptim"))


def test_workers_that_take_turns_are_counted_by_their_own_program():
    units = tuple(unit(f"h.{k}", forward_s=1, backward_s=1, activation_bytes=10) for k in range(6))
    profile = profile_of(units)
    fit = Fitter(problem(profile, 1e9, num_workers=4)).fit(candidate("cyclic_mp"))
    assert fit.plan.num_workers == len(fit.memory) == 4  # of three stages
    assert all(worker.activations > 0 for worker in fit.memory)


def test_workers_that_run_whole_micro_batches_need_room_for_the_model():
    asked = candidate("cyclic_dp", num_microbatches=3)
    fit = Fitter(problem(tied(), 1e9)).fit(asked)
    assert fit.memory_bytes == max(worker.total for worker in fit.memory)
    assert Fitter(problem(tied(), fit.memory_bytes)).fit(asked) is not None
    assert Fitter(problem(tied(), fit.memory_bytes - 1)).fit(asked) is None
