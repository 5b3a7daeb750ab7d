"""The simulation: when each action of the programs starts and ends.

A node may start when the last node that it waits for has ended; a RECV when the first byte of its
message arrives, one latency after its SEND began. What waits for what is known before any of them
runs (graph.py, turns.py), so that when a node starts is the length of a longest path.

Workers may share cores: as many as there are compute at once at full speed, more get equal shares.
How long something takes depends on what else runs then, so a clock moves from moment to moment.

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
from lightning_cyclic.simulate.turns import in_turn, take_turns

# Work this close (relative) is done at one moment: of nodes that share cores, as sums of floats
# differ in their last digits.
_SAME_MOMENT = 1e-9


def simulate(
    programs: Sequence[Iterable[Action]],
    costs: Costs,
    network: Network | None = None,
    plan: Plan | None = None,
    *,
    cores: int | None = None,
    jitter: Jitter | None = None,
) -> Result:
    """Run the programs of all workers against a clock.

    Args:
        programs: actions of each worker, in program order.
        costs: what each stage costs, on a core of its own.
        network: the links between the workers; free by default.
        plan: of the programs, where stages share parameters, or what they have travels in chunks.
            [neither]
        cores: how many workers can compute at once at full speed. [all]
        jitter: how unsteady workers and links are; of some steps, so that a mean says something.
            [they are steady]

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
    graph = build(programs, plan)
    jitter = jitter or Jitter()
    num_chunks = 1 if plan is None else plan.chunks
    seconds = _seconds_of_nodes(graph, costs, network, num_chunks, jitter)
    order = in_turn(graph)
    if len(order) < len(graph.actions):
        raise _waits_for_ever(graph, min(set(range(len(graph.actions))) - set(order)))
    take_turns(graph, order, seconds)
    run = _Run(graph, seconds, network, jitter)
    if cores is None:
        for node in order:
            run.start(node, run.ready_s[node])
            run.end(node, run.ready_s[node] + seconds[node])
    else:
        _Clock(run, cores).run()
    return summarise(run.events(), len(programs))


@final
class _Run:
    """Know when nodes may start, and when they have started and ended.

    Args:
        graph: of the programs, with turns.
        seconds: that each node takes.
        network: the links between the workers.
        jitter: how unsteady links are.
    """

    def __init__(
        self, graph: Graph, seconds: list[float], network: Network, jitter: Jitter
    ) -> None:
        self.graph = graph
        self.seconds = seconds
        self.ready_s = [0.0] * len(graph.actions)
        self._network = network
        self._jitter = jitter
        self._start_s = [0.0] * len(graph.actions)
        self._end_s = [0.0] * len(graph.actions)

    def start(self, node: int, start_s: float) -> Sequence[int]:
        """Note that a node starts; return the nodes that waited for it."""
        self._start_s[node] = start_s
        receive = self.graph.feeds[node]
        return self._later([receive], start_s, node, is_told=True) if receive >= 0 else ()

    def end(self, node: int, end_s: float) -> Sequence[int]:
        """Note that a node ends; return the nodes that waited for it."""
        self._end_s[node] = end_s
        after, told = self.graph.after[node], self.graph.told[node]
        self._later(after, end_s, node)
        return [*after, *self._later(told, end_s, node, is_told=True)] if told else after

    def events(self) -> tuple[Event, ...]:
        """Return when each node ran."""
        graph = self.graph
        return tuple(
            Event(worker, graph.lane(node), graph.actions[node], start_s, end_s)
            for node, (worker, start_s, end_s) in enumerate(
                zip(graph.workers, self._start_s, self._end_s, strict=True)
            )
        )

    def _later(
        self, nodes: Sequence[int], at_s: float, node: int, *, is_told: bool = False
    ) -> Sequence[int]:
        """Let nodes start no sooner than a moment, and one latency where they have to be told."""
        for other in nodes:
            until_s = at_s + self._latency_s(node, other) if is_told else at_s
            self.ready_s[other] = max(self.ready_s[other], until_s)
        return nodes

    def _latency_s(self, node: int, follower: int) -> float:
        workers = self.graph.workers
        latency_s = self._network.between(workers[node], workers[follower]).latency_s
        return latency_s * self._jitter.of_message(workers[node], node)


@final
class _Clock:
    """Advance from moment to moment until nothing is left to run, where workers share cores.

    Args:
        run: knows what waits for what.
        cores: how many nodes compute at full speed at once.
    """

    def __init__(self, run: _Run, cores: int) -> None:
        self._run = run
        self._blockers = list(run.graph.blockers)
        self._cores = _Cores(cores)
        self._queue = [(0.0, node) for node, count in enumerate(self._blockers) if not count]
        heapq.heapify(self._queue)  # when each node that waits for no other any more can start

    def run(self) -> None:
        """Serve all nodes."""
        now_s = 0.0
        while self._queue or self._cores.running:
            next_s = self._queue[0][0] if self._queue else inf
            before_s, now_s = now_s, min(next_s, self._cores.next_end_s(now_s))
            for node in self._cores.advance(now_s - before_s):
                self._unblock(self._run.end(node, now_s))
            while self._queue and self._queue[0][0] <= now_s:
                self._start(heapq.heappop(self._queue)[1], now_s)

    def _start(self, node: int, now_s: float) -> None:
        self._unblock(self._run.start(node, now_s))
        seconds = self._run.seconds[node]
        if seconds > 0 and self._run.graph.lane(node) is Lane.COMPUTE:
            self._cores.start(node, seconds)
        else:
            self._unblock(self._run.end(node, now_s + seconds))

    def _unblock(self, nodes: Iterable[int]) -> None:
        """Note that one of the waits of each node has its end; queue it if that was the last."""
        for node in nodes:
            self._blockers[node] -= 1
            if not self._blockers[node]:
                heapq.heappush(self._queue, (self._run.ready_s[node], node))


@final
class _Cores:
    """Let nodes share cores equally.

    Every node gets as much done as every other, so that one number, how much a node that runs
    from the beginning would have done, says of all of them when they end.

    Args:
        count: how many nodes run at full speed at once.
    """

    def __init__(self, count: int) -> None:
        self.running: list[tuple[float, int]] = []  # heap of (work done at its end, node)
        self._count = count
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


def _seconds_of_nodes(
    graph: Graph, costs: Costs, network: Network, num_chunks: int, jitter: Jitter
) -> list[float]:
    """Return for how long each node keeps its lane busy."""
    slower = cache(jitter.of_step)
    return [
        costs.compute_s(action) * slower(worker, action.t)
        if action.payload is None
        else network.between(worker, action.peer).transfer_s(
            costs.message_bytes(action, num_chunks)
        )
        for worker, action in zip(graph.workers, graph.actions, strict=True)
    ]


def _waits_for_ever(graph: Graph, node: int) -> PlanError:
    """Return the error for a node that is never served."""
    return PlanError(
        f"worker {graph.workers[node]} waits for ever before {graph.actions[node]}; allowed: "
        "programs without cyclic waits; validate the programs first"
    )
