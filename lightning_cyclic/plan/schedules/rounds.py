"""Rounds: each worker runs several whole micro-batches in a step, one after the other.

Two rounds of the cyclic timetable, of two workers and one stage; the timetable runs on:

    slot   0   1   2   3   4   5
    w0   0F0 0B0 0F2 0B2
    w1     . 0F1 0B1 0F3 0B3

In succession, a worker begins when the one before it comes to its last round, so that what the
last round's forward leaves (module buffers) is there for the first of the next worker:

    slot   0   1   2   3   4   5   6   7
    w0   0F0 0B0 0F2 0B2
    w1     .   .   . 0F1 0B1 0F3 0B3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lightning_cyclic.plan.schedules.base import AbstractAround


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds(AbstractAround):
    """Run micro-batch i as the schedule of one round runs its micro-batch i % N, i // N rounds on.

    Args:
        base: the schedule of one round, for N micro-batches.
        in_succession: whether workers wait for each other's rounds but the last.
    """

    in_succession: bool = False

    @property
    def period(self) -> int:
        """Ticks from the start of a step to the start of the next."""
        waits = self.base.num_microbatches if self.in_succession else 1
        return self.base.period + waits * self._more

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        return self._moved(i) + self.base.forward(i % self.base.num_microbatches, j)

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return self._moved(i) + self.base.backward(i % self.base.num_microbatches, j)

    @property
    def _more(self) -> int:
        """Ticks from the first round of a worker to its last."""
        return (self.num_microbatches // self.base.num_microbatches - 1) * self.base.period

    def _moved(self, i: int) -> int:
        number, w = divmod(i, self.base.num_microbatches)
        return number * self.base.period + (w * self._more if self.in_succession else 0)
