"""Cut a row into parts whose dearest is as cheap as possible, whatever a part costs.

Where a part costs the sum of its units alone, :func:`balance` in ``partition.py`` is faster. Here
a part may also pay for what crosses its two ends, and may be forbidden by its place in the row:
the first stages of a pipeline keep more micro-batches than the last. ``ideals.py`` cuts graphs so,
whose parts may not begin at every earlier place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import TypeAlias

Pieces: TypeAlias = Callable[[int, int], Iterator[tuple[int, float, float]]]
"""From a part's number and the place where it ends to (the place where it begins, a floor of its
cost, its cost), the shortest part first; no longer part may have a lower floor."""
Fits: TypeAlias = Callable[[int, int, int], bool]
"""Whether part number p may be from a to b."""


def cut_row(
    count: int, parts: int, pieces: Pieces, *, fits: Fits | None = None
) -> list[int] | None:
    """Cut a row into non-empty parts, minimising the dearest, exactly.

    Of the cuts that reach the minimum, the one with the least sum of squared floors is taken, so
    that parts are even where the dearest leaves a choice. The time is O(parts * count^2) at most;
    floors cut it to about O(count^2 * log(parts)).

    Args:
        count: units of the row.
        parts: number of parts.
        pieces: what each part would cost.
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
        work: of each unit.
        crossing: time to send what crosses each place, before the first unit to behind the last.
    """

    def pieces(p: int, b: int) -> Iterator[tuple[int, float, float]]:
        total = 0.0
        for a in range(b - 1, -1, -1):
            total += work[a]
            yield a, total, max(total, crossing[a] + crossing[b])

    return pieces
