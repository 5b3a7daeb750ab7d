import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.simulate.graph import Lane, build
from lightning_cyclic.simulate.turns import in_turn, take_turns

PLANS = [
    ("cyclic_dp", {"num_stages": 4, "num_workers": 4}),
    ("cyclic_dp", {"num_stages": 5, "num_workers": 3, "chunks": 3, "slack": 2}),
    ("cyclic_dp", {"num_stages": 4, "num_workers": 4, "sharding": "none"}),
    ("cyclic_dp_v1", {"num_stages": 4, "num_workers": 3}),
    ("lockstep_dp", {"num_stages": 4, "num_workers": 4, "chunks": 2}),
    ("cyclic_zero", {"num_stages": 4, "num_workers": 4}),
    ("weipipe", {"num_stages": 4, "num_workers": 4}),
    ("1f1b", {"num_stages": 2, "num_workers": 4, "width": 2}),
    ("cyclic_pipeline", {"num_stages": 4, "num_workers": 4, "relayed": (1,)}),
    ("cyclic_mp", {"num_stages": 3, "num_workers": 6}),
]


def graph_of(preset, numbers):
    plan = make_plan(preset, num_steps=4, **numbers)
    return build(plan.programs, plan)


@pytest.mark.parametrize(("preset", "numbers"), PLANS)
def test_nothing_comes_before_what_it_waits_for_nor_for_ever_behind_its_port(preset, numbers):
    graph = graph_of(preset, numbers)
    order = in_turn(graph)
    assert sorted(order) == list(range(len(graph.actions)))
    take_turns(graph, order, [1.0] * len(order))
    place = {node: n for n, node in enumerate(order)}
    for node in order:
        for other in (*graph.after[node], *graph.told[node], graph.feeds[node]):
            assert other < 0 or place[node] < place[other]


@pytest.mark.parametrize(("preset", "numbers"), PLANS)
def test_all_ports_serve_messages_in_one_order(preset, numbers):
    """That of sends on a port is that of their receives on any other."""
    graph = graph_of(preset, numbers)
    order = in_turn(graph)
    sends = [node for node in order if graph.actions[node].kind is Kind.SEND]
    receives = [node for node in order if graph.actions[node].kind is Kind.RECV]
    assert [graph.feeds[node] for node in sends] == receives


def test_a_port_serves_each_with_bytes_behind_the_one_before_it():
    graph = graph_of("cyclic_dp", {"num_stages": 4, "num_workers": 4})
    order = in_turn(graph)
    blockers = list(graph.blockers)
    seconds = [float(graph.actions[node].j > 0) for node in range(len(order))]
    take_turns(graph, order, seconds)
    for w in range(4):
        for lane in (Lane.SEND, Lane.RECEIVE):
            port = [n for n in order if graph.actions[n].payload is not None
                    and (graph.workers[n], graph.lane(n)) == (w, lane)]  # fmt: skip
            held = [n for n in port if seconds[n]]
            more = [graph.blockers[n] - blockers[n] for n in port]
            assert more == [int(n in held[1:]) for n in port]
            assert all(b in graph.after[a] for a, b in zip(held, held[1:], strict=False))
