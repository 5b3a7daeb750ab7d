"""The clock of the simulation: a queue of moments, and lanes that serve what is ready.

A node becomes ready when the last node that it waits for has ended; a RECV when the first byte of
its message arrives, one latency after its SEND began. A lane that is free serves, of its ready
nodes, the one that the timetable has first. Nothing is preempted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import Action
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.graph import Graph, Lane, build
from lightning_cyclic.simulate.result import Event, Result, summarise

# Moments this close (relative) are one moment: sums of floats differ in their last digits, and
# which of two ready messages goes first must not depend on that.
_SAME_MOMENT = 1e-9


def simulate(
    programs: Sequence[Iterable[Action]],
    costs: Costs,
    network: Network | None = None,
    plan: Plan | None = None,
) -> Result:
    """Run the programs of all workers against a clock.

    Args:
        programs: actions of each worker, in program order.
        costs: what each stage costs.
        network: the links between the workers; free by default.
        plan: of the programs, where stages share parameters. [they share none]

    Returns:
        When everything happened, the steady step time and the idle times.

    Raises:
        PlanError: if messages do not pair up, the workers wait for each other for ever, or the
            network has hosts of other workers.

    Example:
        >>> from lightning_cyclic.plan.actions import Kind
        >>> F = Action(kind=Kind.F, t=0, i=0, j=0, v=0)
        >>> simulate([[F]], Costs.even(1, compute_s=3.0)).makespan_s
        1.0
    """
    network = network or Network()
    network.check(len(programs))
    graph = build(programs, plan, network)
    seconds = [
        costs.compute_s(action)
        if action.payload is None
        else network.between(worker, action.peer).transfer_s(costs.message_bytes(action))
        for worker, action in zip(graph.workers, graph.actions, strict=True)
    ]
    clock = _Clock(graph, len(programs), seconds, network)
    clock.run()
    return summarise(clock.events(), len(programs))


@final
class _Clock:
    """Advance from moment to moment until nothing is left to run."""

    def __init__(
        self, graph: Graph, num_workers: int, seconds: list[float], network: Network
    ) -> None:
        self.graph = graph
        self.network = network
        self.lanes = [
            (2 * worker + network.is_inside(worker, graph.actions[node].peer)) * len(Lane)
            + graph.lane(node)
            for node, worker in enumerate(graph.workers)
        ]
        self.seconds = seconds
        num_lanes = 2 * num_workers * len(Lane)
        # heaps of (slot, node), per lane: what the timetable has first is served first
        self.ready: list[list[tuple[int, int]]] = [[] for _ in range(num_lanes)]
        self.busy = [False] * num_lanes
        self.blockers = list(graph.blockers)
        self.ready_s = [0.0] * len(graph.actions)
        self.start_s = [-1.0] * len(graph.actions)
        self.end_s = [-1.0] * len(graph.actions)
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
            raise _waits_for_ever(self.graph, self.start_s.index(-1.0))

    def events(self) -> tuple[Event, ...]:
        """Return when each node ran."""
        graph = self.graph
        return tuple(
            Event(worker, graph.lane(node), graph.actions[node], start_s, end_s)
            for node, (worker, start_s, end_s) in enumerate(
                zip(graph.workers, self.start_s, self.end_s, strict=True)
            )
        )

    def _wake(self, until_s: float) -> dict[int, None]:
        """Take what happens up to ``until_s``; return the lanes concerned, in order."""
        lanes: dict[int, None] = {}
        while self.queue and self.queue[0][0] <= until_s:
            _, node = heapq.heappop(self.queue)
            lane = self.lanes[node] if node >= 0 else ~node
            if node >= 0:
                heapq.heappush(self.ready[lane], (self.graph.actions[node].s, node))
            else:
                self.busy[lane] = False
            lanes[lane] = None
        return lanes

    def _serve(self, lane: int, now_s: float) -> None:
        """Start what a free lane can start: one node, and before it any that take no time."""
        while self.ready[lane] and not self.busy[lane]:
            _, node = heapq.heappop(self.ready[lane])
            self.start_s[node] = now_s
            seconds = self.seconds[node]
            self.busy[lane] = seconds > 0
            if self.graph.feeds[node] >= 0:
                follower = self.graph.feeds[node]
                self._unblock(follower, now_s + self._latency_s(node, follower))
            if seconds > 0:
                heapq.heappush(self.queue, (now_s + seconds, ~lane))
            self._end(node, now_s + seconds)

    def _end(self, node: int, end_s: float) -> None:
        """Note when a node ends, and let others wait for it until then."""
        self.end_s[node] = end_s
        for follower in self.graph.after[node]:
            self._unblock(follower, end_s)
        for follower in self.graph.told[node]:
            self._unblock(follower, end_s + self._latency_s(node, follower))

    def _latency_s(self, node: int, follower: int) -> float:
        workers = self.graph.workers
        return self.network.between(workers[node], workers[follower]).latency_s

    def _unblock(self, node: int, at_s: float) -> None:
        """Note that one of the node's waits ends at ``at_s``; queue it if that was the last."""
        self.ready_s[node] = max(self.ready_s[node], at_s)
        self.blockers[node] -= 1
        if not self.blockers[node]:
            heapq.heappush(self.queue, (self.ready_s[node], node))


def _waits_for_ever(graph: Graph, node: int) -> PlanError:
    """Return the error for a node that is never served."""
    return PlanError(
        f"worker {graph.workers[node]} waits for ever before {graph.actions[node]}; allowed: "
        "programs without cyclic waits; validate the programs first"
    )
