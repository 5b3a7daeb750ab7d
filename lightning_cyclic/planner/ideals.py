"""Cut a graph into stages, exactly, whatever the order of its branches.

An ideal is a set of nodes with all that comes before them: what may have run when a stage ends. A
row of stages is a row of ideals, each with more nodes than the last, from the empty set to all:

    a -> b      {}   {a}   {a c}   {a b c}   {a b c d}      all ideals but {c} and {a b}
    c -> d      stages:   a   c       b          d

Sorted by size, ideals are a row like that of the places at which one order of the nodes can be
cut, so :func:`cut_row` cuts them; only that a part may begin at smaller ideals alone. A chain of n
nodes has n + 1 ideals, two parallel chains have (n/2 + 1)^2, and so on: exact for graphs that are
narrow, out of reach for wide ones.

The graph has what the pieces of a model take, and what it costs to cut between them:

        embed ──> left ──┐
          │              ├──> join        a tensor has one maker, and users behind it
          └───> right ───┘

Stages run one after the other, so what has run when one ends is an *ideal*: a set of nodes with
all that they need, here a bit mask. A worker hands on to its neighbour alone. Hence what crosses
between two stages is each tensor that is made before and used behind, by whichever stage: one
for a stage further on passes through all between, which receive and send it like their own. In
the published model (Tarnawski et al., NeurIPS 2020) tensors lie in a memory that all workers
reach: a stage pays once for each tensor that it makes or uses, nothing for those that pass by,
and computes nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner.partition import cut_row
from lightning_cyclic.simulate.costs import Network

MOST_IDEALS = 2_000  # some seconds in pure Python


class GraphTensor(NamedTuple):
    """Hold what one node hands to later ones.

    Args:
        num_bytes: that are sent where a cut goes through it.
    """

    num_bytes: int
    maker: int
    users: tuple[int, ...]


@final
@dataclass(frozen=True, kw_only=True)  # no slots: what is derived is cached in __dict__
class CostGraph:
    """Hold a directed acyclic graph of costs, its nodes numbered in an order in which they run.

    Args:
        tensors: what is sent where a cut goes through it.
        keeps: further pairs of nodes that must not change places, the earlier one first. [none]
        network: the links between workers. [messages take no time]

    Raises:
        PlanError: no node, a cost below zero, or a pair that runs backwards.

    Source: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
        NeurIPS 2020, https://arxiv.org/abs/2006.16423; what a cut costs is ours.

    Example:
        >>> skip = GraphTensor(num_bytes=4, maker=0, users=(2,))
        >>> graph = CostGraph(seconds=(3, 1, 2), tensors=(skip,), keeps=((0, 1), (1, 2)))
        >>> [graph.crossing_bytes(ideal) for ideal in (0b001, 0b011, 0b111)]
        [4, 4, 0]
    """

    seconds: tuple[float, ...]
    tensors: tuple[GraphTensor, ...] = ()
    keeps: tuple[tuple[int, int], ...] = ()
    network: Network = Network()

    def __post_init__(self) -> None:
        costs = [*self.seconds, *(x.num_bytes for x in self.tensors)]
        if not self.seconds or min(costs) < 0:
            raise PlanError(
                f"a graph of {len(self.seconds)} nodes with costs {costs}; allowed: one node or "
                "more, and numbers >= 0; give times and bytes"
            )
        for u, v in self._pairs():
            if not 0 <= u < v < self.num_nodes:
                raise PlanError(
                    f"node {v} cannot wait for node {u}; allowed: numbers from 0 to "
                    f"{self.num_nodes - 1}, of which the earlier comes first; number the nodes in "
                    "an order in which they can run"
                )

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Yield each node that another waits for, and that other."""
        yield from self.keeps
        yield from ((x.maker, v) for x in self.tensors for v in x.users)

    @property
    def num_nodes(self) -> int:
        return len(self.seconds)

    @property
    def is_chain(self) -> bool:
        """Say whether the nodes can run in one order only."""
        return all(before >> v & 1 for v, before in enumerate(self.before[1:]))

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Return for each node those that it waits for, as a bit mask."""
        masks = [0] * self.num_nodes
        for u, v in self._pairs():
            masks[v] |= 1 << u
        return tuple(masks)

    @cached_property
    def _masks(self) -> tuple[tuple[int, int, int], ...]:
        """Return the bytes, the maker and the users of each tensor."""
        return tuple(
            (x.num_bytes, 1 << x.maker, sum(1 << v for v in set(x.users))) for x in self.tensors
        )

    def compute_s(self, nodes: int) -> float:
        """Return the seconds of some nodes, given as a bit mask."""
        return sum(self.seconds[v] for v in nodes_in(nodes))

    def crossing_bytes(self, ideal: int) -> int:
        """Return the bytes of what is made within an ideal and used behind it."""
        return sum(size for size, maker, users in self._masks if maker & ideal and users & ~ideal)

    def crossing_s(self, ideal: int) -> float:
        """Return for how long what crosses behind an ideal keeps a port busy."""
        return self.network.transfer_s(self.crossing_bytes(ideal))

    def slowest_s(self, ends: Sequence[int]) -> float:
        """Return the seconds of the slowest stage: of its compute, or of its messages.

        Args:
            ends: the ideal behind which each stage ends; the last is all nodes.
        """
        return max(
            max(self.compute_s(b & ~a), self.crossing_s(a) + self.crossing_s(b))
            for a, b in pairwise([0, *ends])
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSplit:
    """Hold the stages of a graph."""

    stages: tuple[tuple[int, ...], ...]
    slowest_s: float

    @classmethod
    def of(cls, graph: CostGraph, ends: Sequence[int]) -> GraphSplit:
        """Make the stages that end behind some ideals."""
        return cls(
            stages=tuple(tuple(nodes_in(b & ~a)) for a, b in pairwise([0, *ends])),
            slowest_s=graph.slowest_s(ends),
        )


def nodes_in(nodes: int) -> Iterator[int]:
    """Yield the nodes of a bit mask in order.

    Example:
        >>> list(nodes_in(0b1101))
        [0, 2, 3]
    """
    while nodes:
        low = nodes & -nodes
        yield low.bit_length() - 1
        nodes ^= low


def check_parts(graph: CostGraph, parts: int) -> None:
    """Refuse numbers of stages of which one would be empty."""
    if not 1 <= parts <= graph.num_nodes:
        raise PlanError(
            f"a graph of {graph.num_nodes} nodes cannot be cut into {parts} stages; allowed: 1 to "
            f"{graph.num_nodes}, none of them empty; use fewer stages or smaller nodes"
        )


def split_ideals(graph: CostGraph, parts: int, *, most: int = MOST_IDEALS) -> GraphSplit:
    """Cut a graph into stages, none empty, in whatever order is best.

    Returns:
        Of all stages, those whose slowest is fastest.

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

    begins = cut_row(len(found) - 1, parts, pieces)
    assert begins is not None  # there are as many nodes as stages, or more
    return GraphSplit.of(graph, [found[k] for k in [*begins[1:], -1]])


def ideals(graph: CostGraph, most: int = MOST_IDEALS) -> list[int]:
    """List the ideals of a graph, smaller ones first.

    Args:
        graph: of which only the order of the nodes counts.

    Returns:
        Each as a bit mask of nodes.

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
                f"{most}; use larger nodes, or raise most="
            )
    return found


def _larger(graph: CostGraph, ideal: int) -> Iterator[int]:
    for v, before in enumerate(graph.before):
        if not ideal >> v & 1 and not before & ~ideal:
            yield ideal | 1 << v


def smaller_ideals(found: Sequence[int], weights: Sequence[float]) -> list[list[int]]:
    """Return for each ideal the places of those that are part of it, heavy and large ones first.

    Args:
        weights: of each; one that is part of another must not be heavier.
    """
    heavy_first = sorted(range(len(found)), key=weights.__getitem__)[::-1]
    return [
        [a for a in heavy_first if not found[a] & ~ideal and found[a] != ideal] for ideal in found
    ]
