"""The clock of workers that share cores: as many as there are compute at once at full speed.

    two workers, one core       w0  F F . .   each alone takes 2 s;
                                w1  . F F .   while both compute, each is half as fast

Everything else is as in :mod:`~lightning_cyclic.simulate.engine`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import Action
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.engine import seconds_of_nodes, waits_for_ever
from lightning_cyclic.simulate.graph import Graph, Lane, build
from lightning_cyclic.simulate.result import Event, Result, summarise

_NOTHING_LEFT = 1e-9  # of the seconds of a node, relative: sums of floats differ in last digits


def simulate_shared(
    programs: Sequence[Iterable[Action]],
    costs: Costs,
    network: Network | None = None,
    *,
    cores: int,
) -> Result:
    """Run the programs of workers that share cores against a clock.

    Args:
        programs: actions of each worker, in program order.
        costs: what each stage costs on a core of its own.
        network: the links between the workers; free by default.
        cores: how many workers can compute at once at full speed; more get equal shares.

    Returns:
        When everything happened, the steady step time and the idle times.

    Raises:
        PlanError: no core; or as :func:`~lightning_cyclic.simulate.engine.simulate`.

    Example:
        >>> from lightning_cyclic.plan.actions import Kind
        >>> F = Action(kind=Kind.F, t=0, i=0, j=0, v=0)
        >>> simulate_shared([[F], [F]], Costs.even(1, compute_s=3.0), cores=1).makespan_s
        2.0
    """
    if cores < 1:
        raise PlanError(f"cores={cores}; allowed: whole numbers from 1 on; use cores=1 or more")
    clock = _Clock(build(programs), len(programs), costs, network or Network(), cores)
    clock.run()
    return summarise(clock.events(), len(programs))


@final
class _Clock:
    """Advance from moment to moment until nothing is left to run."""

    def __init__(
        self, graph: Graph, num_workers: int, costs: Costs, network: Network, cores: int
    ) -> None:
        self._graph = graph
        self._latency_s = network.latency_s
        self._cores = cores
        self._lanes = [
            worker * len(Lane) + graph.lane(node) for node, worker in enumerate(graph.workers)
        ]
        self._seconds = seconds_of_nodes(graph, costs, network)
        self._now_s = 0.0
        self._ready: list[list[int]] = [[] for _ in range(num_workers * len(Lane))]
        self._left_s: dict[int, float] = {}  # of the nodes that run
        self._busy: set[int] = set()  # lanes
        self._arrivals: list[tuple[float, int]] = []  # first bytes under way
        self._blockers = list(graph.blockers)
        self._start_s = [-1.0] * len(graph.actions)
        self._end_s = [-1.0] * len(graph.actions)
        for node, count in enumerate(self._blockers):
            if not count:
                heapq.heappush(self._ready[self._lanes[node]], node)

    def run(self) -> None:
        """Serve all nodes."""
        self._serve()
        while self._left_s or self._arrivals:
            self._advance()
            self._serve()
        if -1.0 in self._end_s:
            raise waits_for_ever(self._graph, self._end_s.index(-1.0))

    def events(self) -> tuple[Event, ...]:
        """Return when each node ran."""
        graph = self._graph
        return tuple(
            Event(worker, graph.lane(node), graph.actions[node], start_s, end_s)
            for node, (worker, start_s, end_s) in enumerate(
                zip(graph.workers, self._start_s, self._end_s, strict=True)
            )
        )

    def _advance(self) -> None:
        """Go on to the next moment at which a node ends or a first byte arrives."""
        computing = sum(self._graph.lane(node) is Lane.COMPUTE for node in self._left_s)
        share = min(1.0, self._cores / computing) if computing else 1.0
        speed = {
            node: share if self._graph.lane(node) is Lane.COMPUTE else 1.0 for node in self._left_s
        }
        step_s = min((left / speed[node] for node, left in self._left_s.items()), default=None)
        if self._arrivals and (step_s is None or self._arrivals[0][0] - self._now_s < step_s):
            step_s = max(0.0, self._arrivals[0][0] - self._now_s)
        assert step_s is not None
        self._now_s += step_s
        for node in sorted(self._left_s):
            self._left_s[node] -= step_s * speed[node]
            if self._left_s[node] <= _NOTHING_LEFT * self._seconds[node]:
                del self._left_s[node]
                self._busy.discard(self._lanes[node])
                self._end(node)
        while self._arrivals and self._arrivals[0][0] <= self._now_s:
            self._unblock(heapq.heappop(self._arrivals)[1])

    def _serve(self) -> None:
        """Start what free lanes can start, until nothing more can."""
        started = True
        while started:
            started = False
            for lane, ready in enumerate(self._ready):
                while ready and lane not in self._busy:
                    started = True
                    self._start(lane, heapq.heappop(ready))

    def _start(self, lane: int, node: int) -> None:
        self._start_s[node] = self._now_s
        receiver = self._graph.feeds[node]
        if receiver >= 0 and self._latency_s == 0:
            self._unblock(receiver)
        elif receiver >= 0:
            heapq.heappush(self._arrivals, (self._now_s + self._latency_s, receiver))
        if self._seconds[node] > 0:
            self._busy.add(lane)
            self._left_s[node] = self._seconds[node]
        else:
            self._end(node)

    def _end(self, node: int) -> None:
        self._end_s[node] = self._now_s
        for follower in self._graph.after[node]:
            self._unblock(follower)

    def _unblock(self, node: int) -> None:
        self._blockers[node] -= 1
        if not self._blockers[node]:
            heapq.heappush(self._ready[self._lanes[node]], node)
