"""The order of workers on the ring, timed: hosts one after the other, and dealt in turn."""

from dataclasses import replace
from functools import cache

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.neighbours import crossings, ring_order
from lightning_cyclic.simulate import Costs, Network, simulate

SLOW = Network(latency_s=0.002, bandwidth_bytes_per_s=2.0)  # half of a step to send the model
FAST = Network(latency_s=0.0002, bandwidth_bytes_per_s=20.0)


@cache
def plan_of(preset, num_workers, **numbers):
    """Make a plan once: what is timed is its order of messages, on several networks."""
    return make_plan(preset, num_workers=num_workers, num_steps=12, proved=False, **numbers)


def step_s(preset, hosts, network, **numbers):
    """Return the steady step, one micro-batch being 1 s of compute and the model 1 byte."""
    plan = plan_of(preset, len(hosts), **numbers)
    costs = Costs.even(plan.num_stages, model_bytes=1.0, cut_bytes=0.2)
    network = replace(network, hosts=tuple(hosts), inside=FAST)
    return simulate(plan.programs, costs, network, plan).step_s


@pytest.mark.parametrize(
    ("preset", "numbers"),
    [
        ("cyclic_dp", {"num_stages": 8}),
        ("cyclic_dp_v1", {"num_stages": 8}),
        ("lockstep_dp", {"num_stages": 8}),
        ("cyclic_mp", {"num_stages": 8}),
        ("gpipe", {"num_stages": 8, "num_micro": 8}),
        ("1f1b", {"num_stages": 8, "num_micro": 16}),
        ("1f1b", {"num_stages": 4, "num_micro": 8, "width": 2}),
        ("pipedream_2bw", {"num_stages": 8, "num_micro": 8}),
    ],
)
@pytest.mark.parametrize("num_hosts", [2, 4])
@pytest.mark.parametrize("model_s", [0.1, 0.3, 0.5])
def test_no_step_is_longer_than_with_ranks_dealt_in_turn(preset, numbers, num_hosts, model_s):
    network = Network(latency_s=0.002, bandwidth_bytes_per_s=1 / model_s)
    in_turn = [w % num_hosts for w in range(8)]
    order = ring_order([(str(host),) for host in in_turn])
    chosen = [in_turn[rank] for rank in order]
    assert crossings([(str(host),) for host in chosen]) == (num_hosts,)
    got, dealt = (step_s(preset, hosts, network, **numbers) for hosts in (chosen, in_turn))
    assert got <= 1.003 * dealt  # other messages are now the slow ones, which may wait in turn


BY_HOST, IN_TURN = [0, 0, 0, 0, 1, 1, 1, 1], [0, 1] * 4


@pytest.mark.parametrize(
    ("preset", "most"), [("cyclic_dp", 0.95), ("lockstep_dp", 0.65), ("1f1b", 0.8)]
)
def test_a_slow_network_is_crossed_less(preset, most):
    by_host, in_turn = (step_s(preset, hosts, SLOW, num_stages=8) for hosts in (BY_HOST, IN_TURN))
    assert by_host < most * in_turn


def test_owners_that_send_to_all_gain_nothing_by_an_order():
    """So that cyclic_zero keeps the numbers that its ranks were launched with."""
    by_host, in_turn = (
        step_s("cyclic_zero", hosts, SLOW, num_stages=8) for hosts in (BY_HOST, IN_TURN)
    )
    assert by_host > in_turn
