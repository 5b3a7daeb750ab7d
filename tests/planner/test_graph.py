import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner import CostGraph, GraphSplit, GraphTensor
from lightning_cyclic.planner.ideals import nodes_in

from .brute import LINKS, graphs, slowest


def sends(num_bytes, maker, *users):
    return GraphTensor(num_bytes=num_bytes, maker=maker, users=users)


def test_a_tensor_for_a_stage_further_on_passes_through_all_between():
    graph = CostGraph(
        seconds=(1, 2, 4, 1), tensors=(sends(10, 0, 3), sends(1, 1, 2), sends(3, 2, 3)),
        network=LINKS,
    )  # fmt: skip
    assert [graph.crossing_s(ideal) for ideal in (0, 0b1, 0b11, 0b111, 0b1111)] == [
        0, 10, 10 + 1, 10 + 3, 0,
    ]  # fmt: skip
    split = GraphSplit.of(graph, [0b1, 0b11, 0b111, 0b1111])
    assert split.stages == ((0,), (1,), (2,), (3,))
    assert split.slowest_s == 11 + 13  # of stage 2, which receives and sends what stage 3 needs


def test_a_tensor_crosses_until_its_last_user_and_once_for_all_of_them():
    graph = CostGraph(seconds=(1,) * 4, tensors=(sends(5, 0, 1, 3),))
    assert [graph.crossing_bytes(ideal) for ideal in (0b1, 0b11, 0b111, 0b1111)] == [5, 5, 5, 0]
    assert graph.crossing_bytes(0b100) == 0  # nothing of it has run


def test_computing_and_messages_overlap():
    for seconds, expected in ((4, 4), (11, 11)):
        graph = CostGraph(seconds=(seconds, 1), tensors=(sends(9, 0, 1),), network=LINKS)
        assert graph.slowest_s([0b1, 0b11]) == max(expected, 9)


@given(graphs(), st.data())
def test_seconds_are_those_of_the_definition(graph, data):
    cuts = data.draw(st.sets(st.integers(1, graph.num_nodes - 1))) if graph.num_nodes > 1 else ()
    begins = sorted(cuts)
    stage_of = [sum(b <= v for b in begins) for v in range(graph.num_nodes)]
    ends = [(1 << b) - 1 for b in [*begins, graph.num_nodes]]
    assert graph.slowest_s(ends) == slowest(graph, stage_of)


@pytest.mark.parametrize(
    ("keeps", "tensors", "is_chain"),
    [
        ((), (), False),
        (((0, 1), (1, 2)), (), True),
        (((0, 2), (1, 2)), (), False),
        ((), (sends(1, 0, 1, 2), sends(0, 1, 2)), True),
        (((0, 1),), (sends(1, 0, 2),), False),
    ],
)
def test_chains_can_run_in_one_order_only(keeps, tensors, is_chain):
    assert CostGraph(seconds=(1, 1, 1), keeps=keeps, tensors=tensors).is_chain is is_chain


def test_nodes_of_a_mask():
    assert list(nodes_in(0)) == []
    assert sum(1 << v for v in nodes_in(0b100101)) == 0b100101


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": ()}, "a graph of 0 nodes"),
        ({"seconds": (1, -2)}, r"costs \[1, -2\]; allowed: one node or more, and numbers >= 0"),
        ({"tensors": (sends(-1, 0, 1),)}, "numbers >= 0"),
        ({"keeps": ((0, 2),)}, "node 2 cannot wait for node 0; allowed: numbers from 0 to 1"),
        ({"keeps": ((1, 0),)}, "node 0 cannot wait for node 1"),
        ({"tensors": (sends(1, 1, 1),)}, "node 1 cannot wait for node 1"),
    ],
)
def test_graphs_that_cannot_be(change, message):
    good = {"seconds": (1, 1), "keeps": ((0, 1),)}
    assert CostGraph(**good).num_nodes == 2
    with pytest.raises(PlanError, match=message):
        CostGraph(**good | change)
