from fractions import Fraction
from itertools import product

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.planner import ring
from lightning_cyclic.planner.ring import RingNumbers, best_around_ring, sizes_of_groups
from lightning_cyclic.simulate import Costs, Network, simulate

BANDWIDTH = 1.25e8


def cut_of(model_bytes, compute_s=0.1):
    return lambda num: Costs.even(num, compute_s=compute_s, model_bytes=model_bytes)


def cases():
    """Yield from where the network is idle to where it takes all the time."""
    for share, latency_s in product((0.1, 0.6, 3.0), (5e-6, 1e-3, 1e-2)):
        network = Network(latency_s=latency_s, bandwidth_bytes_per_s=BANDWIDTH)
        yield share * 0.1 * BANDWIDTH, network


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1"])
def test_hardly_any_other_plan_is_faster(preset, num_workers):
    for model_bytes, network in cases():
        cut = cut_of(model_bytes)

        def step_s(numbers, cut=cut, network=network):
            plan = numbers.plan(num_workers)
            return simulate(plan.programs, cut(numbers.num_stages), network, plan).step_s

        found = best_around_ring(preset, cut, network, num_workers, 8)
        every = [*ring._numbers(preset, ring._stages(num_workers, 8), None, (1,))]
        assert step_s(found) <= 1.05 * min(map(step_s, every)), (model_bytes, network, found)


def test_of_plans_alike_the_simplest():
    quick = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e12)
    found = best_around_ring("cyclic_dp", cut_of(1e6), quick, 4, 64)
    assert found.slack == 0
    assert found.num_stages < 64


def test_only_what_is_allowed_is_chosen():
    network = Network(latency_s=2e-2, bandwidth_bytes_per_s=BANDWIDTH)
    found = best_around_ring("cyclic_dp", cut_of(1e7), network, 4, 6, slack=5, group_sizes=(2,))
    assert (found.slack, found.group_size) == (5, 2)
    assert found.num_stages <= 6


def test_what_would_take_too_long_is_not_chosen():
    network = Network(latency_s=1e-3, bandwidth_bytes_per_s=1.25e9)
    assert best_around_ring("cyclic_dp", cut_of(1e8), network, 1024, 64) is None


@pytest.mark.parametrize(("num_workers", "num_stages"), [(1, 1), (2, 3), (4, 4), (3, 5)])
def test_how_old_weights_are_is_what_plans_say(num_workers, num_stages):
    for preset, slack in (("cyclic_dp", 0), ("cyclic_dp", 3), ("cyclic_dp_v1", 0)):
        numbers = RingNumbers(preset, num_stages, slack)
        plan = numbers.plan(num_workers)
        cells = product(range(num_workers), range(num_stages))
        lags = [plan.lag(plan.late_step, i, j) for i, j in cells]
        if num_workers > 1:
            assert numbers.behind(num_workers) == Fraction(sum(lags), len(lags))


def test_numbers_are_those_of_the_plan():
    plan = RingNumbers("cyclic_dp", 8, 2, 2).plan(4, num_steps=3)
    assert plan == make_plan(
        "cyclic_dp", num_workers=4, num_stages=8, slack=2, group_size=2, num_steps=3
    )


def test_simpler_is_less_old_then_less_of_all():
    numbers = [("cyclic_dp", 8, 0), ("cyclic_dp", 8, 1), ("cyclic_dp", 1, 0), ("cyclic_dp_v1", 1)]
    ranks = [RingNumbers(*each).rank(8) for each in numbers]
    assert ranks == sorted(ranks)


def test_stages_are_powers_of_two_and_such_times_the_workers():
    assert ring._stages(3, 6) == [1, 2, 3, 4, 6]
    assert ring._stages(8, 2) == [1, 2]


def test_groups_are_each_on_one_host():
    assert sizes_of_groups(6, "aaabbb") == [1, 3]
    assert sizes_of_groups(4, "abab") == [1]
