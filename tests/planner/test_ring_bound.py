from dataclasses import replace
from itertools import product

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.planner.ring_bound import fresh_readers, ring_bound_s
from lightning_cyclic.simulate import Costs, Network, account, simulate

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
            step_s = simulate(plan.programs, costs, network, plan).step_s
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
        step_s = simulate(plan.programs, costs, network, plan).step_s
        bound_s = ring_bound_s(costs, network, num_workers, slack=slack, group_size=size)
        assert step_s >= bound_s, (network, slack)
        close += step_s < 1.2 * bound_s
    assert close > 2  # of 9


@pytest.mark.parametrize("sharding", ["optimizer", "none"])
def test_the_fullest_port_is_counted_as_programs_have_it(sharding):
    costs, network = even(4), Network(bandwidth_bytes_per_s=2.0**-10)  # nothing else counts
    for num_workers, slack in product((2, 3, 4, 5), (0, 3, 8)):
        plan = plan_of(num_workers, 4, slack, sharding=sharding, num_steps=32)
        sent = max(sum(w.sent_bytes.values()) for w in account(plan.programs, costs).workers)
        bound_s = ring_bound_s(costs, network, num_workers, slack=slack, sharding=sharding)
        assert bound_s >= sent * 2.0**10


def test_the_slower_of_two_kinds_of_links_is_not_assumed():
    inside = Network(latency_s=0.5, bandwidth_bytes_per_s=8.0)
    network = Network(latency_s=0.25, bandwidth_bytes_per_s=4.0, hosts=(0, 0, 1, 1), inside=inside)
    quick = Network(latency_s=0.25, bandwidth_bytes_per_s=8.0)
    assert ring_bound_s(even(4), network, 4) == ring_bound_s(even(4), quick, 4)
