"""GPipe: all forwards, then all backwards, then a flush.

Three micro-batches on two pipelined stages:

    slot   0   1   2   3   4   5   6   7
    w0   0F0 0F1 0F2   .   . 0B0 0B1 0B2
    w1     . 1F0 1F1 1F2 1B0 1B1 1B2   .
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lightning_cyclic.plan.schedules.base import AbstractSchedule


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GPipe(AbstractSchedule):
    """Run F(i, j) at slot i+j and B(i, j) at slot (m+S-1) + i + (S-1-j).

    Backwards run in micro-batch order, as sums of gradients are added in that order.

    Source: Huang et al., "GPipe", https://arxiv.org/abs/1811.06965.
    """

    @property
    def period(self) -> int:
        """Ticks per step: two diagonals of m+S-1 slots."""
        return 2 * (self.num_microbatches + self.num_stages - 1)

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        return i + j

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return self.period // 2 + i + self.num_stages - 1 - j
