from itertools import combinations, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner import Graph, balance, split_ideals, split_linear
from lightning_cyclic.planner.ideals import ideals

from .brute import best, goes_forward, graphs, slowest, splits, with_outputs

# of the notes on Tarnawski et al.: contiguous stages, two of which need each other, would take 16
ENTANGLED = with_outputs(
    [5, 6, 7, 9, 3, 5],
    [(0, 2), (0, 4), (1, 2), (1, 3), (1, 4), (2, 4), (3, 4), (3, 5)],
    [0, 3, 1, 0, 0, 0],
    [3, 1, 2, 2, 2, 2],
)


def check(graph, split, parts, limit_bytes=inf):
    """Check that a split is one, and that its load is that of its stages."""
    stage_of = {v: i for i, stage in enumerate(split.stages) for v in stage}
    assert sorted(stage_of) == list(range(graph.num_nodes))
    assert len(split.stages) <= parts
    assert all(sum(graph.num_bytes[v] for v in stage) <= limit_bytes for stage in split.stages)
    homes = [stage_of[v] for v in range(graph.num_nodes)]
    assert goes_forward(graph, homes)
    assert split.load_s == slowest(graph, homes)


@settings(deadline=None)
@given(graphs(), st.integers(1, 3), st.sampled_from([inf, 25, 15, 10]))
def test_as_good_as_the_best_of_all_splits(graph, parts, limit_bytes):
    expected = best(graph, parts, limit_bytes)
    if expected is None:
        with pytest.raises(PlanError, match="cannot be kept with"):
            split_ideals(graph, parts, limit_bytes=limit_bytes)
        return
    split = split_ideals(graph, parts, limit_bytes=limit_bytes)
    check(graph, split, parts, limit_bytes)
    assert split.load_s == expected


def test_every_graph_of_four_nodes():
    pairs = list(combinations(range(4), 2))
    for chosen in product((False, True), repeat=len(pairs)):
        edges = [pair for pair, is_there in zip(pairs, chosen, strict=True) if is_there]
        graph = with_outputs([3, 5, 4, 2], edges, [2, 1, 3, 0])
        for parts in (2, 3, 4):
            assert split_ideals(graph, parts).load_s == best(graph, parts)


@settings(deadline=None)
@given(graphs(), st.integers(1, 3))
def test_one_order_is_never_better(graph, parts):
    split = split_linear(graph, parts)
    check(graph, split, parts)
    assert split.load_s >= split_ideals(graph, parts).load_s


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_a_row_without_transfers_is_cut_as_balance_cuts_it(seconds, data):
    parts = data.draw(st.integers(1, len(seconds)))
    starts = [*balance(seconds, parts), len(seconds)]
    heaviest = max(sum(seconds[a:b]) for a, b in zip(starts, starts[1:], strict=False))
    assert split_linear(Graph.row(seconds), parts).load_s == heaviest


@settings(deadline=None)
@given(graphs(), st.integers(1, 3))
def test_more_stages_and_more_memory_do_no_harm(graph, parts):
    assert split_ideals(graph, parts + 1).load_s <= split_ideals(graph, parts).load_s
    limit = max(sum(graph.num_bytes), 1)
    assert (
        split_ideals(graph, parts, limit_bytes=limit).load_s == split_ideals(graph, parts).load_s
    )


def test_stages_that_need_each_other_are_none():
    split = split_ideals(ENTANGLED, 3, limit_bytes=8.4)
    check(ENTANGLED, split, 3, 8.4)
    assert split.load_s == best(ENTANGLED, 3, 8.4) == 17
    entangled = [0, 0, 1, 2, 2, 1]  # node 5 waits for 3, and 4 for 2
    assert slowest(ENTANGLED, entangled) == 16
    assert entangled in map(list, splits(ENTANGLED, 3, 8.4))
    assert not goes_forward(ENTANGLED, entangled)


def test_one_order_may_be_worse_than_the_best():
    # a node, two branches side by side (1 2 and 3 4), a node; one order takes branch after branch
    edges = [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)]
    graph = with_outputs([5, 5, 2, 3, 2, 5], edges, [0] * 6)
    assert split_linear(graph, 3).load_s == 10
    found = split_ideals(graph, 3)
    assert (found.load_s, found.stages) == (8, ((0, 3), (1, 4), (2, 5)))


def test_ideals_of_two_chains():
    two = Graph(seconds=(1,) * 6, num_bytes=(0,) * 6, edges=((0, 1), (1, 2), (3, 4), (4, 5)))
    found = ideals(two)
    assert len(found) == len(set(found)) == 4 * 4
    assert (found[0], found[-1]) == (0, 0b111111)
    with pytest.raises(PlanError, match=r"more than 15 ideals; allowed: 15; use split_linear"):
        split_ideals(two, 2, most=15)


def test_a_wide_graph_is_refused_before_it_is_explored():
    with pytest.raises(PlanError, match="a graph of 60 nodes has more than"):
        split_ideals(Graph(seconds=(1,) * 60, num_bytes=(0,) * 60, edges=()), 2)


@settings(deadline=None)
@given(graphs(most=5), st.lists(st.integers(0, 20), min_size=5, max_size=5))
def test_hosts_take_what_is_cheap_there(graph, host_s):
    graph = Graph(
        seconds=graph.seconds,
        num_bytes=graph.num_bytes,
        edges=graph.edges,
        tensors=graph.tensors,
        host_s=tuple(host_s[: graph.num_nodes]),
    )
    found = split_ideals(graph, 2, hosts=1)
    expected = min(
        slowest(graph, stage_of, hosts={host})
        for host in range(3)
        for stage_of in splits(graph, 3)
        if goes_forward(graph, stage_of)
    )
    assert found.load_s == expected
    assert len(found.stages) - len(found.on_host) <= 2
    assert len(found.on_host) <= 1


@pytest.mark.parametrize("split", [split_linear, split_ideals])
def test_numbers_of_stages_below_one_are_refused(split):
    with pytest.raises(PlanError, match="cannot be cut into 0 stages; allowed: 1 or more"):
        split(Graph.row([1, 2]), 0)


@pytest.mark.parametrize("split", [split_linear, split_ideals])
def test_a_limit_that_cannot_be_kept(split):
    graph = Graph.row([1, 2], num_bytes=[5, 7])
    assert len(split(graph, 2, limit_bytes=7).stages) == 2
    with pytest.raises(PlanError, match="limit_bytes=6 cannot be kept with 2 stages; allowed: 7"):
        split(graph, 2, limit_bytes=6)
