from functools import partial
from itertools import product

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner.data_parallel import (
    ALIKE,
    best_around_ring,
    choose_data_parallel,
)
from lightning_cyclic.planner.ring_numbers import RingChoices, RingNumbers
from lightning_cyclic.simulate import Costs, Network, best_lockstep, steady_step_s

MORE = pytest.mark.exhaustive
BANDWIDTH = 1.25e8
SMALL = RingChoices(most_stages=8)


def cut_of(model_bytes, compute_s=0.1):
    return lambda num: Costs.even(num, compute_s=compute_s, model_bytes=model_bytes)


def cases():
    """Yield from where the network is idle to where it takes all the time."""
    for share, latency_s in product((0.1, 0.6, 3.0), (5e-6, 1e-3, 1e-2)):
        network = Network(latency_s=latency_s, bandwidth_bytes_per_s=BANDWIDTH)
        yield share * 0.1 * BANDWIDTH, network


@pytest.mark.parametrize("num_workers", [1, 2, 3, pytest.param(4, marks=MORE)])
def test_never_worse_than_the_best_lockstep(num_workers):
    won, lost = 0, 0
    for model_bytes, network in cases():
        cut = cut_of(model_bytes)
        found = choose_data_parallel(cut, network, num_workers, SMALL)
        assert found.lockstep == best_lockstep(cut(8), network, num_workers)
        assert found.speed >= 1.0
        ring = best_around_ring(cut, network, num_workers, SMALL)
        if found.ring is None:
            lost += 1
            assert found.step_s == found.lockstep.step_s <= ALIKE * ring.step_s
        else:
            won += 1
            numbers = found.ring.numbers
            costs = cut(numbers.num_stages)
            assert found.step_s == steady_step_s(numbers.plan(num_workers), costs, network)
            assert found.lockstep.step_s / ALIKE > found.step_s
    assert lost > 0
    assert (won > 0) == (num_workers > 1)


@pytest.mark.parametrize("num_workers", [2, *[pytest.param(n, marks=MORE) for n in (3, 4)]])
def test_hardly_any_other_plan_is_faster(num_workers):
    for model_bytes, network in cases():
        cut = cut_of(model_bytes)
        found = best_around_ring(cut, network, num_workers, SMALL)
        every = [
            steady_step_s(n.plan(num_workers), cut(n.num_stages), network)
            for n in SMALL.numbers(num_workers, network)
        ]
        assert found.num_simulated < len(every) / 2
        assert found.step_s <= 1.05 * min(every), (model_bytes, network, found)


def test_the_same_arguments_have_the_same_answer():
    network = Network(latency_s=1e-3, bandwidth_bytes_per_s=BANDWIDTH)
    one, other = (choose_data_parallel(cut_of(1e7), network, 4, SMALL) for _ in range(2))
    assert one == other


def test_of_plans_alike_the_simplest():
    quick = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e12)
    found = choose_data_parallel(cut_of(1e6), quick, 4, RingChoices(most_stages=64))
    assert found.ring is not None
    numbers = found.ring.numbers
    assert (numbers.slack, numbers.is_delayed) == (0, False)
    assert numbers.num_stages < 64


def test_only_what_is_allowed_is_chosen():
    network = Network(latency_s=2e-2, bandwidth_bytes_per_s=BANDWIDTH)
    allowed = RingChoices(
        most_stages=8, stages=(3,), slacks=(5,), delayed=(False,), shardings=("none",)
    )
    found = best_around_ring(cut_of(1e7), network, 4, allowed)
    assert found.numbers == RingNumbers(False, 5, 3, "none")
    many = best_around_ring(cut_of(1e7), network, 4, RingChoices(most_stages=2, stages=(3, 9)))
    assert many.numbers.num_stages == 2  # as many as there are


def test_hosts_of_other_workers_are_refused():
    network = Network(latency_s=1e-3, hosts=(0, 0), inside=Network())
    with pytest.raises(PlanError, match="of 4 workers"):
        choose_data_parallel(cut_of(1e6), network, 4, SMALL)
