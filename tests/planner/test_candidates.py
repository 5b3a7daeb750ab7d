from dataclasses import replace

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner import DEFAULT_PRESETS, ModelProfile, Problem, UnitProfile
from lightning_cyclic.planner.candidates import candidates
from lightning_cyclic.planner.ring import best_around_ring
from lightning_cyclic.planner.stages import Stages
from lightning_cyclic.simulate import Network


def profile(count=8, micro_size=4):
    unit = {
        "forward_s": 0.01, "backward_s": 0.02, "param_bytes": 10, "activation_bytes": 50,
        "crossing_bytes": 5,
    }  # fmt: skip
    units = tuple(UnitProfile(name=f"h.{k}", **unit) for k in range(count))
    return ModelProfile(name="net", micro_size=micro_size, units=units)


def problem(**changes):
    return Problem(**{"profiles": (profile(),), "num_workers": 4, "memory_bytes": 1e9} | changes)


def found(**changes):
    return [
        (c.replicas, c.num_stages, c.num_microbatches, c.micro_size, c.remat)
        for c in candidates(problem(**changes))
    ]


def test_pipelines_have_every_width_and_size_that_divide():
    got = found(presets=("1f1b",), remats=(False,))
    assert {case[:2] for case in got} == {(1, 4), (2, 2), (4, 1)}
    assert {case[2:4] for case in got} == {(1, 16), (2, 8), (4, 4)}
    assert all(num_microbatches % replicas == 0 for replicas, _, num_microbatches, _, _ in got)
    assert (4, 1, 2, 8, False) not in got  # two micro-batches for four replicas
    assert len(found(presets=("1f1b",))) == 2 * len(got)


def test_no_more_stages_than_units():
    got = found(profiles=(profile(3),), presets=("gpipe",))
    assert {case[:2] for case in got} == {(2, 2), (4, 1)}


def test_workers_that_run_whole_micro_batches_have_finer_and_finer_stages():
    assert found(presets=("lockstep_dp",), num_workers=2) == [
        (1, num_stages, 2, 4, False) for num_stages in (2, 4, 8)
    ]
    assert [case[1] for case in found(presets=("lockstep_dp",))] == [4, 8]  # no more than units
    assert found(presets=("lockstep_dp",), batch_size=6) == []


@pytest.mark.parametrize("slack", [0, 3])
def test_around_a_ring_numbers_are_those_that_the_network_asks_for(slack):
    far = Network(latency_s=0.02, bandwidth_bytes_per_s=1e3)
    hosts = replace(far, hosts=(0, 0, 1, 1), inside=Network())
    given = problem(
        presets=("cyclic_dp", "cyclic_dp_v1", "cyclic_zero"), network=Network(),
        host_network=hosts, group_sizes=(1, 2), slack=slack,
    )  # fmt: skip
    rings = {c.preset: c for c in candidates(given) if c.ring is not None}
    assert set(rings) == {"cyclic_dp", "cyclic_dp_v1"}
    for preset, candidate in rings.items():
        expected = best_around_ring(
            preset, lambda num: Stages.even(given.profiles[0], num, together=True).costs(),
            hosts, 4, 8, slack=slack or None, group_sizes=(1, 2),
        )  # fmt: skip
        assert candidate.ring == expected
        plan = candidate.plan(given, num_steps=6)
        assert candidate.num_stages == plan.num_stages == expected.num_stages
        assert plan.slack == candidate.ring.slack
        assert (plan.group_size, plan.preset) == (candidate.ring.group_size, preset)
    assert rings["cyclic_dp"].ring.group_size == 2
    assert not any(c.ring for c in candidates(replace(given, num_workers=1)))


def test_shared_places():
    assert {case[:2] for case in found(presets=("cyclic_mp",), num_workers=6)} == {(1, 3)}


def test_names_of_the_same_axes_are_looked_at_once():
    assert {"pipeoptim", "cyclic_mp", "cyclic_zero"} <= set(DEFAULT_PRESETS)
    assert "spectrain" not in DEFAULT_PRESETS


def test_a_single_profile_is_scaled_and_several_are_taken_as_they_are():
    assert sorted(problem().by_size) == [4, 8, 16]
    slow = replace(profile(micro_size=8), name="slow")
    both = problem(profiles=(profile(), slow))
    assert both.by_size == {4: profile(), 8: slow}
    assert both.profile(16).name == "slow"  # the nearest
    assert both.profile(16).units[0].forward_s == 0.02


def test_a_batch_is_the_largest_measured_micro_batch_per_worker():
    assert problem().samples == 16
    assert problem(profiles=(profile(), profile(micro_size=2))).samples == 16
    assert problem(batch_size=48).samples == 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": 0}, "num_workers=0; allowed: 1 or more"),
        ({"batch_size": -1}, "batch_size=-1; allowed: 0 or more"),
        ({"state_per_param": -1.0}, "state_per_param=-1.0; allowed: 0 or more"),
        ({"memory_bytes": 0}, "memory_bytes=0; allowed: above 0"),
        ({"presets": ("cdp",)}, "preset 'cdp' is unknown; allowed: cyclic_dp"),
        ({"profiles": ()}, r"profiles of micro-batches of \[\] samples"),
        ({"profiles": (profile(), profile())}, r"\[4, 4\] samples; allowed: one or more"),
        ({"profiles": (profile(), profile(3, 8))}, "of the same units"),
    ],
)
def test_problems_that_cannot_be(changes, message):
    with pytest.raises(PlanError, match=message):
        problem(**changes)
