from functools import cache
from itertools import product

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.simulate import Costs, Network, best_chunks, simulate
from lightning_cyclic.simulate.best_chunks import MOST

BANDWIDTH = 1e9
MANY, MORE = [(16, 2), (12, 8)], pytest.mark.exhaustive


@cache
def step_s(num_workers, num_stages, model_bytes, latency_s, chunks):
    numbers = {"num_workers": num_workers, "num_stages": num_stages, "num_steps": 8}
    plan = make_plan("cyclic_dp", chunks=chunks, **numbers)
    costs = Costs.even(num_stages, compute_s=1e-3, model_bytes=model_bytes)
    network = Network(latency_s=latency_s, bandwidth_bytes_per_s=BANDWIDTH)
    return simulate(plan.programs, costs, network, plan).step_s


@pytest.mark.parametrize(
    ("num_workers", "num_stages"), [(8, 2), *[pytest.param(*x, marks=MORE) for x in MANY]]
)
def test_a_step_is_within_a_tenth_of_the_simulator_s_best(num_workers, num_stages):
    gains = []
    for model_bytes, latency_s in product((1e7, 3e8), (0.0, 1e-3, 2e-2)):
        network = Network(latency_s=latency_s, bandwidth_bytes_per_s=BANDWIDTH)
        found = best_chunks(num_workers, num_stages, model_bytes, network)
        case = num_workers, num_stages, model_bytes, latency_s
        mine = step_s(*case, found)
        assert mine <= 1.1 * min(step_s(*case, k) for k in (1, 2, 4, 8, 16)), (case, found)
        gains.append(step_s(*case, 1) / mine)
    assert max(gains) > 1.1  # so that more than one is asked for


def test_where_nothing_is_gained_messages_stay_whole():
    slow = Network(latency_s=1e-4, bandwidth_bytes_per_s=1e8)
    assert best_chunks(64, 16, 1e8, Network()) == 1  # a free network
    assert best_chunks(64, 16, 1e5, slow) == 1  # too small to be cut
    assert best_chunks(2, 8, 1e9, slow) == 1  # few workers
    assert best_chunks(4, 8, 0, slow) == 1  # nothing to send


def test_there_are_never_more_than_any_stage_has_room_for():
    assert best_chunks(10_000, 2, 1e12, Network(bandwidth_bytes_per_s=1.0)) == MOST
