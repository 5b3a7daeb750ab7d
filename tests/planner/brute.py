"""Splits of small graphs by trying all of them, and graphs to try."""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

from lightning_cyclic.planner import CostGraph, GraphTensor
from lightning_cyclic.simulate import Network

LINKS = Network(bandwidth_bytes_per_s=1)  # a byte takes a second


def splits(graph, parts):
    """Yield the stage of each node for every split into filled stages, whatever their order."""
    for stage_of in product(range(parts), repeat=graph.num_nodes):
        if len(set(stage_of)) == parts:
            yield stage_of


def goes_forward(graph, stage_of):
    made_and_used = [(x.maker, v) for x in graph.tensors for v in x.users]
    return all(stage_of[u] <= stage_of[v] for u, v in [*graph.keeps, *made_and_used])


def slowest(graph, stage_of):
    """Return the seconds of the slowest stage, by following each tensor from stage to stage."""
    parts = max(stage_of) + 1
    compute_s, messages_s = [0] * parts, [0] * parts
    for v, j in enumerate(stage_of):
        compute_s[j] += graph.seconds[v]
    for tensor in graph.tensors:
        for j in range(stage_of[tensor.maker], max(stage_of[v] for v in tensor.users)):
            for worker in (j, j + 1):  # one sends, the other one receives
                messages_s[worker] += tensor.num_bytes / graph.network.bandwidth_bytes_per_s
    return max(*compute_s, *messages_s)


def best(graph, parts):
    """Return the seconds of the best split that goes forward; None if none is allowed."""
    found = (
        slowest(graph, stage_of)
        for stage_of in splits(graph, parts)
        if goes_forward(graph, stage_of)
    )
    return min(found, default=None)


def with_outputs(seconds, edges, outputs):
    """Make a graph in which each node has one output, which all its followers use."""
    users = {u: tuple(v for x, v in edges if x == u) for u, _ in edges}
    return CostGraph(
        seconds=tuple(seconds),
        tensors=tuple(
            GraphTensor(num_bytes=outputs[u], maker=u, users=after) for u, after in users.items()
        ),
        network=LINKS,
    )


@st.composite
def graphs(draw, most=7):
    """Draw a graph with whole numbers as costs."""
    count = draw(st.integers(1, most))
    pairs = [(u, v) for v in range(count) for u in range(v)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12)) if pairs else []
    costs = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    return with_outputs(draw(costs), sorted(edges), draw(costs))


@st.composite
def graphs_and_parts(draw, most=7):
    """Draw a graph and a number of stages that it can be cut into."""
    graph = draw(graphs(most))
    return graph, draw(st.integers(1, min(3, graph.num_nodes)))
