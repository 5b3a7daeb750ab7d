"""The best places for a number of stages: the largest stage is as small as it can be.

Without a plan a stage weighs what it computes (or its activations), and the cut is found by
bisection. With one it also takes what its messages take, and may keep no more than its worker has
memory for; then the cut is the planner's own (planner/partition.py). Both are exact, also where
calls branch: their order makes a row of every graph, and what crosses at a place is all that is
made before and used behind, passed on from stage to stage (planner/ideals.py; ``branches.py``
compares with other orders).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import ceil, inf
from typing import Self, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan
from lightning_cyclic.planner.partition import Fits, Pieces, balance_between, cut_row
from lightning_cyclic.runtime.stages.places import CutPoints, Load, Place
from lightning_cyclic.simulate.costs import BACKWARD_PER_FORWARD, Network
from lightning_cyclic.simulate.memory import KINDS, Memory, copies, steps_to_count

_NS_PER_S = 1e9


@final
class Demands:
    """Say what a stage takes, by its number and its load.

    Args:
        copies: that the worker of each stage keeps of it, of each kind.
        forwards: that forward and backward take as long as.
        homes: the worker of each stage. [each has its own]
    """

    def __init__(
        self,
        copies: Sequence[Memory],
        *,
        forwards: float,
        network: Network,
        homes: Sequence[int] | None = None,
    ) -> None:
        self._copies = tuple(copies)
        self._forwards = forwards
        self._homes = homes or range(len(copies))
        # If no stage has more than its share of a worker's memory, by the copies of it that are
        # kept, all of them together fit.
        self._shares = [copy.total / self._of_worker(w) for copy, w in self._each()]
        self.network = network

    @classmethod
    def of(
        cls, plan: Plan, *, again: bool, network: Network, state_per_param: float
    ) -> Self | None:
        """Count the copies that a plan's workers keep; None where they take turns with stages.

        Args:
            plan: with as many stages as are asked for.
            again: whether backwards run their forward again.
            network: the links between workers.
            state_per_param: bytes of optimizer state per byte of parameters.
        """
        if plan.axes.placement.takes_turns:
            return None
        steps = steps_to_count(plan.num_stages, max(1, plan.num_microbatches // plan.replicas))
        shown = replace(plan, num_steps=steps)
        return cls(
            copies(shown, remat=again, state_per_param=state_per_param),
            forwards=1 + BACKWARD_PER_FORWARD + again,
            network=network,
            homes=[plan.worker_of(0, j) for j in range(plan.num_stages)],
        )

    @classmethod
    def of_forward(cls, num_stages: int) -> Self:
        """Ask for forwards and for memory of parameters and activations alone, without a plan."""
        one = Memory(**dict.fromkeys(KINDS, 0.0) | {"parameters": 1.0, "activations": 1.0})
        return cls((one,) * num_stages, forwards=1.0, network=Network())

    def compute_s(self, compute_ns: int) -> float:
        """Return the seconds of a stage's forward and backward, by those of its forward."""
        return compute_ns / _NS_PER_S * self._forwards

    def sent_s(self, crossing_bytes: int) -> float:
        """Return for how long what crosses a cut keeps a port busy, in each direction."""
        return self.network.transfer_s(crossing_bytes)

    def kept_bytes(self, j: int, load: Load, sent_bytes: int) -> float:
        """Return what the worker of a stage keeps.

        Args:
            j: number of the stage.
            load: of the stage; what it receives included.
            sent_bytes: that it sends to the next.
        """
        copies = self._copies[j]
        is_joined = j > 0 and self._homes[j - 1] == self._homes[j]
        kept = (
            copies.of_parameters * load.parameter_bytes
            + copies.activations * (load.activation_bytes + is_joined * load.adopted_bytes)
            + copies.inputs * load.crossing_bytes
            + copies.returns * sent_bytes
        )
        return kept / self._shares[j]

    def _each(self) -> Iterator[tuple[Memory, int]]:
        return zip(self._copies, self._homes, strict=True)

    def _of_worker(self, w: int) -> float:
        return sum(copy.total for copy, home in self._each() if home == w)


def best_places(
    points: CutPoints,
    stages: int,
    memory_limit_bytes: int | None = None,
    demands: Demands | None = None,
) -> list[Place]:
    """Return where stages 1, 2, ... begin.

    Places that would share a module among stages are used only if there are too few others.

    Args:
        points: where stages can begin.
        stages: how many.
        memory_limit_bytes: of parameters and activations of one stage; with demands, of all that
            its worker keeps. [any number]
        demands: of the plan, for as many stages. [none: stages weigh what the points say]

    Raises:
        PlanError: too many stages, or too few for the memory.
    """
    possible = points.possible
    for places in ([p for p in possible if not p.obstacles], possible):
        found = _best(points, places, stages, memory_limit_bytes, demands)
        if found is not None:
            return found
    most = most_stages(points)
    if not 1 <= stages <= most:
        raise PlanError(
            f"stages={stages} were asked for, but {points.survey.title} can be cut into at most "
            f"{most}; allowed: 1 to {most}; use stages={most}; "
            "`lightning-cyclic doctor` says what stands against more"
        )
    least = _least_memory(points, possible, stages, demands)
    raise PlanError(
        f"memory_limit_bytes={memory_limit_bytes} cannot be met with stages={stages}; allowed: "
        f"{least} bytes or more with so many; raise it, use more stages or smaller micro-batches"
    )


def _best(
    points: CutPoints,
    places: Sequence[Place],
    stages: int,
    limit: float | None,
    demands: Demands | None = None,
) -> list[Place] | None:
    """Return the best of some places; None if no choice of them is allowed.

    Some places keep others from being used behind them, from some tick on. What can be used then
    depends on the last place alone, so each is tried as the last.
    """
    if stages < 1:
        return None
    if stages == 1 and limit is None:  # whatever the step is, even one that uses no parameter
        return []
    if stages == 1 or not points.obstacles.depend_on_other_cuts:
        return _best_of_row(points, places, stages, limit, demands)[0]
    best: list[Place] | None = None
    least = inf
    for row in _rows_by_end(points, places):
        found, largest = _best_of_row(points, row, stages, limit, demands)
        if found and largest < least:
            best, least = found, largest
    return best


def _rows_by_end(points: CutPoints, places: Sequence[Place]) -> Iterator[list[Place]]:
    """Yield for each place that may be the last one those that can be used with it."""
    reach = _reaches(points, places)
    for last, end in enumerate(places):
        yield [*(p for p, r in zip(places[:last], reach, strict=False) if r >= end.tick), end]


def _best_of_row(
    points: CutPoints,
    places: Sequence[Place],
    stages: int,
    limit: float | None,
    demands: Demands | None,
) -> tuple[list[Place] | None, float]:
    """Return the best of places that do not stand against each other, and its largest stage."""
    if demands is not None:
        return _Planned(points, places, demands, limit).best(stages)
    found = _Row(points, places, limit).best(stages)
    return found, inf if found is None else _largest(points, found)


def _reaches(points: CutPoints, places: Sequence[Place]) -> list[int]:
    """Return for each place the tick of the last place that may be used with it."""
    found = []
    for k, place in enumerate(places):
        reach = place.tick
        for other in places[k + 1 :]:
            if points.clash([place, other]):
                break
            reach = other.tick
        found.append(reach)
    return found


def _largest(points: CutPoints, places: Sequence[Place]) -> int:
    ends = _weights(points, [p.tick for p in places])
    return max(b - a for a, b in zip(ends, ends[1:], strict=False))


def _weights(points: CutPoints, ticks: Sequence[int]) -> list[int]:
    return [0, *map(points.weight_before, ticks), points.weight_before(points.survey.end + 1)]


@final
class _Row:
    """Choose among places by their running sums of weight, parameters and memory."""

    def __init__(self, points: CutPoints, places: Sequence[Place], limit: float | None) -> None:
        self._places = places
        self._ticks = [0, *(p.tick for p in places), points.survey.end + 1]
        self._ends = _weights(points, [p.tick for p in places])
        firsts = [points.first_uses_before(tick) for tick in self._ticks]
        self._highs = [bisect_left(firsts, count) - 1 for count in firsts]
        self._lows = [0] * len(self._ends) if limit is None else self._memory_lows(points, limit)

    def best(self, stages: int) -> list[Place] | None:
        starts = balance_between(self._ends, stages, lows=self._lows, highs=self._highs)
        return None if starts is None else [self._places[k - 1] for k in starts[1:]]

    def most(self) -> int:
        """Return the largest number of stages, each with a parameter of its own."""
        # the furthest place from which a stage can reach the end, and so on to the front
        count, b = 0, len(self._ends) - 1
        while b > 0 and self._highs[b] >= 0:
            b = self._highs[b]
            count += 1
        return max(count, 1)

    def _memory_lows(self, points: CutPoints, limit: float) -> list[int]:
        lows, a = [], 0
        for b, end in enumerate(self._ticks):
            while a < b and points.kept_bytes(self._ticks[a], end) > limit:
                a += 1
            lows.append(a)
        return lows


@final
class _Planned:
    """Choose among places by what a plan's workers compute, send and keep."""

    def __init__(
        self, points: CutPoints, places: Sequence[Place], demands: Demands, limit: float | None
    ) -> None:
        self._places = places
        self._demands = demands
        self._limit = limit
        ticks = [0, *(p.tick for p in places), points.survey.end + 1]
        self._crossing = [0, *(p.crossing_bytes for p in places), 0]
        self._sent_s = [demands.sent_s(size) for size in self._crossing]
        self._compute_s = [demands.compute_s(points.time_at(tick)) for tick in ticks]
        self._firsts = [points.first_uses_before(tick) for tick in ticks]
        self._load = cache(lambda a, b: points.load(ticks[a], ticks[b], self._crossing[a]))

    def best(self, stages: int) -> tuple[list[Place] | None, float]:
        """Return the best choice and the seconds of its slowest stage; None if there is none."""
        return self._cut(stages, self._slowest, self._is_allowed)

    def least_memory(self, stages: int) -> float:
        """Return the bytes of the worker that keeps most, where that is as little as can be."""
        return self._cut(stages, self._fullest, self._has_parameter)[1]

    def _cut(self, stages: int, pieces: Pieces, fits: Fits) -> tuple[list[Place] | None, float]:
        starts = cut_row(len(self._firsts) - 1, stages, pieces, fits=fits)
        if starts is None:
            return None, inf
        ends = [*starts[1:], len(self._firsts) - 1]
        parts = enumerate(zip(starts, ends, strict=True))
        costs = (c for j, (a, b) in parts for at, _, c in pieces(j, b) if at == a)
        return [self._places[k - 1] for k in starts[1:]], max(costs)

    def _slowest(self, j: int, b: int) -> Iterator[tuple[int, float, float]]:
        for a in range(b - 1, -1, -1):
            compute_s = self._compute_s[b] - self._compute_s[a]
            yield a, compute_s, max(compute_s, self._sent_s[a] + self._sent_s[b])

    def _fullest(self, j: int, b: int) -> Iterator[tuple[int, float, float]]:
        for a in range(b - 1, -1, -1):
            yield a, 0.0, self._kept_bytes(j, a, b)

    def _is_allowed(self, j: int, a: int, b: int) -> bool:
        fits = self._limit is None or self._kept_bytes(j, a, b) <= self._limit
        return fits and self._has_parameter(j, a, b)

    def _has_parameter(self, j: int, a: int, b: int) -> bool:
        is_whole = b - a == len(self._firsts) - 1  # of a step that may use none
        return is_whole or self._firsts[a] < self._firsts[b]

    def _kept_bytes(self, j: int, a: int, b: int) -> float:
        return self._demands.kept_bytes(j, self._load(a, b), self._crossing[b])


def most_stages(points: CutPoints) -> int:
    """Return the largest number of stages, each with a parameter of its own."""
    places = points.possible
    if not points.obstacles.depend_on_other_cuts:
        return _Row(points, places, None).most()
    rows = _rows_by_end(points, places)
    return max((_Row(points, row, None).most() for row in rows), default=1)


def _least_memory(
    points: CutPoints, places: Sequence[Place], stages: int, demands: Demands | None
) -> int:
    """Return the least limit that can be met: of a plan's demands at once, else by bisection."""
    if demands is not None and not points.obstacles.depend_on_other_cuts:
        return ceil(_Planned(points, places, demands, None).least_memory(stages))
    low, high = 0, max(1, points.kept_bytes(0, points.survey.end + 1))
    while _best(points, places, stages, high, demands) is None:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        if _best(points, places, stages, middle, demands) is None:
            low = middle + 1
        else:
            high = middle
    return low
