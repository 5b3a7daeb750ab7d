"""The clock of the simulation: a queue of moments, and lanes that serve what is ready.

A node becomes ready when the last node that it waits for has ended; a RECV when the first byte of
its message arrives, one latency after its SEND began. A lane that is free serves, of its ready
nodes, the one that its worker's program lists first. Nothing is preempted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import Action
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.graph import Graph, Lane, build
from lightning_cyclic.simulate.result import Event, Result, summarise

# Moments this close (relative) are one moment: sums of floats differ in their last digits, and
# which of two ready messages goes first must not depend on that.
_SAME_MOMENT = 1e-9


def simulate(
    programs: Sequence[Iterable[Action]], costs: Costs, network: Network | None = None
) -> Result:
    """Run the programs of all workers against a clock.

    Args:
        programs: actions of each worker, in program order.
        costs: what each stage costs.
        network: the links between the workers; free by default.

    Returns:
        When everything happened, the steady step time and the idle times.

    Raises:
        PlanError: if messages do not pair up, or the workers wait for each other for ever.

    Example:
        >>> from lightning_cyclic.plan.actions import Kind
        >>> F = Action(kind=Kind.F, t=0, i=0, j=0, v=0)
        >>> simulate([[F]], Costs.even(1, compute_s=3.0)).makespan_s
        1.0
    """
    clock = _Clock(build(programs), len(programs), costs, network or Network())
    clock.run()
    return summarise(clock.events(), len(programs))


@final
class _Clock:
    """Advance from moment to moment until nothing is left to run."""

    def __init__(self, graph: Graph, num_workers: int, costs: Costs, network: Network) -> None:
        self.graph = graph
        self.latency_s = network.latency_s
        self.lanes = [
            worker * len(Lane) + graph.lane(node) for node, worker in enumerate(graph.workers)
        ]
        self.seconds = seconds_of_nodes(graph, costs, network)
        num_lanes = num_workers * len(Lane)
        self.ready: list[list[int]] = [[] for _ in range(num_lanes)]  # heaps of nodes, per lane
        self.busy = [False] * num_lanes
        self.blockers = list(graph.blockers)
        self.ready_s = [0.0] * len(graph.actions)
        self.start_s = [-1.0] * len(graph.actions)
        # What happens when: (seconds, node) says that the node becomes ready, (seconds, ~lane)
        # that the lane becomes free.
        self.queue = [(0.0, node) for node, count in enumerate(self.blockers) if not count]
        heapq.heapify(self.queue)

    def run(self) -> None:
        """Serve all nodes."""
        while self.queue:
            now_s = self.queue[0][0]
            for lane in self._wake(now_s * (1 + _SAME_MOMENT)):
                self._serve(lane, now_s)
        if -1.0 in self.start_s:
            raise waits_for_ever(self.graph, self.start_s.index(-1.0))

    def events(self) -> tuple[Event, ...]:
        """Return when each node ran."""
        graph = self.graph
        return tuple(
            Event(worker, graph.lane(node), graph.actions[node], start_s, start_s + seconds)
            for node, (worker, start_s, seconds) in enumerate(
                zip(graph.workers, self.start_s, self.seconds, strict=True)
            )
        )

    def _wake(self, until_s: float) -> dict[int, None]:
        """Take what happens up to ``until_s``; return the lanes concerned, in order."""
        lanes: dict[int, None] = {}
        while self.queue and self.queue[0][0] <= until_s:
            _, node = heapq.heappop(self.queue)
            lane = self.lanes[node] if node >= 0 else ~node
            if node >= 0:
                heapq.heappush(self.ready[lane], node)
            else:
                self.busy[lane] = False
            lanes[lane] = None
        return lanes

    def _serve(self, lane: int, now_s: float) -> None:
        """Start what a free lane can start: one node, and before it any that take no time."""
        while self.ready[lane] and not self.busy[lane]:
            node = heapq.heappop(self.ready[lane])
            end_s = now_s + self.seconds[node]
            self.start_s[node] = now_s
            if self.seconds[node] > 0:
                self.busy[lane] = True
                heapq.heappush(self.queue, (end_s, ~lane))
            for follower in self.graph.after[node]:
                self._unblock(follower, end_s)
            if self.graph.feeds[node] >= 0:
                self._unblock(self.graph.feeds[node], now_s + self.latency_s)

    def _unblock(self, node: int, at_s: float) -> None:
        """Note that one of the node's waits ends at ``at_s``; queue it if that was the last."""
        self.ready_s[node] = max(self.ready_s[node], at_s)
        self.blockers[node] -= 1
        if not self.blockers[node]:
            heapq.heappush(self.queue, (self.ready_s[node], node))


def seconds_of_nodes(graph: Graph, costs: Costs, network: Network) -> list[float]:
    """Return for how long each node keeps its lane busy."""
    return [
        costs.compute_s(action)
        if action.payload is None
        else network.transfer_s(costs.message_bytes(action))
        for action in graph.actions
    ]


def waits_for_ever(graph: Graph, node: int) -> PlanError:
    """Return the error for a node that is never served."""
    return PlanError(
        f"worker {graph.workers[node]} waits for ever before {graph.actions[node]}; allowed: "
        "programs without cyclic waits; validate the programs first"
    )
