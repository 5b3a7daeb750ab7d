"""The weight watch: notice who changes weights while a step is under way, besides its updates.

    begin      note how often each weight was changed in place; in some steps, its bits as well
    changing   around what the package itself changes: what was before must be as noted
    end        all must be as noted

Several ranks have copies of a weight, or one rank several versions, and what the user's step, a
module or a hook changes reaches one of them. That gave other weights in silence.

The comparison of the first step does not look at weights, and sees no later step.

Counts cost nothing, and do not see what ``.data`` changes. Bits do, and reading them takes a look
at every weight: they are compared in steps 0, 1, 2, 4, 8, ... from the first on, so that whoever
begins to change weights in step t is found by step 2t.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.absent import is_absent
from lightning_cyclic.runtime.bits import sum_of_bits

_count = attrgetter("_version")
_is_trained = attrgetter("requires_grad")

Weights = Mapping[str, Tensor]
"""By name; also buffers that may not change."""


class _Noted(NamedTuple):
    """Hold what some weights were: what is absent has no bits; None where nobody looks."""

    counts: list[int]
    bits: list[Tensor | None] | None
    trained: list[bool]  # where freezing is noticed


@final
class WeightWatch:
    """Compare weights within one step.

    Args:
        may_freeze: whether weights may be frozen and unfrozen within a step.
    """

    def __init__(self, rank: int, *, may_freeze: bool = True) -> None:
        self._rank = rank
        self._may_freeze = may_freeze
        self._first: int | None = None
        self._t = 0
        self._looks = self._is_on = False
        self._groups: Sequence[Weights] = ()
        self._noted: list[_Noted] = []
        self._seen: list[tuple[str, Tensor, Tensor]] = []  # bits before and behind

    def begin(self, t: int, groups: Sequence[Weights]) -> None:
        """Note what weights are."""
        self._first = t if self._first is None else self._first
        since = t - self._first
        self._looks = since & (since - 1) == 0
        self._t, self._groups, self._seen = t, groups, []
        self._noted = list(map(self._note, groups))
        self._is_on = True

    @contextmanager
    def watching(self, t: int, groups: Sequence[Weights]) -> Iterator[None]:
        """Run the body, in which no weight may change.

        Raises:
            StepError: one has changed.
        """
        self.begin(t, groups)
        try:
            yield
        except RuntimeError:  # autograd says that something has changed, but not what
            self._is_on = False
            for k in range(len(groups)):
                self._check_counts(k)  # bits would take memory, of which there may be none
            raise
        self.end()

    @contextmanager
    def changing(self, groups: Collection[int]) -> Iterator[None]:
        """Run the body, in which the package changes what weights of some groups are.

        Raises:
            StepError: somebody else has changed one of them before.
        """
        if not self._is_on:
            yield
            return
        for k in groups:
            self._check(k)
        yield
        for k in groups:
            self._noted[k] = self._note(self._groups[k])

    def end(self) -> None:
        """Check all weights, and watch no longer.

        Raises:
            StepError: one has changed.
        """
        if not self._is_on:
            return
        self._is_on = False
        for k in range(len(self._groups)):
            self._check(k)
        self._check_seen()
        self._noted, self._groups = [], ()

    def _note(self, group: Weights) -> _Noted:
        weights = group.values()
        counts, bits = list(map(_count, weights)), self._bits(group) if self._looks else None
        return _Noted(counts, bits, [] if self._may_freeze else list(map(_is_trained, weights)))

    def _bits(self, group: Weights) -> list[Tensor | None]:
        return [None if is_absent(p) else sum_of_bits(p) for p in group.values()]

    def _check(self, k: int) -> None:
        self._check_counts(k)
        group, bits = self._groups[k], self._noted[k].bits
        if bits is not None:
            each = zip(group, bits, self._bits(group), strict=True)
            self._seen += [(n, a, b) for n, a, b in each if a is not None and b is not None]

    def _check_counts(self, k: int) -> None:
        group, before = self._groups[k], self._noted[k]
        counts = list(map(_count, group.values()))
        if counts != before.counts:
            raise self._changed(_differing(group, counts, before.counts))
        trained = list(map(_is_trained, group.values())) if before.trained else []
        if trained != before.trained:
            raise StepError(
                f"parameter {_differing(group, trained, before.trained)!r} was frozen or unfrozen "
                f"on rank {self._rank} while step {self._t} was under way, but ranks run its "
                "stages at different times; allowed: between steps; do it in "
                "on_train_batch_start, or use strategy='1f1b'"
            )

    def _check_seen(self) -> None:
        """Compare all bits at once: a GPU is waited for once, in few steps."""
        seen, self._seen = self._seen, []
        if not seen:
            return
        names, before, behind = zip(*seen, strict=True)
        differ = torch.stack(before).ne(torch.stack(behind)).tolist()
        if True in differ:
            raise self._changed(names[differ.index(True)])

    def _changed(self, name: str) -> StepError:
        if any(name in w and isinstance(w[name], nn.Parameter) for w in self._groups):
            return changed_within(name, self._rank, self._t)
        return StepError(
            f"buffer {name!r} was changed in step {self._t} by code that several stages run, but "
            "not in the first micro-batch, which decides which stage has it; allowed: buffers "
            "that change from the first step on; change it in the first one, too"
        )


def changed_within(name: str, rank: int, t: int) -> StepError:
    """Make the error of a weight that was changed within step ``t``."""
    return StepError(
        f"parameter {name!r} was changed on rank {rank} while step {t} was under way, by "
        "training_step, a module that it calls, a hook or a callback, but ranks have several "
        "versions or copies of it, which the change does not reach; allowed: weights that the "
        "optimizer alone changes; change them in the optimizer's step(), keep what moves in a "
        "buffer, or use strategy='ddp'"
    )


def _differing(names: Iterable[str], now: Sequence[int], before: Sequence[int]) -> str:
    return next(n for n, a, b in zip(names, now, before, strict=True) if a != b)
