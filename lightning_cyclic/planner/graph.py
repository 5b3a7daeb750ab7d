"""A graph of costs: what the layers of a model take, and what it costs to cut between them.

        embed ──> left ──┐
          │              ├──> join        a tensor has one maker and some users; each stage that
          └───> right ───┘                makes or uses it, and not alone, pays its transfer once

A pipeline may enter a stage once per micro-batch only, so of two nodes with an edge the first
must not be in the later stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from lightning_cyclic.errors import PlanError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Hold what it costs to send one tensor.

    Args:
        transfer_s: seconds for which each stage that shares it with another is busy with it.
        nodes: its maker, then its users, by number.
    """

    transfer_s: float
    nodes: tuple[int, ...]


@final
@dataclass(frozen=True, kw_only=True)  # no slots: what is derived is cached in __dict__
class Graph:
    """Hold a directed acyclic graph of costs.

    Args:
        seconds: of each node, forward and backward together.
        num_bytes: that each node keeps on its worker.
        edges: pairs of nodes; the first must be in no later stage than the second.
        tensors: what is sent where a cut goes through it.
        host_s: seconds of each node on a host, which sends nothing and has memory enough; for
            splits that may leave cheap nodes there. [no node can run on a host]

    Raises:
        PlanError: lengths differ, a cost is negative, a node does not exist, or edges go round.

    Source: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
        NeurIPS 2020, computational model, https://arxiv.org/abs/2006.16423.

    Example:
        >>> graph = Graph.row([3, 1, 2], transfer_s=[1, 1])
        >>> graph.load([1]), graph.load([0, 1])
        (3, 5)
    """

    seconds: tuple[float, ...]
    num_bytes: tuple[float, ...]
    edges: tuple[tuple[int, int], ...]
    tensors: tuple[Tensor, ...] = ()
    host_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.seconds)
        if not count or len(self.num_bytes) != count or len(self.host_s) not in (0, count):
            raise PlanError(
                f"a graph with {count} times and {len(self.num_bytes)} sizes; allowed: one of "
                "each per node, and one node or more; give both for every node"
            )
        transfers = [x.transfer_s for x in self.tensors]
        costs = [*self.seconds, *self.num_bytes, *self.host_s, *transfers]
        if min(costs) < 0:
            raise PlanError(
                f"cost {min(costs)!r} in a graph is negative; allowed: numbers >= 0; give times "
                "and sizes"
            )
        nodes = {v for edge in self.edges for v in edge} | {
            v for x in self.tensors for v in x.nodes
        }
        if not nodes <= set(range(count)):
            raise PlanError(
                f"node {min(nodes - set(range(count)))} is named by an edge or a tensor; allowed: "
                f"0 to {count - 1}; number the nodes from 0 on"
            )
        _ = self.order  # refuses edges that go round

    @classmethod
    def row(
        cls,
        seconds: Sequence[float],
        *,
        transfer_s: Sequence[float] | None = None,
        num_bytes: Sequence[float] | None = None,
    ) -> Graph:
        """Make a graph of nodes that follow one another.

        Args:
            seconds: of each node.
            transfer_s: of the tensor behind each node but the last. [none: nothing is sent]
            num_bytes: of each node. [none: 0]
        """
        count = len(seconds)
        edges = tuple((v, v + 1) for v in range(count - 1))
        costs = [0.0] * (count - 1) if transfer_s is None else transfer_s
        return cls(
            seconds=tuple(seconds),
            num_bytes=tuple(num_bytes or [0] * count),
            edges=edges,
            tensors=tuple(
                Tensor(transfer_s=cost, nodes=edge)
                for cost, edge in zip(costs, edges, strict=True)
            ),
        )

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return len(self.seconds)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Return for each node those with an edge to it, as a bit mask."""
        masks = [0] * self.num_nodes
        for u, v in self.edges:
            masks[v] |= 1 << u
        return tuple(masks)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Return for each node those to which it has an edge, as a bit mask."""
        masks = [0] * self.num_nodes
        for u, v in self.edges:
            masks[u] |= 1 << v
        return tuple(masks)

    @cached_property
    def tensors_of(self) -> tuple[tuple[int, ...], ...]:
        """Return for each node the numbers of the tensors that it makes or uses."""
        found: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for number, tensor in enumerate(self.tensors):
            for v in set(tensor.nodes):
                found[v].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Return the nodes in an order in which all edges go forward, branch after branch.

        Depth first, so that the nodes of a branch stay together and few tensors cross a cut.
        """
        users: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for u, v in self.edges:
            users[u].append(v)
        done: dict[int, bool] = {}  # False while a node's users are being visited
        reverse: list[int] = []
        for root in range(self.num_nodes):
            stack = [(root, False)]
            while stack:
                v, is_left = stack.pop()
                if is_left:
                    done[v] = True
                    reverse.append(v)
                elif v not in done:
                    done[v] = False
                    stack.append((v, True))
                    stack.extend((u, False) for u in users[v])
                    if any(done.get(u) is False for u in users[v]):
                        raise PlanError(
                            f"the edges of node {v} go round in a circle; allowed: edges along "
                            "which data can flow; leave out the backward's edges"
                        )
        return tuple(reversed(reverse))

    def load(self, nodes: Iterable[int]) -> float:
        """Return the seconds that a stage of some nodes takes: its own, and its transfers'."""
        inside = set(nodes)
        compute_s = sum(self.seconds[v] for v in inside)
        return compute_s + sum(
            tensor.transfer_s
            for tensor in self.tensors
            if 0 < len(inside.intersection(tensor.nodes)) < len(set(tensor.nodes))
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Hold the stages of a graph.

    Args:
        stages: nodes of each stage, stage by stage; none is empty.
        load_s: seconds of the slowest stage, its transfers included.
        on_host: numbers of the stages that run on a host.
    """

    stages: tuple[tuple[int, ...], ...]
    load_s: float
    on_host: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, graph: Graph, stages: Iterable[Iterable[int]], on_host: Iterable[bool] = ()
    ) -> Split:
        """Leave out empty stages and compute the load."""
        rows = [tuple(sorted(stage)) for stage in stages]
        marks = [*on_host] or [False] * len(rows)
        filled = [(row, mark) for row, mark in zip(rows, marks, strict=True) if row]
        loads = (
            sum(graph.host_s[v] for v in stage) if is_host else graph.load(stage)
            for stage, is_host in filled
        )
        return cls(
            stages=tuple(stage for stage, _ in filled),
            load_s=max(loads),
            on_host=tuple(i for i, (_, is_host) in enumerate(filled) if is_host),
        )


def check_parts(graph: Graph, parts: int) -> None:
    """Refuse numbers of stages below one."""
    if parts < 1:
        raise PlanError(
            f"a graph of {graph.num_nodes} nodes cannot be cut into {parts} stages; allowed: 1 or "
            "more, of which some may stay empty; use one worker or more"
        )


def does_not_fit(graph: Graph, parts: int, limit_bytes: float) -> PlanError:
    """Say that no split keeps a limit, and from where on one may."""
    least = max(*graph.num_bytes, sum(graph.num_bytes) / parts)
    return PlanError(
        f"limit_bytes={limit_bytes:g} cannot be kept with {parts} stages; allowed: {least:g} (the "
        "largest node, or an equal share of all) where edges allow it, as a rule more; raise it "
        "or use more stages"
    )
