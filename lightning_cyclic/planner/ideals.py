"""Cut a graph into stages, exactly, whatever the order of its branches.

An ideal is a set of nodes with all that comes before them: what may have run when a stage ends. A
row of stages is a row of ideals, each with more nodes than the last, from the empty set to all:

    a -> b      {}   {a}   {a c}   {a b c}   {a b c d}      all ideals but {c} and {a b}
    c -> d      stages:   a   c       b          d

Sorted by size, ideals are a row like that of the places at which one order of the nodes can be
cut, so ``row.py`` cuts them; only that a part may begin at smaller ideals alone. A chain of n
nodes has n + 1 ideals, two parallel chains have (n/2 + 1)^2, and so on: exact for graphs that are
narrow, out of reach for wide ones, which are left to ``milp.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner.graph import CostGraph, GraphSplit, check_parts
from lightning_cyclic.planner.row import cut_row

MOST_IDEALS = 2_000  # some seconds in pure Python
StageFits: TypeAlias = Callable[[int, int, int], bool]
"""Whether stage number j may go from one ideal to a larger one."""


def split_ideals(
    graph: CostGraph, parts: int, *, fits: StageFits | None = None, most: int = MOST_IDEALS
) -> GraphSplit | None:
    """Cut a graph into stages, none empty, in whatever order is best.

    Args:
        graph: the graph.
        parts: number of stages.
        fits: which stages are allowed. [all]
        most: most ideals to look at.

    Returns:
        Of all stages, those whose slowest is fastest; None if none are allowed.

    Raises:
        PlanError: too many ideals, or more stages than nodes.

    Source: Tarnawski et al., NeurIPS 2020, the dynamic programme of the throughput problem,
        https://arxiv.org/abs/2006.16423.

    Example:
        >>> two = CostGraph(seconds=(2, 3, 1), keeps=((0, 1), (0, 2)))
        >>> split_ideals(two, 2).stages  # node 2 need not wait for node 1
        ((0, 2), (1,))
    """
    check_parts(graph, parts)
    found = ideals(graph, most)
    compute_s = [graph.compute_s(ideal) for ideal in found]
    crossing_s = [graph.crossing_s(ideal) for ideal in found]
    inside = smaller_ideals(found, compute_s)

    def pieces(p: int, b: int) -> Iterator[tuple[int, float, float]]:
        for a in inside[b]:
            work_s = compute_s[b] - compute_s[a]
            yield a, work_s, max(work_s, crossing_s[a] + crossing_s[b])

    def allowed(p: int, a: int, b: int) -> bool:
        return fits is None or fits(p, found[a], found[b])

    begins = cut_row(len(found) - 1, parts, pieces, fits=allowed)
    if begins is None:
        return None
    return GraphSplit.of(graph, [found[k] for k in [*begins[1:], -1]])


def ideals(graph: CostGraph, most: int = MOST_IDEALS) -> list[int]:
    """List the ideals of a graph, smaller ones first.

    Args:
        graph: of which only the order of the nodes counts.
        most: how many there may be.

    Returns:
        Each as a bit mask of nodes.

    Raises:
        PlanError: there are more.

    Example:
        >>> ideals(CostGraph(seconds=(1, 1), keeps=((0, 1),)))
        [0, 1, 3]
    """
    found, level = [0], [0]
    while level:
        level = list(dict.fromkeys(larger for ideal in level for larger in _larger(graph, ideal)))
        found += level
        if len(found) > most:
            raise PlanError(
                f"a graph of {graph.num_nodes} nodes has more than {most} ideals; allowed: "
                f"{most}; use split_milp(graph, ...), or raise most="
            )
    return found


def _larger(graph: CostGraph, ideal: int) -> Iterator[int]:
    for v, before in enumerate(graph.before):
        if not ideal >> v & 1 and not before & ~ideal:
            yield ideal | 1 << v


def smaller_ideals(found: Sequence[int], weights: Sequence[float]) -> list[list[int]]:
    """Return for each ideal the places of those that are part of it, heavy and large ones first.

    Args:
        found: ideals.
        weights: of each; one that is part of another must not be heavier.
    """
    heavy_first = sorted(range(len(found)), key=weights.__getitem__)[::-1]
    return [
        [a for a in heavy_first if not found[a] & ~ideal and found[a] != ideal] for ideal in found
    ]
