"""Splits of small graphs by trying all of them, and graphs to try."""

from __future__ import annotations

from itertools import product
from math import inf

from hypothesis import strategies as st

from lightning_cyclic.planner import Graph, Tensor


def splits(graph, parts, limit_bytes=inf):
    """Yield the stage of each node for every split that fits, in whatever order of the stages."""
    for stage_of in product(range(parts), repeat=graph.num_nodes):
        kept = [0] * parts
        for v, stage in enumerate(stage_of):
            kept[stage] += graph.num_bytes[v]
        if max(kept) <= limit_bytes:
            yield stage_of


def goes_forward(graph, stage_of):
    return all(stage_of[u] <= stage_of[v] for u, v in graph.edges)


def slowest(graph, stage_of, hosts=()):
    """Return the load of the slowest stage, written from the definition."""
    loads = []
    for stage in set(stage_of):
        inside = {v for v, home in enumerate(stage_of) if home == stage}
        if stage in hosts:
            loads.append(sum(graph.host_s[v] for v in inside))
            continue
        load = sum(graph.seconds[v] for v in inside)
        for tensor in graph.tensors:
            here = inside & set(tensor.nodes)
            if here and here != set(tensor.nodes):
                load += tensor.transfer_s
        loads.append(load)
    return max(loads)


def best(graph, parts, limit_bytes=inf):
    """Return the load of the best split that goes forward; None if none fits."""
    found = (
        slowest(graph, stage_of)
        for stage_of in splits(graph, parts, limit_bytes)
        if goes_forward(graph, stage_of)
    )
    return min(found, default=None)


def with_outputs(seconds, edges, outputs, num_bytes=None):
    """Make a graph in which each node has one output, which all its followers use."""
    users = {u: [v for x, v in edges if x == u] for u, _ in edges}
    return Graph(
        seconds=tuple(seconds),
        num_bytes=tuple(num_bytes or [0] * len(seconds)),
        edges=tuple(edges),
        tensors=tuple(
            Tensor(transfer_s=outputs[u], nodes=(u, *after)) for u, after in users.items()
        ),
    )


@st.composite
def graphs(draw, most=7):
    """Draw a graph whose nodes are numbered in any order, with whole numbers as costs."""
    count = draw(st.integers(1, most))
    place = draw(st.permutations(range(count)))
    pairs = [(u, v) for u in range(count) for v in range(count) if place[u] < place[v]]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12)) if pairs else []
    costs = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    return with_outputs(draw(costs), sorted(edges), draw(costs), draw(costs))
