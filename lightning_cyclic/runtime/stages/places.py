"""Places: the module calls at which a stage may begin, and what each would cost.

A place is the first call of a module, once parameters have been used. Modules that begin with
nothing between them are one place with several names:

    h.3, h.3.ln_1 | h.3.attn, h.3.attn.c_attn | h.3.attn.c_proj | ...

Those that a user names are checked, and where one cannot be, the nearest that can is named.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, NoReturn, TypeAlias, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.stages.activations import Activations
from lightning_cyclic.runtime.stages.evidence import Call, Survey
from lightning_cyclic.runtime.stages.obstacles import Obstacle, Obstacles, Split
from lightning_cyclic.runtime.torch_functions import NO_LINE

Balance: TypeAlias = Literal["time", "activations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Hold one place.

    Args:
        path: the module whose first call is the place; the outermost with parameters.
        before_ns: computing time before it.
        crossing_bytes: of the tensors that earlier stages make and later ones use.
        split: the modules whose calls are under way.
        obstacles: what stands against a stage that begins there.
        has_parameters: a module that begins there has some; others only begin a stage by name.
    """

    path: str
    names: tuple[str, ...]
    tick: int
    before_ns: int
    crossing_bytes: int
    split: Split
    obstacles: tuple[Obstacle, ...]
    has_parameters: bool

    @property
    def is_possible(self) -> bool:
        """Say whether a stage can begin there, other stages aside."""
        return not any(o.is_hard for o in self.obstacles)


def split_by(places: Sequence[Place]) -> Split:
    """Return the modules within whose calls places lie."""
    return frozenset[str]().union(*(p.split for p in places))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Hold what one stage has to do and to keep.

    Args:
        compute_ns: of its forward, for the surveyed micro-batch.
        activation_bytes: of what it makes and keeps for its backward; of all that it makes, where
            nobody knows.
        crossing_bytes: of those that it receives from earlier stages.
        adopted_bytes: of what these have made, and it is the first to keep: an activation, too, on
            the worker that has made it.
    """

    compute_ns: int
    parameter_bytes: int
    activation_bytes: int
    crossing_bytes: int = 0
    adopted_bytes: int = 0


_BARE = Obstacle(
    kind="bare", reason="a stage from here on would use no parameter first", line=NO_LINE
)


@final
class CutPoints:
    """Hold the places of a survey, and answer what lies before, between and at them.

    Args:
        balance: what stages are to have equal parts of. Counted times and bytes of activations
            are the same in every run; measured times differ a little.
    """

    def __init__(self, survey: Survey, balance: Balance = "time") -> None:
        self.survey = survey
        self._balance = balance
        self.obstacles = Obstacles(survey)
        held = survey.parameters.values()
        self._first_uses = sorted(h.uses[0].tick for h in held if h.uses)
        self._last_use = max((h.uses[-1].tick for h in held if h.uses), default=0)
        self._uses = [
            (h.num_bytes, [u.tick for u in survey.uses_beside(name)])
            for name, h in survey.parameters.items()
        ]
        self._activations = Activations(survey)
        self._alive = sorted(
            (v.made.tick, v.uses[-1].tick, k)
            for k, v in enumerate(survey.values)
            if v.made is not None and v.uses
        )
        self._call_ticks = sorted(t for c in survey.calls for t in (c.begin, c.end))
        self.places = tuple(self._find())

    @property
    def possible(self) -> list[Place]:
        return [p for p in self.places if p.is_possible and p.has_parameters]

    def pieces(self, starts: Sequence[str] = ()) -> list[Place]:
        """Return where the smallest stages begin, each with a parameter that it uses first.

        Places that would share a module among stages are used only where there are no others.

        Args:
            starts: paths of places where stages do begin: they are taken before others. [none]
        """
        clean = [p for p in self.possible if not p.obstacles]
        is_enough = bool(clean) and {*starts} <= {p.path for p in clean}
        kept: list[Place] = []
        for place in clean if is_enough else self.possible:
            before = self.first_uses_before(kept[-1].tick) if kept else 0
            if self.first_uses_before(place.tick) > before:
                kept.append(place)
            elif place.path in starts:
                kept[-1] = place
        return kept

    def clash(self, places: Sequence[Place]) -> bool:
        """Say whether stages cannot begin at all of some places at once."""
        split = split_by(places)
        return any(o.is_hard for p in places for o in self.obstacles.against(p.tick, split))

    def at(self, path: str) -> Place | None:
        """Return the place with a name, seen as that module's; None if it is never called."""
        call = next((c for c in self.survey.calls if c.path == path and c.n == 0), None)
        if call is None:
            return None
        names = next((p.names for p in self.places if path in p.names), (path,))
        return self._place(call, names, call.is_unit)

    def first_uses_before(self, tick: int) -> int:
        """Return how many parameters are used before a tick."""
        return bisect_left(self._first_uses, tick)

    def load(self, begin: int, end: int, crossing_bytes: int = 0) -> Load:
        """Return the load of a stage from one tick (0: the step's begin) to another."""
        return Load(
            compute_ns=self.time_at(end) - self.time_at(begin),
            parameter_bytes=self.parameter_bytes(begin, end),
            activation_bytes=self._activations.between(begin, end),
            crossing_bytes=crossing_bytes,
            adopted_bytes=self._activations.adopted(begin, end),
        )

    def weight_before(self, tick: int) -> int:
        """Return how much lies before a tick of what stages are to have equal parts of."""
        if self._balance == "activations":
            return self._activations.before(tick)
        return self.time_at(tick)

    def kept_bytes(self, begin: int, end: int) -> int:
        """Return the bytes of parameters and activations of a stage."""
        return self.parameter_bytes(begin, end) + self._activations.between(begin, end)

    def time_at(self, tick: int) -> int:
        """Return when a call began, in ns; the step's duration where none did any more."""
        if tick <= 0:
            return 0
        k = bisect_left(self.survey.calls, tick, key=lambda c: c.begin)
        calls = self.survey.calls
        return calls[k].begin_ns if k < len(calls) else self.survey.duration_ns

    def parameter_bytes(self, begin: int, end: int) -> int:
        """Return the bytes of the parameters used; the unused are where those beside them are."""
        return sum(
            size
            for size, ticks in self._uses
            if bisect_left(ticks, end) > bisect_left(ticks, begin) or (begin <= 0 and not ticks)
        )

    # ------------------------------------------------------------------ places

    def _find(self) -> Iterator[Place]:
        group: list[Call] = []
        for call in self._candidates():
            if group and self._between(group[-1].begin, call.begin):
                yield self._grouped(group)
                group = []
            group.append(call)
        if group:
            yield self._grouped(group)

    def _candidates(self) -> Iterator[Call]:
        begin = self._first_uses[0] if self._first_uses else self.survey.end
        for call in self.survey.calls:
            is_first = call.n == 0 and call.path != "" and not self.survey.in_metric(call.path)
            if is_first and begin < call.begin <= self._last_use:
                yield call

    def _between(self, begin: int, end: int) -> bool:
        """Say whether a torch function ran between two ticks."""
        ticks = self._call_ticks
        return end - begin - 1 > bisect_left(ticks, end) - bisect_right(ticks, begin)

    def _grouped(self, calls: list[Call]) -> Place:
        shown = next((c for c in calls if c.is_unit), calls[0])
        return self._place(shown, tuple(c.path for c in calls), any(c.is_unit for c in calls))

    def _place(self, call: Call, names: tuple[str, ...], has_parameters: bool) -> Place:
        around = self.survey.around(call.parent)
        split = frozenset(c.path for c in around if c.path)
        split = self.obstacles.opened(call.begin, split)
        own = self.first_uses_before(call.begin) < len(self._first_uses)
        return Place(
            path=call.path,
            names=names,
            tick=call.begin,
            before_ns=call.begin_ns,
            crossing_bytes=self._crossing_bytes(call.begin, split),
            split=split,
            obstacles=(() if own else (_BARE,)) + self.obstacles.against(call.begin, split),
            has_parameters=has_parameters,
        )

    def _crossing_bytes(self, tick: int, split: Split) -> int:
        """Count what crosses: all that any later stage uses, passed on from stage to stage."""
        return sum(
            self.sent_bytes(k)
            for made, last, k in self._alive[: bisect_right(self._alive, (tick,))]
            if made < tick <= last and self.obstacles.is_ghost(k, tick, split)
        )

    def sent_bytes(self, value: int) -> int:
        """Return the bytes of a tensor on its way: views travel apart, expanded ones unexpanded.

        So it is with activations. A gradient has the strides that autograd gives it, and what lies
        between its elements travels with them, so that it may take up to twice as long (behind a
        ``cat``); or there is none. A survey, which runs without gradients, cannot know.
        """
        found = self.survey.values[value]
        return min(found.num_bytes, self.survey.storages[found.storage].num_bytes)


_MOST_REASONS = 3


def named_places(points: CutPoints, paths: Sequence[str]) -> list[Place]:
    """Return the places that begin the stages 1, 2, ..., as named.

    Raises:
        PlanError: a path that is no module or is not called, in the wrong order, a stage without
            parameters, or a place where no stage can begin.
    """
    places = [_find(points, path) for path in paths]
    _check_order(places)
    _check_parameters(points, places)
    split = split_by(places)
    for k, place in enumerate(places):
        hard = [o for o in points.obstacles.against(place.tick, split) if o.is_hard]
        if hard:
            _refuse(points, places, k, _reasons(hard))
    return places


def paste(paths: Sequence[str]) -> str:
    """Write paths as the argument that the strategy takes.

    Example:
        >>> paste(["h.1", "h.2"])
        'stages=["h.1", "h.2"]'
        >>> paste([])
        'stages=1'
    """
    return f"stages={_listed(paths) if paths else 1}"


def _listed(paths: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{path}"' for path in paths) + "]"


def _reasons(obstacles: Sequence[Obstacle]) -> str:
    texts = [f"{o.reason}, at {o.line}" for o in obstacles]
    more = len(texts) - _MOST_REASONS
    return "; and ".join(texts[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")


def _find(points: CutPoints, path: str) -> Place:
    path = points.survey.aliases.get(path, path)
    place = points.at(path) if path else None
    if place is not None:
        return place
    if path in points.survey.modules and path:
        raise PlanError(
            f"stages names {path!r}, a module that the step does not call; allowed: "
            f"{_some(points)}; name modules that are called, or give a number"
        )
    close = get_close_matches(path, points.survey.modules, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "name some of these, or give a number"
    raise PlanError(
        f"stages names {path!r}, which is no module of {points.survey.title}; allowed: "
        f"{_some(points)}; {hint}"
    )


def _some(points: CutPoints) -> str:
    paths = [p.path for p in points.possible]
    shown = ", ".join(paths[:8]) or "none"
    return shown + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")


def _check_order(places: Sequence[Place]) -> None:
    in_order = sorted(places, key=lambda p: p.tick)
    paths = [p.path for p in places]
    if [p.path for p in in_order] != paths or len(set(paths)) != len(paths):
        once = list(dict.fromkeys(p.path for p in in_order))
        raise PlanError(
            f"stages={_listed(paths)} do not begin one after the other; allowed: the order of "
            f"their first calls, each once; use {paste(once)}"
        )


def _check_parameters(points: CutPoints, places: Sequence[Place]) -> None:
    ticks = [0, *(p.tick for p in places), points.survey.end + 1]
    counts = [points.first_uses_before(tick) for tick in ticks]
    for j in range(len(counts) - 1):
        if counts[j] == counts[j + 1]:
            begin = f"from {places[j - 1].path!r}" if j else "from the step's beginning"
            end = f"to {places[j].path!r}" if j < len(places) else "to the end"
            reason = f"stage {j}, {begin} {end}, would be without parameters of its own"
            _refuse(points, places, min(j, len(places) - 1), reason)


def _refuse(points: CutPoints, places: Sequence[Place], k: int, reason: str) -> NoReturn:
    nearest = _nearest(points, places, k)
    if nearest is None:
        allowed, hint = "no place between its neighbours", "leave it out, or give a number"
    else:
        mended = [nearest.path if n == k else p.path for n, p in enumerate(places)]
        allowed, hint = f"the nearest place is {nearest.path!r}", f"use {paste(mended)}"
    raise PlanError(
        f"stage {k + 1} cannot begin at {places[k].path!r}: {reason}; allowed: {allowed}; {hint}"
    )


def _nearest(points: CutPoints, places: Sequence[Place], k: int) -> Place | None:
    """Return the place, nearest in time, that works in the k-th's stead beside the others."""
    found = [p for p in points.possible if _fits(points, [*places[:k], p, *places[k + 1 :]], k)]
    wanted = places[k].before_ns
    return min(found, key=lambda p: abs(p.before_ns - wanted), default=None)


def _fits(points: CutPoints, places: Sequence[Place], k: int) -> bool:
    """Say whether the k-th place works, with a parameter on both sides."""
    ticks = [0, *(p.tick for p in places), points.survey.end + 1]
    counts = [points.first_uses_before(tick) for tick in ticks[k : k + 3]]
    in_order = ticks[k] < ticks[k + 1] < ticks[k + 2] and counts[0] < counts[1] < counts[2]
    split = split_by(places)
    against = points.obstacles.against(places[k].tick, split)
    return in_order and not any(o.is_hard for o in against)
