"""How many bytes of activations stages keep, wherever they begin and end.

What earlier stages have made is no activation of a stage that keeps it: it was sent, and counts as
what the stage has received. What code makes of the batch alone, each stage's worker makes for
itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate
from typing import final

from lightning_cyclic.runtime.stages.evidence import Kept, Survey


@final
class Activations:
    def __init__(self, survey: Survey) -> None:
        self._kept = tuple(_all_made(survey)) if survey.kept is None else survey.kept
        self._first = _Row((x.saves[0], x.num_bytes) for x in self._kept)
        self._adopted, self._again = cache(self._adopted_from), cache(self._again_from)

    def before(self, tick: int) -> int:
        """Return what is kept first before a tick, whoever made it."""
        return self._first.before(tick)

    def between(self, begin: int, end: int) -> int:
        """Return what a stage from one tick (0: the step's begin) to another makes and keeps."""
        own = self.before(end) - self.before(begin) - self.adopted(begin, end)
        return own + self._again(begin).before(end)

    def adopted(self, begin: int, end: int) -> int:
        """Return what a stage is the first to keep, and earlier ones have made."""
        return self._adopted(begin).before(end)

    def _adopted_from(self, begin: int) -> _Row:
        return _Row(
            (x.saves[0], x.num_bytes)
            for x in self._kept
            if max(x.made, x.again_until) < begin <= x.saves[0]
        )

    def _again_from(self, begin: int) -> _Row:
        """Return what earlier stages keep of the batch, and when one that begins there does."""
        shared = (x for x in self._kept if x.saves[0] < begin <= x.again_until)
        return _Row(
            (x.saves[bisect_left(x.saves, begin)], x.num_bytes)
            for x in shared
            if x.saves[-1] >= begin
        )


class _Row:
    """Hold bytes by tick."""

    def __init__(self, each: Iterable[tuple[int, int]]) -> None:
        in_order = sorted(each)
        self._ticks = [tick for tick, _ in in_order]
        self._sums = [0, *accumulate(size for _, size in in_order)]

    def before(self, tick: int) -> int:
        return self._sums[bisect_left(self._ticks, tick)]


def _all_made(survey: Survey) -> Iterator[Kept]:
    """Yield all storages that the step makes, as if each were kept at once: nobody knows."""
    first: dict[int, int] = {}
    for v in survey.values:
        first.setdefault(v.storage, -1 if v.made is None else v.made.tick)
    for storage, tick in first.items():
        if tick >= 0:
            yield Kept(survey.storages[storage].num_bytes, tick, (tick,), 0)
