"""Ports that serve messages in turn."""

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.simulate import Costs, Network, simulate
from lightning_cyclic.simulate.graph import Lane, build
from lightning_cyclic.simulate.turns import take_turns

PLANS = [
    ("cyclic_dp", {"num_stages": 4, "num_workers": 4}),
    ("cyclic_dp", {"num_stages": 5, "num_workers": 3, "slack": 2}),
    ("cyclic_dp", {"num_stages": 2, "num_workers": 9}),
    ("cyclic_dp_v1", {"num_stages": 4, "num_workers": 3}),
]


def served(preset, numbers, seconds=lambda action: 1.0):
    """Return the graph, how many nodes each waited for before, and the order."""
    plan = make_plan(preset, num_steps=4, **numbers)
    graph = build(plan.programs, plan, in_order=False)
    before = list(graph.blockers)
    return graph, before, take_turns(graph, plan, Network(), [seconds(a) for a in graph.actions])


@pytest.mark.parametrize(("preset", "numbers"), PLANS)
def test_nothing_comes_before_what_it_waits_for_nor_for_ever_behind_its_port(preset, numbers):
    graph, _, order = served(preset, numbers)
    assert sorted(order) == list(range(len(graph.actions)))
    place = {node: n for n, node in enumerate(order)}
    for node in order:
        for other in (*graph.after[node], graph.feeds[node]):
            assert other < 0 or place[node] < place[other]


@pytest.mark.parametrize(("preset", "numbers"), PLANS)
def test_all_ports_serve_messages_in_one_order(preset, numbers):
    """That of sends on a port is that of their receives on any other."""
    graph, _, order = served(preset, numbers)
    sends = [node for node in order if graph.actions[node].kind is Kind.SEND]
    receives = [node for node in order if graph.actions[node].kind is Kind.RECV]
    assert [graph.feeds[node] for node in sends] == receives


def test_a_port_serves_each_with_bytes_behind_the_one_before_it():
    numbers = {"num_stages": 4, "num_workers": 4}
    graph, before, order = served("cyclic_dp", numbers, lambda action: float(action.j > 0))
    for w in range(4):
        for lane in (Lane.SEND, Lane.RECEIVE):
            port = [n for n in order if graph.actions[n].payload is not None
                    and (graph.workers[n], graph.lane(n)) == (w, lane)]  # fmt: skip
            held = [n for n in port if graph.actions[n].j > 0]
            more = [graph.blockers[n] - before[n] for n in port]
            assert more == [int(n in held[1:]) for n in port]
            assert all(b in graph.after[a] for a, b in zip(held, held[1:], strict=False))


def test_on_a_network_with_time_to_spare_turns_cost_nothing():
    plan = make_plan("cyclic_dp", num_stages=4, num_workers=4, num_steps=8, slack=2)
    costs, network = Costs.even(4, model_bytes=1.0), Network(bandwidth_bytes_per_s=20.0)
    free, in_turn = (
        simulate(plan.programs, costs, network, plan, in_turn=x).step_s for x in (False, True)
    )
    assert in_turn == pytest.approx(free)


@pytest.mark.parametrize("more", [{"cores": 1}, {"plan": None}])
def test_turns_are_of_a_plan_whose_workers_share_no_cores(more):
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, num_steps=4)
    with pytest.raises(PlanError, match="in_turn=True; allowed: with the plan, and without cores"):
        simulate(plan.programs, Costs.even(2), **{"plan": plan, "in_turn": True, **more})
