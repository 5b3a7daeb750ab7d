import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.planner import Candidate, ModelProfile, Problem, Stages, UnitProfile
from lightning_cyclic.planner.fit import Fitter
from lightning_cyclic.planner.states import StatesPerParam
from lightning_cyclic.simulate import account


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
        micro_size=1, remat=False,
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
    stages = Stages.alike(2, param_bytes=64, input_bytes=8)
    dense, sparse = (account(plan.programs, stages.costs(kept=f)).workers for f in (1.0, 0.25))
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
    stages = Stages.alike(2, param_bytes=64)
    costs = (stages.costs(sums=x) for x in (1.0, states.sums))
    alike, wider = (account(plan.programs, each).workers[0].sent_bytes for each in costs)
    assert wider[Payload.S] == 2 * alike[Payload.S] > 0
    assert wider[Payload.P] == alike[Payload.P] > 0


@pytest.mark.parametrize("sparsity", [-0.1, 1, float("nan")])
def test_a_sparsity_that_cannot_be(sparsity):
    with pytest.raises(PlanError, match=r"sparsity=.*; allowed: from 0 to below 1"):
        fitted("1f1b", sparsity=sparsity)


def test_an_unknown_precision():
    with pytest.raises(PlanError, match="precision 'bf16' is unknown; allowed: 32-true"):
        fitted("1f1b", precision="bf16")
