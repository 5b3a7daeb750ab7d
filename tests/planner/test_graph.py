import pytest
from hypothesis import given

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner import Graph, Split, Tensor

from .brute import graphs


def test_who_makes_or_uses_a_tensor_pays_for_it_once():
    graph = Graph(
        seconds=(1, 2, 4),
        num_bytes=(0, 0, 0),
        edges=((0, 1), (0, 2)),
        tensors=(Tensor(transfer_s=10, nodes=(0, 1, 2)),),
    )
    assert [graph.load([v]) for v in range(3)] == [11, 12, 14]
    assert graph.load([1, 2]) == 16  # both use it
    assert graph.load([0, 1, 2]) == 7


@given(graphs())
def test_all_edges_go_forward_in_the_order(graph):
    place = {v: n for n, v in enumerate(graph.order)}
    assert sorted(place) == list(range(graph.num_nodes))
    assert all(place[u] < place[v] for u, v in graph.edges)


def test_the_order_stays_on_a_branch():
    edges = ((0, 1), (0, 3), (1, 2), (3, 4), (2, 5), (4, 5))
    order = Graph(seconds=(1,) * 6, num_bytes=(0,) * 6, edges=edges).order
    assert abs(order.index(1) - order.index(2)) == 1
    assert abs(order.index(3) - order.index(4)) == 1


def test_empty_stages_are_no_stages():
    graph = Graph.row([1, 2, 3])
    split = Split.of(graph, [[0], [], [2, 1]])
    assert (split.stages, split.load_s, split.on_host) == (((0,), (1, 2)), 5, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": ()}, "0 times and 2 sizes"),
        ({"num_bytes": (1,)}, "2 times and 1 sizes; allowed: one of each per node"),
        ({"host_s": (1,)}, "allowed: one of each per node"),
        ({"seconds": (1, -2)}, "cost -2 in a graph is negative"),
        ({"tensors": (Tensor(transfer_s=-1, nodes=(0, 1)),)}, "cost -1 in a graph is negative"),
        ({"edges": ((0, 2),)}, "node 2 is named by an edge or a tensor; allowed: 0 to 1"),
        ({"edges": ((0, 1), (1, 0))}, "go round in a circle"),
        ({"edges": ((1, 1),)}, "the edges of node 1 go round"),
    ],
)
def test_graphs_that_cannot_be(change, message):
    good = {"seconds": (1, 1), "num_bytes": (1, 1), "edges": ((0, 1),)}
    assert Graph(**good).num_nodes == 2
    with pytest.raises(PlanError, match=message):
        Graph(**good | change)
