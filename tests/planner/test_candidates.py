from dataclasses import replace

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import programs_of
from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.planner import (
    DEFAULT_PRESETS,
    Candidate,
    ModelProfile,
    Problem,
    Stages,
    UnitProfile,
)
from lightning_cyclic.planner.candidates import StatesPerParam, candidates
from lightning_cyclic.planner.fit import Fitter
from lightning_cyclic.planner.ring import best_around_ring
from lightning_cyclic.simulate import Network, account


def profile_of(count=8, micro_size=4):
    unit = {
        "forward_s": 0.01, "backward_s": 0.02, "param_bytes": 10, "activation_bytes": 50,
        "crossing_bytes": 5,
    }  # fmt: skip
    units = tuple(UnitProfile(name=f"h.{k}", **unit) for k in range(count))
    return ModelProfile(name="net", micro_size=micro_size, units=units)


def problem_of(**changes):
    return Problem(
        **{"profiles": (profile_of(),), "num_workers": 4, "memory_bytes": 1e9} | changes
    )


def found(**changes):
    return [
        (c.replicas, c.num_stages, c.num_microbatches, c.micro_size, c.remat)
        for c in candidates(problem_of(**changes))
    ]


def test_pipelines_have_every_width_and_size_that_divide():
    got = found(presets=("1f1b",), checkpointing=("never",))
    assert {case[:2] for case in got} == {(1, 4), (2, 2), (4, 1)}
    assert {case[2:4] for case in got} == {(1, 16), (2, 8), (4, 4)}
    assert all(num_microbatches % replicas == 0 for replicas, _, num_microbatches, _, _ in got)
    assert (4, 1, 2, 8, False) not in got  # two micro-batches for four replicas
    assert len(found(presets=("1f1b",))) == 3 * len(got)  # never, always, optimal
    assert len(found(presets=("1f1b",), precision="bf16-true")) == 2 * len(got)
    assert len(found(presets=("spectrain",))) == 2 * len(
        found(presets=("spectrain",), checkpointing=("never",))
    )


def test_no_more_stages_than_units():
    got = found(profiles=(profile_of(3),), presets=("gpipe",))
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
    given = problem_of(
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
    assert not {"spectrain", "diloco", "streaming_diloco"} & set(DEFAULT_PRESETS)


def test_a_single_profile_is_scaled_and_several_are_taken_as_they_are():
    assert sorted(problem_of().by_size) == [4, 8, 16]
    slow = replace(profile_of(micro_size=8), name="slow")
    both = problem_of(profiles=(profile_of(), slow))
    assert both.by_size == {4: profile_of(), 8: slow}
    assert both.profile(16).name == "slow"  # the nearest
    assert both.profile(16).units[0].forward_s == 0.02


def test_a_batch_is_the_largest_measured_micro_batch_per_worker():
    assert problem_of().samples == 16
    assert problem_of(profiles=(profile_of(), profile_of(micro_size=2))).samples == 16
    assert problem_of(batch_size=48).samples == 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": 0}, "num_workers=0; allowed: 1 or more"),
        ({"batch_size": -1}, "batch_size=-1; allowed: 0 or more"),
        ({"state_per_param": -1.0}, "state_per_param=-1.0; allowed: 0 or more"),
        ({"memory_bytes": 0}, "memory_bytes=0; allowed: above 0"),
        ({"presets": ("cdp",)}, "preset 'cdp' is unknown; allowed: cyclic_dp"),
        ({"profiles": ()}, r"profiles of micro-batches of \[\] samples"),
        ({"profiles": (profile_of(), profile_of())}, r"\[4, 4\] samples; allowed: one or more"),
        ({"profiles": (profile_of(), profile_of(3, 8))}, "of the same units"),
    ],
)
def test_problems_that_cannot_be(changes, message):
    with pytest.raises(PlanError, match=message):
        problem_of(**changes)


def fitted(preset, *, num_workers=1, num_stages=1, replicas=1, **changes):
    units = (
        UnitProfile(
            name="h", forward_s=1, backward_s=2, param_bytes=2e6, activation_bytes=0,
            crossing_bytes=0,
        ),
    ) * num_stages  # fmt: skip
    asked = Problem(
        profiles=(ModelProfile(name="net", micro_size=1, units=units),),
        num_workers=num_workers,
        memory_bytes=1e12,
        **changes,
    )
    chosen = Candidate(
        preset=preset, replicas=replicas, num_stages=num_stages, num_microbatches=2 * num_workers,
        micro_size=1,
    )  # fmt: skip
    return Fitter(asked).fit(chosen).memory[0]


@pytest.mark.parametrize(
    ("precision", "sparsity", "bytes_per_param"),
    [
        ("32-true", None, 16),
        ("32-true", 0.9, 6.0),  # 20 f + 4
        ("bf16-true", None, 20),
        ("bf16-true", 0.9, 4.2),  # 22 f + 2
        ("16-true", 0.5, 13),
        ("bf16-true", 0.0, 24),
    ],
)
def test_bytes_per_parameter(precision, sparsity, bytes_per_param):
    size = 4 if precision == "32-true" else 2
    kept = fitted("1f1b", sparsity=sparsity, precision=precision)
    assert kept.total / (2e6 / size) == pytest.approx(bytes_per_param, abs=1e-9)


def test_bytes_by_what_they_are_for():
    kept = fitted("1f1b", sparsity=0.75, precision="bf16-true")  # a million parameters, f = 1/4
    assert (kept.parameters, kept.index, kept.gradients) == (2e6, 1e6, 0.5e6)
    assert kept.optimizer == 4e6  # masters 1, float32 gradients 1, Adam's means 2


@pytest.mark.parametrize(
    ("precision", "break_even"), [("bf16-true", 18 / 22), ("32-true", 12 / 20)]
)
def test_break_even(precision, break_even):
    assert StatesPerParam.of(precision, 0.5, 2.0).break_even == pytest.approx(break_even)


@pytest.mark.parametrize("preset", ["lockstep_dp", "cyclic_zero", "1f1b"])
def test_messages_carry_the_kept_elements_alone(preset):
    from lightning_cyclic.plan import make_plan

    replicas = 2 if preset == "1f1b" else 1
    plan = make_plan(
        preset, num_stages=2, num_workers=4 if replicas == 2 else 2,
        num_microbatches=4 if replicas == 2 else 2, replicas=replicas,
    )  # fmt: skip
    stages = replace(Stages.alike(2), param_bytes=(64,) * 2, input_bytes=(8,) * 2)
    dense, sparse = (account(programs_of(plan), stages.costs(kept=f)).workers for f in (1.0, 0.25))
    shares = {
        payload.name: few.sent_bytes[payload] / size
        for many, few in zip(dense, sparse, strict=True)
        for payload, size in many.sent_bytes.items()
        if size
    }
    assert {share for name, share in shares.items() if name not in "AG"} == {0.25}
    assert {share for name, share in shares.items() if name in "AG"} <= {1.0}


def test_sums_of_low_precision_gradients_travel_in_float32():
    from lightning_cyclic.plan import make_plan

    states = StatesPerParam.of("bf16-true", None, 2.0)
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2)
    stages = replace(Stages.alike(2), param_bytes=(64,) * 2)
    costs = (stages.costs(sums=x) for x in (1.0, states.sums))
    alike, wider = (account(programs_of(plan), each).workers[0].sent_bytes for each in costs)
    assert wider[Payload.S] == 2 * alike[Payload.S] > 0
    assert wider[Payload.P] == alike[Payload.P] > 0


@pytest.mark.parametrize("sparsity", [-0.1, 1, float("nan")])
def test_a_sparsity_that_cannot_be(sparsity):
    with pytest.raises(PlanError, match=r"sparsity=.*; allowed: from 0 to below 1"):
        fitted("1f1b", sparsity=sparsity)


def test_an_unknown_precision():
    with pytest.raises(PlanError, match="precision 'bf16' is unknown; allowed: 32-true"):
        fitted("1f1b", precision="bf16")
