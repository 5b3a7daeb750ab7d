"""The clock of the simulation: a queue of moments, and lanes that serve what is ready.

A node becomes ready when the last node that it waits for has ended; a RECV when the first byte of
its message arrives, one latency after its SEND began. A lane that is free serves, of its ready
nodes, the one that the timetable has first. Nothing is preempted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import COMPUTE, Action, Kind
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.graph import Graph, Lane, build

# Moments this close (relative) are one moment: sums of floats differ in their last digits, and
# which of two ready messages goes first must not depend on that.
_SAME_MOMENT = 1e-9


class Event(NamedTuple):
    worker: int
    lane: Lane
    action: Action
    start_s: float
    end_s: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Hold the outcome of a simulation.

    Args:
        step_s: seconds per training step in steady state, of the slowest worker.
        busy_s: seconds of compute of each worker, over the whole run.
        bubble: share of a steady step for which each worker's compute lane is idle.
        events: every action with its times, worker by worker in program order; what is encoded
            before it is sent is there twice, at first on the lane that encodes.
    """

    makespan_s: float
    step_s: float
    busy_s: tuple[float, ...]
    bubble: tuple[float, ...]
    events: tuple[Event, ...]


def summarise(events: Sequence[Event], num_workers: int) -> Result:
    """Derive the figures of a run from its events.

    The steady step time is the mean over the steps from the middle to the last but one: the
    first steps fill the pipe, and beside the last there is less traffic than in steady state.
    """
    computing = COMPUTE | {Kind.UPDATE}
    compute = [event for event in events if event.action.kind in computing]
    num_steps = 1 + max((event.action.t for event in compute), default=0)
    first, last = steady_window(num_steps)
    ends = _ends_of_steps(compute, num_workers, num_steps)
    step_s = max(((end[last] - end[first]) / (last - first) for end in ends), default=0.0)
    busy_s, steady_s = [0.0] * num_workers, [0.0] * num_workers
    for event in compute:
        busy_s[event.worker] += event.end_s - event.start_s
        if first < event.action.t <= last:
            steady_s[event.worker] += (event.end_s - event.start_s) / (last - first)
    return Result(
        makespan_s=max((event.end_s for event in events), default=0.0),
        step_s=step_s,
        busy_s=tuple(busy_s),
        bubble=tuple(max(1 - busy / step_s, 0.0) if step_s else 0.0 for busy in steady_s),
        events=tuple(events),
    )


def steady_window(num_steps: int) -> tuple[int, int]:
    """Return the steps between whose ends the steady step time is measured.

    Example:
        >>> steady_window(12), steady_window(2), steady_window(1)
        ((5, 10), (0, 1), (-1, 0))
    """
    last = num_steps - 2 if num_steps > 3 else num_steps - 1
    return (last // 2 if last else -1), last


def _ends_of_steps(
    compute: Sequence[Event], num_workers: int, num_steps: int
) -> list[list[float]]:
    """Return when each worker ended its compute of each step, with 0.0 appended.

    The appended value is ``ends[-1]``: the end of the step before step 0 is the start of the run.
    """
    ends = [[0.0] * (num_steps + 1) for _ in range(num_workers)]
    for event in compute:
        of_worker, t = ends[event.worker], event.action.t
        of_worker[t] = max(of_worker[t], event.end_s)
    return ends


def simulate(
    programs: Sequence[Iterable[Action]],
    costs: Costs,
    network: Network | None = None,
    plan: Plan | None = None,
) -> Result:
    """Run the programs of all workers against a clock.

    Args:
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
    graph = build(programs, plan, network, codes=costs.codes)
    nodes = range(len(graph.actions))
    seconds = [_seconds(graph, node, costs, network, len(programs)) for node in nodes]
    clock = _Clock(graph, len(programs), seconds, network)
    clock.run()
    return summarise(clock.events(), len(programs))


def _seconds(graph: Graph, node: int, costs: Costs, network: Network, num_workers: int) -> float:
    """Return for how long a node keeps its lane busy."""
    action, worker = graph.actions[node], graph.workers[node]
    if node in graph.coding:
        is_own = action.i is not None and action.i % num_workers == worker
        return costs.coding_s(action, is_own=is_own)
    if action.peer is None:
        return costs.compute_s(action)
    return network.between(worker, action.peer).transfer_s(costs.message_bytes(action))


@final
class _Clock:
    """Advance from moment to moment until nothing is left to run."""

    def __init__(
        self, graph: Graph, num_workers: int, seconds: list[float], network: Network
    ) -> None:
        self.graph = graph
        self.network = network
        self.lanes = [
            (2 * worker + self._is_inside(node)) * len(Lane) + graph.lane(node)
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

    def _is_inside(self, node: int) -> bool:
        """Say whether a node keeps a port to neighbours busy."""
        graph = self.graph
        has_port = node not in graph.coding
        return has_port and self.network.is_inside(graph.workers[node], graph.actions[node].peer)

    def run(self) -> None:
        while self.queue:
            now_s = self.queue[0][0]
            for lane in self._wake(now_s * (1 + _SAME_MOMENT)):
                self._serve(lane, now_s)
        if -1.0 in self.start_s:
            node = self.start_s.index(-1.0)
            raise PlanError(
                f"worker {self.graph.workers[node]} waits for ever before "
                f"{self.graph.actions[node]}; allowed: programs without cyclic waits; "
                "validate the programs first"
            )

    def events(self) -> tuple[Event, ...]:
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
