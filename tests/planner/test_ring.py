from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from lightning_cyclic.plan import make_plan, programs_of
from lightning_cyclic.planner import ring
from lightning_cyclic.planner.ring import (
    RingNumbers,
    best_around_ring,
    fresh_readers,
    ring_bound_s,
    sizes_of_groups,
)
from lightning_cyclic.simulate import Costs, Network, account, simulate
from tests.harness.rows import more

BANDWIDTH = 1.25e8


def cut_of(model_bytes, compute_s=0.1):
    return lambda num: Costs.even(num, compute_s=compute_s, model_bytes=model_bytes)


def cases():
    """Yield from where the network is idle to where it takes all the time."""
    for share, latency_s in product((0.1, 0.6, 3.0), (5e-6, 1e-3, 1e-2)):
        network = Network(latency_s=latency_s, bandwidth_bytes_per_s=BANDWIDTH)
        yield share * 0.1 * BANDWIDTH, network


@pytest.mark.parametrize(
    ("preset", "num_workers"),
    [("cyclic_dp", 2), more("cyclic_dp", 4), more("cyclic_dp_v1", 2), ("cyclic_dp_v1", 4)],
)
def test_hardly_any_other_plan_is_faster(preset, num_workers):
    for model_bytes, network in cases():
        cut = cut_of(model_bytes)

        def step_s(numbers, cut=cut, network=network):
            plan = numbers.plan(num_workers)
            return simulate(programs_of(plan), cut(numbers.num_stages), network, plan).step_s

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


def test_groups_are_each_on_one_host():
    assert sizes_of_groups(6, "aaabbb") == [1, 3]
    assert sizes_of_groups(4, "abab") == [1]


NETWORKS = [  # of powers of two, so that no sum of times is rounded
    Network(bandwidth_bytes_per_s=4.0),
    Network(latency_s=0.25, bandwidth_bytes_per_s=2.0),
    Network(latency_s=2.0, bandwidth_bytes_per_s=64.0),
]


INSIDE = Network(latency_s=2.0**-6, bandwidth_bytes_per_s=32.0)


def plan_of(num_workers, num_stages, slack=0, sharding="optimizer", num_steps=8, group_size=1):
    return make_plan(
        "cyclic_dp", num_workers=num_workers, num_stages=num_stages, slack=slack,
        sharding=sharding, num_steps=num_steps, group_size=group_size, proved=False,
    )  # fmt: skip


def even(num_stages):
    return Costs(
        forward_s=(0.25,) * num_stages,
        backward_s=(0.5,) * num_stages,
        param_bytes=(1.0,) * num_stages,
    )


@pytest.mark.parametrize(("num_workers", "num_stages"), [*product((1, 2, 3, 4, 6), repeat=2)])
def test_who_reads_the_newest_version_as_plans_say(num_workers, num_stages):
    for slack in range(2 * num_stages + 1):
        plan = plan_of(num_workers, num_stages, slack)
        for j in range(num_stages):
            fresh = [i for i in range(num_workers) if plan.lag(plan.late_step, i, j) == 0]
            count = fresh_readers(j, num_stages, num_workers, slack)
            assert fresh == [*range(num_workers)][num_workers - count :], (slack, j)


@pytest.mark.parametrize(
    ("num_workers", "num_stages"), [(1, 2), (2, 1), (2, 4), (3, 2), (4, 4), (4, 3)]
)
def test_no_simulated_step_is_faster(num_workers, num_stages):
    costs, close = even(num_stages), 0
    for network, sharding in product(NETWORKS, ("optimizer", "none")):
        for slack in (0, 1, 2 * num_stages):
            plan = plan_of(num_workers, num_stages, slack, sharding, num_steps=16)
            step_s = simulate(programs_of(plan), costs, network, plan).step_s
            bound_s = ring_bound_s(costs, network, num_workers, slack=slack, sharding=sharding)
            assert step_s >= bound_s, (network, slack, sharding)
            close += step_s < 1.1 * bound_s
    assert close > 5  # of 18: the bound says something


@pytest.mark.parametrize(
    ("num_workers", "size", "per_host"),
    [(4, 1, 2), (4, 2, 2), (4, 2, 4), (6, 3, 3), (6, 2, 0), (8, 2, 4)],
)
def test_nor_of_groups_and_on_hosts(num_workers, size, per_host):
    hosts = tuple(w // per_host for w in range(num_workers)) if per_host else ()
    costs, close = replace(even(3), sent_sum_bytes=(0.5, 0.5, 2.0)), 0
    for link, slack in product(NETWORKS, (0, 2, 6)):
        network = replace(link, hosts=hosts, inside=INSIDE if hosts else None)
        plan = plan_of(num_workers, 3, slack, num_steps=16, group_size=size)
        step_s = simulate(programs_of(plan), costs, network, plan).step_s
        bound_s = ring_bound_s(costs, network, num_workers, slack=slack, group_size=size)
        assert step_s >= bound_s, (network, slack)
        close += step_s < 1.2 * bound_s
    assert close > 2  # of 9


@pytest.mark.parametrize("sharding", ["optimizer", "none"])
def test_the_fullest_port_is_counted_as_programs_have_it(sharding):
    costs, network = even(4), Network(bandwidth_bytes_per_s=2.0**-10)  # nothing else counts
    for num_workers, slack in product((2, 3, 4, 5), (0, 3, 8)):
        plan = plan_of(num_workers, 4, slack, sharding=sharding, num_steps=32)
        sent = max(sum(w.sent_bytes.values()) for w in account(programs_of(plan), costs).workers)
        bound_s = ring_bound_s(costs, network, num_workers, slack=slack, sharding=sharding)
        assert bound_s >= sent * 2.0**10


def test_the_slower_of_two_kinds_of_links_is_not_assumed():
    inside = Network(latency_s=0.5, bandwidth_bytes_per_s=8.0)
    network = Network(latency_s=0.25, bandwidth_bytes_per_s=4.0, hosts=(0, 0, 1, 1), inside=inside)
    quick = Network(latency_s=0.25, bandwidth_bytes_per_s=8.0)
    assert ring_bound_s(even(4), network, 4) == ring_bound_s(even(4), quick, 4)
