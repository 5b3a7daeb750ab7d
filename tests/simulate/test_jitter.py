import math
import statistics
from dataclasses import replace

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.simulate import (
    Costs,
    Jitter,
    Network,
    best_lockstep,
    compare,
    lockstep,
    simulate,
)
from lightning_cyclic.simulate.lockstep import _equal_buckets, _step, unsteady

COSTS = Costs.even(4, compute_s=12.0, model_bytes=8.0, update_s=0.5)
LINK = Network(latency_s=0.01, bandwidth_bytes_per_s=2.0)
HOSTS = Network(
    latency_s=0.01, bandwidth_bytes_per_s=2.0,
    hosts=(0, 0, 1, 1), inside=Network(latency_s=0.001, bandwidth_bytes_per_s=20.0),
)  # fmt: skip


def cyclic(network=None, jitter=None, **numbers):
    numbers = {"num_stages": 4, "num_workers": 4, "num_steps": 20} | numbers
    plan = make_plan("cyclic_dp", **numbers)
    return simulate(plan.programs, COSTS, network, plan, jitter=jitter)


def steady(all_reduce, num_workers, network, num_buckets):
    buckets = _equal_buckets(COSTS, num_buckets)
    return _step(COSTS, network, num_workers, 1, buckets, all_reduce)


@pytest.mark.parametrize("num_buckets", [1, 3, 8])
@pytest.mark.parametrize(
    ("all_reduce", "num_workers", "network"),
    [
        ("ring", 2, LINK), ("ring", 5, LINK), ("tree", 2, LINK), ("tree", 8, LINK),
        ("tree", 6, LINK), ("two-level", 4, HOSTS),
    ],
)  # fmt: skip
def test_without_jitter_rounds_take_what_the_formula_says(
    all_reduce, num_workers, network, num_buckets
):
    step = steady(all_reduce, num_workers, network, num_buckets)
    found = unsteady(step, COSTS, network, num_workers, Jitter(), num_steps=6)
    assert found.step_s == pytest.approx(step.step_s, rel=1e-9)


@pytest.mark.parametrize("bucket_bytes", [0, 3, 8])
def test_buckets_that_are_given_are_kept(bucket_bytes):
    step = lockstep(COSTS, LINK, 5, bucket_bytes=bucket_bytes)
    found = unsteady(step, COSTS, LINK, 5, Jitter(), num_steps=6, bucket_bytes=bucket_bytes)
    assert found.step_s == pytest.approx(step.step_s, rel=1e-9)


def test_without_jitter_a_plan_takes_what_it_does():
    assert cyclic(LINK, Jitter()) == cyclic(LINK)


def test_where_all_are_slow_nobody_is_slower():
    slow = Jitter(stragglers=1.0, slowdown=3.0)
    assert cyclic(jitter=slow).step_s == pytest.approx(3 * cyclic().step_s)
    reference = unsteady(best_lockstep(COSTS, Network(), 4), COSTS, Network(), 4, slow)
    assert reference.step_s == pytest.approx(3 * 12.5)


def test_draws_follow_from_the_seed_and_what_they_are_for():
    jitter, other = Jitter(compute=0.3, latency=1.0), Jitter(compute=0.3, latency=1.0, seed=1)
    steps = [jitter.of_step(w, t) for w in range(40) for t in range(40)]
    assert steps == [jitter.of_step(w, t) for w in range(40) for t in range(40)]
    assert len(set(steps)) == len(steps)
    assert other.of_step(0, 0) != jitter.of_step(0, 0)
    assert statistics.mean(steps) == pytest.approx(1.0, abs=0.02)
    messages = [jitter.of_message(w, n) for w in range(40) for n in range(40)]
    assert min(messages) >= 1
    assert statistics.mean(messages) == pytest.approx(2.0, abs=0.1)


def test_lockstep_waits_for_the_slowest_of_each_step():
    jitter = Jitter(stragglers=0.2)
    slowest = [max(jitter.of_step(w, t) for w in range(8)) for t in range(40)]
    costs = replace(COSTS, update_s=(0.0,) * 4)  # which those that were not slow begin with
    found = unsteady(best_lockstep(costs, Network(), 8), costs, Network(), 8, jitter)
    assert found.step_s == pytest.approx(12 * statistics.mean(slowest[20:]))


def test_staggered_workers_bear_stragglers_better():
    numbers = {"num_stages": 8, "num_workers": 8, "num_steps": 40}
    costs = Costs.even(8, compute_s=1.0, model_bytes=0.1)
    speeds = [
        compare(make_plan(preset, **numbers), costs, LINK, jitter=Jitter(stragglers=0.1)).speed
        for preset in ("cyclic_dp", "cyclic_dp_v1")
    ]
    assert speeds[1] > speeds[0] > 1.05


@pytest.mark.parametrize(
    "numbers",
    [
        {"compute": -0.1},
        {"latency": -1},
        {"stragglers": 1.5},
        {"slowdown": 0.5},
        {"compute": math.nan},
        {"latency": math.inf},
        {"stragglers": math.nan},
    ],
)
def test_numbers_out_of_range_are_refused(numbers):
    with pytest.raises(PlanError, match=r"Jitter\(.*; allowed: compute and latency from 0 on"):
        Jitter(**numbers)
