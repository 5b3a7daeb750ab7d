"""The figures that the design names, from the package's own simulator."""

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.simulate import Costs, Network, lockstep, simulate


def both(num_workers, psi, latency_s):
    """Return the step times of cyclic and lockstep data parallelism, in units of compute."""
    num_stages = max(num_workers, 8)
    plan = make_plan("cyclic_dp", num_stages=num_stages, num_workers=num_workers, num_steps=12)
    costs = Costs.even(num_stages, compute_s=1.0, model_bytes=psi)
    network = Network(latency_s=latency_s, bandwidth_bytes_per_s=1.0)
    return (
        simulate(plan.programs, costs, network).step_s,
        lockstep(costs, network, num_workers).step_s,
    )


@pytest.mark.parametrize(
    ("num_workers", "psi", "latency_s", "cyclic", "reference"),
    [
        (2, 0.5, 0.0, 1.00, 1.06),
        (4, 0.5, 0.0, 1.00, 1.17),
        (16, 0.5, 0.0, 1.15, 1.31),
        (16, 0.3, 0.002, 1.00, 1.90),
    ],
)
def test_step_times_of_the_design(num_workers, psi, latency_s, cyclic, reference):
    got = both(num_workers, psi, latency_s)
    assert got == (pytest.approx(cyclic, abs=0.025), pytest.approx(reference, abs=0.005))


def test_free_messages_cost_nothing():
    assert both(4, 0.0, 0.0) == (pytest.approx(1.0), pytest.approx(1.0))


@pytest.mark.parametrize("preset", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 2), (4, 4), (4, 12), (3, 1)])
def test_bubble_of_flushed_pipelines(preset, num_stages, num_microbatches):
    plan = make_plan(
        preset,
        num_stages=num_stages,
        num_workers=num_stages,
        num_microbatches=num_microbatches,
        num_steps=6,
    )
    bubble = simulate(plan.programs, Costs.even(num_stages)).bubble
    expected = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert bubble == pytest.approx((expected,) * num_stages)


@pytest.mark.parametrize("preset", ["gpipe", "1f1b"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_of_a_pipeline_have_the_bubble_of_one(preset, replicas):
    plan = make_plan(
        preset, num_stages=3, num_workers=3 * replicas, num_steps=6, replicas=replicas
    )
    assert simulate(plan.programs, Costs.even(3)).bubble == pytest.approx((2 / 5,) * 3 * replicas)


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1", "cyclic_pipeline", "pipedream"])
def test_no_bubble_without_a_flush(preset):
    plan = make_plan(preset, num_stages=4, num_workers=4, num_steps=12)
    assert simulate(plan.programs, Costs.even(4)).bubble == pytest.approx((0.0,) * 4)
