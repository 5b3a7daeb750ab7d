from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner import CostGraph, GraphSplit, GraphTensor, split_ideals
from lightning_cyclic.planner.ideals import ideals, smaller_ideals
from lightning_cyclic.planner.partition import cut_row, row_of

from .brute import LINKS, best, goes_forward, graphs, graphs_and_parts, slowest, with_outputs

# of the notes on Tarnawski et al.: stages of one piece each, two of which need each other
ENTANGLED = with_outputs(
    [5, 6, 7, 9, 3, 5],
    [(0, 2), (0, 4), (1, 2), (1, 3), (1, 4), (2, 4), (3, 4), (3, 5)],
    [0, 3, 1, 0, 0, 0],
)


def check(graph, split, parts):
    """Check that a split is one, and that its seconds are those of its stages."""
    stage_of = {v: i for i, stage in enumerate(split.stages) for v in stage}
    assert sorted(stage_of) == list(range(graph.num_nodes))
    assert len(split.stages) == parts
    assert all(split.stages)
    homes = [stage_of[v] for v in range(graph.num_nodes)]
    assert goes_forward(graph, homes)
    assert split.slowest_s == slowest(graph, homes)


@settings(deadline=None)
@given(graphs_and_parts())
def test_as_good_as_the_best_of_all_splits(drawn):
    graph, parts = drawn
    split = split_ideals(graph, parts)
    check(graph, split, parts)
    assert split.slowest_s == best(graph, parts)


@settings(deadline=None)
@given(graphs_and_parts())
def test_a_chain_is_cut_as_the_row_that_it_is(drawn):
    graph, parts = drawn
    keeps = tuple(pairwise(range(graph.num_nodes)))
    chain = CostGraph(
        seconds=graph.seconds, tensors=graph.tensors, keeps=keeps, network=graph.network
    )
    crossing_s = [chain.crossing_s((1 << b) - 1) for b in range(graph.num_nodes + 1)]
    begins = cut_row(graph.num_nodes, parts, row_of(list(graph.seconds), crossing_s))
    split = split_ideals(chain, parts)
    assert [stage[0] for stage in split.stages] == begins
    assert split.slowest_s >= split_ideals(graph, parts).slowest_s  # one order is never better


def test_stages_that_need_each_other_are_none():
    split = split_ideals(ENTANGLED, 3)
    check(ENTANGLED, split, 3)
    assert not goes_forward(ENTANGLED, [0, 0, 1, 2, 2, 1])  # node 5 waits for 3, and 4 for 2


def test_one_order_may_be_worse_than_the_best():
    # a node, two branches side by side (1 2 and 3 4), a node; one order takes branch after branch
    edges = [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)]
    graph = with_outputs([5, 5, 2, 3, 2, 5], edges, [0] * 6)
    found = split_ideals(graph, 3)
    check(graph, found, 3)
    assert (found.slowest_s, found.stages[0]) == (8, (0, 3))
    in_order = [[0b1, 0b11, 0b111111], [0b1, 0b111, 0b111111], [0b11, 0b1111, 0b111111]]
    assert min(map(graph.slowest_s, in_order)) == 10


def test_ideals_of_two_chains():
    two = CostGraph(seconds=(1,) * 6, keeps=((0, 1), (1, 2), (3, 4), (4, 5)))
    found = ideals(two)
    assert len(found) == len(set(found)) == 4 * 4
    assert (found[0], found[-1]) == (0, 0b111111)
    with pytest.raises(PlanError, match=r"more than 15 ideals; allowed: 15; use larger nodes"):
        split_ideals(two, 2, most=15)


@given(graphs(most=5))
def test_smaller_ideals_are_those_that_are_part_of_each(graph):
    found = ideals(graph)
    weights = [graph.compute_s(ideal) for ideal in found]
    for ideal, inside in zip(found, smaller_ideals(found, weights), strict=True):
        assert {found[a] for a in inside} == {x for x in found if x & ideal == x} - {ideal}
        work = [weights[a] for a in inside]
        assert work == sorted(work, reverse=True)


def test_a_wide_graph_is_refused_before_it_is_explored():
    with pytest.raises(PlanError, match="a graph of 60 nodes has more than"):
        split_ideals(CostGraph(seconds=(1,) * 60), 2)


@pytest.mark.parametrize("parts", [0, 3])
def test_stages_that_would_be_empty_are_refused(parts):
    with pytest.raises(PlanError, match=f"cannot be cut into {parts} stages; allowed: 1 to 2"):
        split_ideals(CostGraph(seconds=(1, 2)), parts)


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
