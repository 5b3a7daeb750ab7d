"""Cyclic: micro-batches one after the other, with a uniform delay and no flush.

On workers that run whole micro-batches, the delay is 2S/N slots, so that nobody ever idles:

    slot   0   1   2   3   4   5   6   7   8   9
    w0   0F0 1F0 1B0 0B0 0F0 1F0 1B0 0B0
    w1     .   . 0F1 1F1 1B1 0B1 0F1 1F1 1B1 0B1

On workers that run a stage each, it is two slots, and the same timetable is 1F1B without a flush:

    slot   0   1   2   3   4   5   6   7   8   9
    w0   0F0   . 0F1 0B0 0F0 0B1 0F1 0B0   . 0B1
    w1     . 1F0 1B0 1F1 1B1 1F0 1B0 1F1 1B1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lightning_cyclic.plan.schedules.base import AbstractSchedule


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cyclic(AbstractSchedule):
    """Run F(i, j) at slot d*i + j and B(i, j) at slot d*i + 2S-1-j, with d = ``spacing``.

    Source: Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep
        Neural Networks", https://arxiv.org/abs/2403.08837.
    """

    @property
    def unit(self) -> int:
        """Ticks per slot: the denominator of the delay, so that all times are integers."""
        return self.spacing.denominator

    @property
    def period(self) -> int:
        """Ticks per step: the next step starts one delay after the last micro-batch."""
        return self.spacing.numerator * self.num_microbatches

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        return self.spacing.numerator * i + self.unit * j

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return self.spacing.numerator * i + self.unit * (2 * self.num_stages - 1 - j)
