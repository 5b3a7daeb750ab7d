"""Cut a graph into stages, exactly, by dynamic programming over its ideals.

An ideal is a set of nodes with all that comes before them: what may have been computed when a
stage ends. A stage is what one ideal has more than a smaller one, so a row of stages is a chain of
ideals, from the empty set to all nodes:

    a -> b      {}   {a}   {a c}   {a b c}   {a b c d}      all ideals but {c} and {a b}
    c -> d      stages:   a   c       b          d

A chain of n nodes has n + 1 ideals, two parallel chains have (n/2 + 1)^2, and so on: exact for
graphs that are narrow, out of reach for wide ones. Those are made a chain first, by one order of
their nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner.graph import Graph, Split, check_parts, does_not_fit

MOST_IDEALS = 2_000  # some ten seconds in pure Python


def split_linear(graph: Graph, parts: int, *, limit_bytes: float = inf, hosts: int = 0) -> Split:
    """Cut a graph, in the order ``graph.order``, into at most ``parts`` stages.

    Exact for chains. On published graphs of layers it is at most 0.4 % from the best of all
    orders, in milliseconds.

    Args:
        graph: the graph.
        parts: most stages.
        limit_bytes: most bytes of a stage's nodes. [any number]
        hosts: most further stages, on hosts. [0]

    Returns:
        The stages whose slowest is as fast as can be in that order.

    Raises:
        PlanError: no split in that order keeps the limit.

    Source: Tarnawski et al., NeurIPS 2020, linearisation, https://arxiv.org/abs/2006.16423.

    Example:
        >>> split_linear(Graph.row([3, 1, 2], transfer_s=[0, 9]), 2).load_s
        3
    """
    check_parts(graph, parts)
    chain = replace(graph, edges=tuple(pairwise(graph.order)))
    found = _Search(chain, parts, hosts, limit_bytes).best(ideals(chain, graph.num_nodes + 1))
    if found is None:
        raise does_not_fit(graph, parts, limit_bytes)
    return found


def split_ideals(
    graph: Graph,
    parts: int,
    *,
    limit_bytes: float = inf,
    hosts: int = 0,
    most: int = MOST_IDEALS,
) -> Split:
    """Cut a graph into at most ``parts`` stages, in whatever order is best.

    Args:
        graph: the graph.
        parts: most stages.
        limit_bytes: most bytes of a stage's nodes. [any number]
        hosts: most further stages, on hosts. [0]
        most: most ideals to look at.

    Returns:
        The stages: of all splits that go in the direction of the edges, one whose slowest stage
        is fastest.

    Raises:
        PlanError: too many ideals, or no split keeps the limit.

    Source: Tarnawski et al., NeurIPS 2020, the dynamic programme of the throughput problem,
        https://arxiv.org/abs/2006.16423.

    Example:
        >>> split_ideals(Graph.row([3, 1, 2]), 2).stages
        ((0,), (1, 2))
    """
    check_parts(graph, parts)
    all_ideals = ideals(graph, most)
    try:  # what one order allows is a bound: a stage that takes as long needs no look
        known = split_linear(graph, parts, limit_bytes=limit_bytes, hosts=hosts)
    except PlanError:
        known = None
    bound_s = inf if known is None else known.load_s
    found = _Search(graph, parts, hosts, limit_bytes, bound_s).best(all_ideals) or known
    if found is None:
        raise does_not_fit(graph, parts, limit_bytes)
    return found


def ideals(graph: Graph, most: int = MOST_IDEALS) -> list[int]:
    """List the ideals of a graph, smaller ones first.

    Args:
        graph: whose edges count.
        most: how many there may be.

    Returns:
        Each as a bit mask of nodes.

    Raises:
        PlanError: there are more.

    Example:
        >>> ideals(Graph.row([1, 1]))
        [0, 1, 3]
    """
    found, level = [0], [0]
    while level:
        level = list(dict.fromkeys(larger for ideal in level for larger in _larger(graph, ideal)))
        found += level
        if len(found) > most:
            raise PlanError(
                f"a graph of {graph.num_nodes} nodes has more than {most} ideals; allowed: "
                f"{most}; use split_linear(graph, ...), which looks at one order of the nodes, "
                "or raise most="
            )
    return found


def _larger(graph: Graph, ideal: int) -> Iterator[int]:
    for v, before in enumerate(graph.before):
        if not ideal >> v & 1 and not before & ~ideal:
            yield ideal | 1 << v


class _Stage(NamedTuple):
    """Hold a stage from one ideal to another.

    Args:
        smaller: the ideal behind which it begins.
        ends: nodes of that ideal behind which nothing of it comes.
        compute_s: of its nodes.
        transfer_s: of what it shares with other stages.
        host_s: of its nodes on a host.
        kept: bytes of its nodes.
    """

    smaller: int
    ends: int
    compute_s: float = 0
    transfer_s: float = 0
    host_s: float = 0
    kept: float = 0


@final
class _Search:
    """Find the best chain of ideals that beats a bound."""

    def __init__(
        self, graph: Graph, parts: int, hosts: int, limit_bytes: float, bound_s: float = inf
    ) -> None:
        self.graph = graph
        self.step = (
            hosts if graph.host_s else 0
        ) + 1  # state: step * stages on workers + stages on hosts
        self.states = (parts + 1) * self.step
        self.limit_bytes = limit_bytes
        self.bound_s = bound_s
        self.masks = [sum(1 << v for v in set(tensor.nodes)) for tensor in graph.tensors]
        self.host_s = graph.host_s or (inf,) * graph.num_nodes

    def best(self, all_ideals: list[int]) -> Split | None:
        """Return the best split; None if none beats the bound."""
        costs = {0: [0.0] + [inf] * (self.states - 1)}
        origins = {}
        for ideal in all_ideals[1:]:
            costs[ideal], origins[ideal] = self._cheapest(ideal, costs)
        whole = all_ideals[-1]
        state = min(range(self.states), key=costs[whole].__getitem__)
        if costs[whole][state] == inf:
            return None
        stages = []
        while whole:
            smaller, before = origins[whole][state]
            stages.append((_nodes(whole & ~smaller), state - before < self.step))
            whole, state = smaller, before
        return Split.of(self.graph, *zip(*reversed(stages), strict=True))

    def _cheapest(
        self, ideal: int, costs: dict[int, list[float]]
    ) -> tuple[list[float], list[tuple[int, int]]]:
        """Return for each state the load of the slowest stage so far, and where it comes from."""
        now, origin = [inf] * self.states, [(-1, -1)] * self.states
        for stage in self._stages_ending_at(ideal):
            load_s = stage.compute_s + stage.transfer_s
            if stage.kept > self.limit_bytes:
                load_s = inf
            for before, cost in enumerate(costs[stage.smaller]):
                if cost == inf:
                    continue
                for state, more_s in self._following(before, load_s, stage.host_s):
                    value = max(cost, more_s)
                    if value < now[state] and value < self.bound_s:
                        now[state], origin[state] = value, (stage.smaller, before)
        return now, origin

    def _following(self, state: int, load_s: float, host_s: float) -> Iterator[tuple[int, float]]:
        """Yield the states after one more stage, and its load."""
        if state + self.step < self.states:
            yield state + self.step, load_s
        if (state + 1) % self.step:
            yield state + 1, host_s

    def _stages_ending_at(self, ideal: int) -> Iterator[_Stage]:
        """Yield the stages that end at an ideal.

        Nodes are taken from its end one by one, each only while none that is left comes behind
        it. More nodes take more time and bytes, so a stage beyond the bounds is not taken further.
        """
        seen = {ideal}
        stack = [_Stage(ideal, self._ends_of(ideal, ideal))]
        while stack:
            stage = stack.pop()
            for v in _nodes(stage.ends):
                if stage.smaller & ~(1 << v) in seen:
                    continue
                longer = self._longer(stage, ideal, v)
                seen.add(longer.smaller)
                if self._is_hopeless(longer):
                    continue
                stack.append(longer)
                yield longer

    def _longer(self, stage: _Stage, ideal: int, v: int) -> _Stage:
        """Let a stage begin with one node more."""
        graph, bit = self.graph, 1 << v
        inside = ideal & ~stage.smaller
        transfer_s = stage.transfer_s
        for x in graph.tensors_of[v]:
            mask = self.masks[x]
            if not inside & mask:
                transfer_s += graph.tensors[x].transfer_s * (mask != bit)
            elif not mask & ~inside & ~bit:
                transfer_s -= graph.tensors[x].transfer_s
        smaller = stage.smaller & ~bit
        return _Stage(
            smaller,
            stage.ends & ~bit | self._ends_of(smaller, graph.before[v]),
            stage.compute_s + graph.seconds[v],
            transfer_s,
            stage.host_s + self.host_s[v],
            stage.kept + graph.num_bytes[v],
        )

    def _is_hopeless(self, stage: _Stage) -> bool:
        """Say whether no longer stage can be good, neither on a worker nor on a host."""
        is_slow = stage.compute_s >= self.bound_s or stage.kept > self.limit_bytes
        return is_slow and (self.step == 1 or stage.host_s >= self.bound_s)

    def _ends_of(self, ideal: int, among: int) -> int:
        """Return those of some nodes of an ideal behind which nothing of it comes."""
        return sum(1 << v for v in _nodes(among) if not self.graph.after[v] & ideal)


def _nodes(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
