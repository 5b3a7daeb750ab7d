"""Cut a row of weighted units into contiguous parts whose heaviest is as light as possible.

    weights   5 1 1 1 4 2          three parts:   5 | 1 1 1 | 4 2      the heaviest weighs 6
                                  start indices  0 | 1     | 4

Stages are such parts: the slowest stage sets the pace of all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import TypeAlias

from lightning_cyclic.errors import PlanError

Pieces: TypeAlias = Callable[[int, int], Iterator[tuple[int, float, float]]]
"""From a part's number and the place where it ends to (the place where it begins, a floor of its
cost, its cost), the shortest part first; no longer part may have a lower floor."""
Fits: TypeAlias = Callable[[int, int, int], bool]
"""Whether part number p may be from a to b."""


def balance(weights: Sequence[int], parts: int) -> list[int]:
    """Cut ``weights`` into ``parts`` contiguous, non-empty parts, minimising the heaviest.

    Among the cuts that reach the minimum, one with evenly filled parts is taken. The time is
    O(n + parts * log(n) * log(sum)), so ten thousand units cost milliseconds.

    Args:
        weights: weight of each unit (seconds in integer ticks, bytes, ...), each >= 0.

    Returns:
        The start index of each part; the first is 0.

    Raises:
        PlanError: if a part would be empty, ``parts`` is below 1 or a weight is negative.

    Example:
        >>> balance([5, 1, 1, 1, 4, 2], 3)
        [0, 1, 4]
    """
    _check(weights, parts)
    ends = [0, *accumulate(weights)]
    limit = _lightest_limit(ends, parts, heaviest=max(weights))
    earliest = _earliest_starts(ends, parts, limit)
    starts = [0]
    for part in range(1, parts):
        start, left = starts[-1], parts - part + 1
        low = max(earliest[part], start + 1)
        high = min(bisect_right(ends, ends[start] + limit) - 1, len(weights) - left + 1)
        fair = ends[start] + (ends[-1] - ends[start]) / left
        starts.append(min(max(_nearest(ends, fair), low), high))
    return starts


def _check(weights: Sequence[int], parts: int) -> None:
    if not 1 <= parts <= len(weights):
        raise PlanError(
            f"{len(weights)} units cannot be cut into {parts} non-empty parts; allowed: 1 to "
            f"{len(weights)}; use fewer stages or a module with more layers"
        )
    if min(weights) < 0:
        raise PlanError(
            f"weight {min(weights)} of a unit is negative; allowed: integers >= 0; "
            "give times or sizes"
        )


def _lightest_limit(ends: list[int], parts: int, heaviest: int) -> int:
    """Return the least limit under which ``parts`` parts suffice, by bisection."""
    low, high = max(heaviest, -(-ends[-1] // parts)), ends[-1]
    while low < high:
        middle = (low + high) // 2
        if _fits(ends, parts, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(ends: list[int], parts: int, limit: int) -> bool:
    """Say whether filling each part up to ``limit`` reaches the end."""
    start = 0
    for _ in range(parts):
        start = bisect_right(ends, ends[start] + limit) - 1
        if start == len(ends) - 1:
            return True
    return False


def _earliest_starts(ends: list[int], parts: int, limit: int) -> list[int]:
    """Return the least start of each part from which the rest still fits, filled from behind."""
    starts, start = [0] * parts, len(ends) - 1
    for part in range(parts - 1, -1, -1):
        start = max(min(bisect_left(ends, ends[start] - limit), start - 1), 0)
        starts[part] = start
    return starts


def _nearest(ends: list[int], target: float) -> int:
    right = min(bisect_left(ends, target), len(ends) - 1)
    return right - 1 if right and target - ends[right - 1] < ends[right] - target else right


def balance_between(
    ends: Sequence[int], parts: int, *, lows: Sequence[int], highs: Sequence[int]
) -> list[int] | None:
    """Cut a row into parts, minimising the heaviest, where not every part is allowed.

    The part before place ``b`` may begin at the places ``lows[b]`` to ``highs[b]`` only: not
    further away than memory allows, not so near that it would hold nothing. The time is
    O(places * parts * log(sum)).

    Args:
        ends: weight of all before each place; the first is 0, the last the sum of all.
        lows: first place where the part before each place may begin.

    Returns:
        The place where each part begins, the first is 0; None if there is no such cut.

    Example:
        >>> balance_between([0, 5, 6, 7, 8], 2, lows=[0] * 5, highs=[-1, 0, 1, 2, 3])
        [0, 1]
        >>> balance_between([0, 5, 6, 7, 8], 2, lows=[0] * 5, highs=[-1, -1, 0, 1, 2])
        [0, 2]
    """

    def reached(limit: int) -> list[list[bool]]:
        return _reached(ends, parts, limit, lows, highs)

    low, high = 0, ends[-1]
    if not reached(high)[parts][-1]:
        return None
    while low < high:
        middle = (low + high) // 2
        if reached(middle)[parts][-1]:
            high = middle
        else:
            low = middle + 1
    return _fairest(ends, reached(high), high, lows, highs)


def _reached(
    ends: Sequence[int], parts: int, limit: int, lows: Sequence[int], highs: Sequence[int]
) -> list[list[bool]]:
    """Say for each number of parts which places they can end at, none above the limit."""
    levels = [[True] + [False] * (len(ends) - 1)]
    for _ in range(parts):
        count = [0, *accumulate(levels[-1])]  # of places reached before each
        levels.append(
            [
                low <= high and count[high + 1] > count[low]
                for low, high in _windows(ends, limit, lows, highs)
            ]
        )
    return levels


def _windows(
    ends: Sequence[int], limit: int, lows: Sequence[int], highs: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the first and last place where the part before each place may begin."""
    return [
        (max(lows[b], bisect_left(ends, ends[b] - limit)), min(highs[b], b - 1))
        for b in range(len(ends))
    ]


def _fairest(
    ends: Sequence[int],
    levels: list[list[bool]],
    limit: int,
    lows: Sequence[int],
    highs: Sequence[int],
) -> list[int]:
    """Walk back from the end over reached places, each part as near to its share as can be."""
    windows = _windows(ends, limit, lows, highs)
    starts, b = [], len(ends) - 1
    for part in range(len(levels) - 2, -1, -1):
        share = ends[b] * part // (part + 1)
        low, high = windows[b]
        b = min(
            (a for a in range(low, high + 1) if levels[part][a]),
            key=lambda a: abs(ends[a] - share),
        )
        starts.append(b)
    return starts[::-1]


def cut_row(
    count: int, parts: int, pieces: Pieces, *, fits: Fits | None = None
) -> list[int] | None:
    """Cut a row into non-empty parts, minimising the dearest, exactly, whatever a part costs.

    Where a part costs the sum of its units alone, :func:`balance` is faster. Here it may also pay
    for what crosses its two ends, and may be forbidden by its place in the row: the first stages
    of a pipeline keep more micro-batches than the last.

    Of the cuts that reach the minimum, the one with the least sum of squared floors is taken, so
    that parts are even where the dearest leaves a choice. The time is O(parts * count^2) at most;
    floors cut it to about O(count^2 * log(parts)).

    Args:
        fits: which parts are allowed where. [all]

    Returns:
        The place where each part begins, the first is 0; None if there is no such cut.

    Example:
        >>> cut_row(5, 2, row_of([5, 1, 1, 1, 1], [0, 0, 9, 0, 0, 0]))
        [0, 1]
    """
    limit = _dearest(count, parts, pieces, fits)
    return None if limit == inf else _evenest(count, parts, pieces, fits, limit)


def _dearest(count: int, parts: int, pieces: Pieces, fits: Fits | None) -> float:
    """Return the cost of the dearest part of the best cut."""
    before = [0.0] + [inf] * count
    for p in range(parts):
        now = [inf] * (count + 1)
        for b in _ends(count, parts, p):
            for a, floor, cost in pieces(p, b):
                if floor >= now[b]:
                    break
                value = max(before[a], cost)
                if value < now[b] and (fits is None or fits(p, a, b)):
                    now[b] = value
        before = now
    return before[count]


def _evenest(count: int, parts: int, pieces: Pieces, fits: Fits | None, limit: float) -> list[int]:
    """Return, of the cuts without a part above a limit, the one with the most even floors."""
    before = [0.0] + [inf] * count
    origins: list[list[int]] = []
    for p in range(parts):
        now, origin = [inf] * (count + 1), [-1] * (count + 1)
        for b in _ends(count, parts, p):
            for a, floor, cost in pieces(p, b):
                if floor > limit:
                    break
                value = before[a] + floor * floor
                if value < now[b] and cost <= limit and (fits is None or fits(p, a, b)):
                    now[b], origin[b] = value, a
        before = now
        origins.append(origin)
    starts, b = [], count
    for origin in reversed(origins):
        b = origin[b]
        starts.append(b)
    return starts[::-1]


def _ends(count: int, parts: int, p: int) -> range:
    """Return where part p may end: those before and behind it are not empty."""
    return range(p + 1, count - (parts - 1 - p) + 1) if p < parts - 1 else range(count, count + 1)


def row_of(work: list[float], crossing: list[float]) -> Pieces:
    """Let a part cost its work or its transfers, whichever takes longer.

    Args:
        crossing: time to send what crosses each place, before the first unit to behind the last.
    """

    def pieces(p: int, b: int) -> Iterator[tuple[int, float, float]]:
        total = 0.0
        for a in range(b - 1, -1, -1):
            total += work[a]
            yield a, total, max(total, crossing[a] + crossing[b])

    return pieces
