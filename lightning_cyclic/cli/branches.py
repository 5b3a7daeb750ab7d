"""Branches: what a module would gain if it called them in another order.

    as called        stem a1 | a2 b1 | b2 join        stages are calls in a row, so that a stage
    in another       stem b1 | a1 b2 | a2 join        cannot take from each branch what suits it

The calls between two places where stages can begin are a *piece*, with the code behind them. What
pieces take, make and use is a graph of costs, which the planner cuts whatever the order of its
nodes. The order of the user's code is never changed: it only pays to know what it costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner.ideals import CostGraph, GraphSplit, GraphTensor, split_ideals
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.stages.demands import Demands
from lightning_cyclic.runtime.stages.evidence import Survey
from lightning_cyclic.runtime.stages.places import CutPoints
from lightning_cyclic.simulate.units import show_seconds

_WORTH = 0.95  # of the slowest stage's time: what is above is lost in the noise of times
_MOST_HINTS = 3


def faster_order(survey: Survey, cuts: Cuts) -> str | None:
    """Say how much faster the slowest stage could be if branches were called in another order.

    Args:
        cuts: its stages, the best in the order of its calls.

    Returns:
        A sentence; None where calls do not branch, where another order would gain next to
        nothing, or where nobody can tell: there are too many, or stages begin as they were named.
    """
    points = CutPoints(survey)
    pieces = StepPieces(points, cuts.starts)
    if not {*cuts.starts} <= {place.path for place in pieces.begins}:
        return None
    graph = pieces.graph(Demands.of_forward(cuts.num_stages))
    now_s = graph.slowest_s(pieces.ends(cuts.starts))
    least_s = max(*graph.seconds, sum(graph.seconds) / cuts.num_stages)
    if graph.is_chain or least_s >= _WORTH * now_s or points.clash(pieces.begins):
        return None
    try:
        best = split_ideals(graph, cuts.num_stages)
    except PlanError:  # too many orders
        return None
    if best.slowest_s >= _WORTH * now_s:
        return None
    return (
        "if branches were called in another order, the slowest stage could take "
        f"{show_seconds(best.slowest_s)} instead of {show_seconds(now_s)}\n"
        f"(forward of one micro-batch): call {_hints(pieces, best)}"
    )


def _hints(pieces: StepPieces, split: GraphSplit) -> str:
    """Name what is called before what, in place of after it."""
    done: list[int] = []
    moved: dict[int, int] = {}
    for stage in split.stages:
        if later := [v for v in done if v > stage[0]]:
            moved.setdefault(min(later), stage[0])
        done += stage
    found = [f"{pieces.name(v)!r} before {pieces.name(u)!r}" for v, u in moved.items()]
    more = f" and {len(found) - _MOST_HINTS} more" if len(found) > _MOST_HINTS else ""
    return ", ".join(found[:_MOST_HINTS]) + more


@final
class StepPieces:
    """Turn a step into a graph of pieces, each from one place to the next.

    Args:
        starts: paths of the places where stages begin. [none]
    """

    def __init__(self, points: CutPoints, starts: Sequence[str] = ()) -> None:
        self.begins = points.pieces(starts)
        self._points = points
        self._survey = points.survey
        self._ticks = [p.tick for p in self.begins]
        self._bounds = [*pairwise([0, *self._ticks, points.survey.end + 1])]

    def number(self, tick: int) -> int:
        """Return the number of the piece that a tick lies in."""
        return bisect_right(self._ticks, tick)

    def name(self, number: int) -> str:
        if number:
            return self.begins[number - 1].path
        calls = (c for c in self._survey.calls if c.is_unit and self.number(c.end) == 0)
        return next((c.path for c in calls), "the first call")

    def ends(self, starts: Sequence[str]) -> list[int]:
        """Return what has run when each stage ends, as bit masks of pieces."""
        paths = [p.path for p in self.begins]
        return [(1 << n) - 1 for n in (*(paths.index(s) + 1 for s in starts), len(paths) + 1)]

    def graph(self, demands: Demands) -> CostGraph:
        """Return what pieces take, send and wait for."""
        time_at = self._points.time_at
        return CostGraph(
            seconds=tuple(demands.compute_s(time_at(b) - time_at(a)) for a, b in self._bounds),
            tensors=tuple(self._tensors()),
            keeps=tuple(sorted({pair for ticks in self._in_turn() for pair in self._row(ticks)})),
            network=demands.network,
        )

    def _tensors(self) -> Iterator[GraphTensor]:
        """Yield what pieces hand to later ones: as for a place, if later stages lack it there."""
        is_ghost = self._points.obstacles.is_ghost
        for k, value in enumerate(self._survey.values):
            if value.made is None or not value.uses:
                continue
            between = slice(self.number(value.made.tick), self.number(value.uses[-1].tick))
            crossed = (p for p in self.begins[between] if is_ghost(k, p.tick, p.split))
            if (first := next(crossed, None)) is not None:
                users = {self.number(u.tick) for u in value.uses if u.tick > first.tick}
                maker = self.number(first.tick) - 1
                yield GraphTensor(self._points.sent_bytes(k), maker, tuple(sorted(users)))

    def _in_turn(self) -> Iterator[Iterable[int]]:
        """Yield ticks whose order must stay: of uses of what is shared, or changed in place."""
        for held in self._survey.parameters.values():
            yield (use.tick for use in held.uses)
        yield from self._survey.metrics.values()
        edited = {edit.storage for edit in self._survey.edits}
        touched: defaultdict[int, set[int]] = defaultdict(set)
        for value in self._survey.values:
            if value.storage in edited:
                touched[value.storage] |= {u.tick for u in (value.made, *value.uses) if u}
        yield from touched.values()

    def _row(self, ticks: Iterable[int]) -> Iterator[tuple[int, int]]:
        return pairwise(sorted({self.number(tick) for tick in ticks}))
