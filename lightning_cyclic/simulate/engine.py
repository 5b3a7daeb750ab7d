"""The clock of the simulation: a queue of moments, and lanes that serve what is ready.

A node becomes ready when the last node that it waits for has ended; a RECV when the first byte of
its message arrives, one latency after its SEND began. A lane that is free serves, of its ready
nodes, the one that the timetable has first. Nothing is preempted.

Workers may share cores: as many as there are compute at once at full speed, more get equal shares.

    two workers, one core       w0  F F . .   each alone takes 2 s;
                                w1  . F F .   while both compute, each is half as fast
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from functools import cache
from math import inf
from typing import final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import Action
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.graph import Graph, Lane, build
from lightning_cyclic.simulate.jitter import Jitter
from lightning_cyclic.simulate.result import Event, Result, summarise
from lightning_cyclic.simulate.turns import take_turns

# Moments this close (relative) are one moment: sums of floats differ in their last digits, and
# which of two ready messages goes first must not depend on that.
_SAME_MOMENT = 1e-9


def simulate(
    programs: Sequence[Iterable[Action]],
    costs: Costs,
    network: Network | None = None,
    plan: Plan | None = None,
    *,
    cores: int | None = None,
    jitter: Jitter | None = None,
    in_turn: bool = False,
) -> Result:
    """Run the programs of all workers against a clock.

    Args:
        programs: actions of each worker, in program order.
        costs: what each stage costs, on a core of its own.
        network: the links between the workers; free by default.
        plan: of the programs, where stages share parameters. [they share none]
        cores: how many workers can compute at once at full speed. [all]
        jitter: how unsteady workers and links are; of some steps, so that a mean says something.
            [they are steady]
        in_turn: whether ports serve their messages in a fixed order (turns.py), and wait for each.

    Returns:
        When everything happened, the steady step time and the idle times.

    Raises:
        PlanError: if there is no core, messages do not pair up, the workers wait for each other
            for ever, or the network has hosts of other workers.

    Example:
        >>> from lightning_cyclic.plan.actions import Kind
        >>> F = Action(kind=Kind.F, t=0, i=0, j=0, v=0)
        >>> simulate([[F]], Costs.even(1, compute_s=3.0)).makespan_s
        1.0
        >>> simulate([[F], [F]], Costs.even(1, compute_s=3.0), cores=1).makespan_s
        2.0
    """
    if cores is not None and cores < 1:
        raise PlanError(f"cores={cores}; allowed: whole numbers from 1 on; use cores=1 or more")
    network = network or Network()
    network.check(len(programs))
    if in_turn and (plan is None or cores is not None):
        raise PlanError(
            "in_turn=True; allowed: with the plan, and without cores; leave in_turn out"
        )
    graph = build(programs, plan, network, in_order=not in_turn)
    jitter = jitter or Jitter()
    seconds = _seconds_of_nodes(graph, costs, network, jitter)
    order = take_turns(graph, plan, network, seconds) if in_turn and plan is not None else []
    clock = _Clock(graph, len(programs), seconds, network, cores, jitter)
    if in_turn:
        clock.run_in(order)
    else:
        clock.run()
    return summarise(clock.events(), len(programs))


@final
class _Clock:
    """Advance from moment to moment until nothing is left to run."""

    def __init__(
        self, graph: Graph, num_workers: int, seconds: list[float], network: Network,
        cores: int | None, jitter: Jitter,
    ) -> None:  # fmt: skip
        self.graph = graph
        self.network = network
        self.jitter = jitter
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
        self.cores = _Cores(cores)

    def run(self) -> None:
        """Serve all nodes."""
        now_s = 0.0
        while self.queue or self.cores.running:
            before_s, now_s = (
                now_s,
                min(self.queue[0][0] if self.queue else inf, self.cores.next_end_s(now_s)),
            )
            ended = self.cores.advance(now_s - before_s)
            for node in ended:
                self.busy[self.lanes[node]] = False
                self._end(node, now_s)
            free = {self.lanes[node]: None for node in ended}
            for lane in self._wake(now_s * (1 + _SAME_MOMENT)) | free:
                self._serve(lane, now_s)
        if -1.0 in self.start_s:
            raise _waits_for_ever(self.graph, self.start_s.index(-1.0))

    def run_in(self, order: Sequence[int]) -> None:
        """Serve all nodes, each as soon as what it waits for has ended: no two want one lane."""
        for node in order:
            start_s = self.start_s[node] = self.ready_s[node]
            self.end_s[node] = end_s = start_s + self.seconds[node]
            follower = self.graph.feeds[node]
            if follower >= 0:
                self._delay(follower, start_s + self._latency_s(node, follower))
            for follower in self.graph.after[node]:
                self._delay(follower, end_s)

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
            if seconds > 0 and self.cores.are_shared and self.graph.lane(node) is Lane.COMPUTE:
                self.cores.start(node, seconds)
                continue
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
        latency_s = self.network.between(workers[node], workers[follower]).latency_s
        return latency_s * self.jitter.of_message(workers[node], node)

    def _delay(self, node: int, at_s: float) -> None:
        self.ready_s[node] = max(self.ready_s[node], at_s)

    def _unblock(self, node: int, at_s: float) -> None:
        """Note that one of the node's waits ends at ``at_s``; queue it if that was the last."""
        self._delay(node, at_s)
        self.blockers[node] -= 1
        if not self.blockers[node]:
            heapq.heappush(self.queue, (self.ready_s[node], node))


@final
class _Cores:
    """Let nodes share cores equally.

    Every node gets as much done as every other, so that one number, how much a node that runs
    from the beginning would have done, says of all of them when they end.

    Args:
        count: how many nodes run at full speed at once; None for any number.
    """

    def __init__(self, count: int | None) -> None:
        self.are_shared = count is not None
        self.running: list[tuple[float, int]] = []  # heap of (work done at its end, node)
        self._count = count or 0
        self._work_s = 0.0

    def start(self, node: int, seconds: float) -> None:
        """Begin to run a node."""
        heapq.heappush(self.running, (self._work_s + seconds, node))

    def next_end_s(self, now_s: float) -> float:
        """Return when the next node ends if no other starts."""
        if not self.running:
            return inf
        return now_s + (self.running[0][0] - self._work_s) / self._speed

    def advance(self, seconds: float) -> list[int]:
        """Let time pass; return the nodes that have ended, in order."""
        if not self.running:
            return []
        self._work_s += seconds * self._speed
        ended = []
        while self.running and self.running[0][0] <= self._work_s * (1 + _SAME_MOMENT):
            ended.append(heapq.heappop(self.running)[1])
        return sorted(ended)

    @property
    def _speed(self) -> float:
        return min(1.0, self._count / len(self.running))


def _seconds_of_nodes(graph: Graph, costs: Costs, network: Network, jitter: Jitter) -> list[float]:
    """Return for how long each node keeps its lane busy."""
    slower = cache(jitter.of_step)
    return [
        costs.compute_s(action) * slower(worker, action.t)
        if action.payload is None
        else network.between(worker, action.peer).transfer_s(costs.message_bytes(action))
        for worker, action in zip(graph.workers, graph.actions, strict=True)
    ]


def _waits_for_ever(graph: Graph, node: int) -> PlanError:
    """Return the error for a node that is never served."""
    return PlanError(
        f"worker {graph.workers[node]} waits for ever before {graph.actions[node]}; allowed: "
        "programs without cyclic waits; validate the programs first"
    )
