"""The places that a user names: each checked, and where it cannot be, the nearest that can."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.stages.obstacles import Obstacle
from lightning_cyclic.runtime.stages.places import CutPoints, Place, split_by

_MOST_REASONS = 3


def named_places(points: CutPoints, paths: Sequence[str]) -> list[Place]:
    """Return the places that begin the stages 1, 2, ..., as named.

    Args:
        points: where stages can begin.
        paths: of modules, in the order of their first calls.

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
