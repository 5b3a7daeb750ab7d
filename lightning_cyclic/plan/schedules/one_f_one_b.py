"""1F1B: warm-up forwards, then a forward and a backward in turn, then backwards, then a flush.

Three micro-batches on two pipelined stages, in as many slots as GPipe, but fewer in flight:

    slot   0   1   2   3   4   5   6   7
    w0   0F0 0F1   . 0B0 0F2 0B1   . 0B2
    w1     . 1F0 1B0 1F1 1B1 1F2 1B2   .
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lightning_cyclic.plan.schedules.base import AbstractSchedule


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OneFOneB(AbstractSchedule):
    """Run min(S-1-j, m) warm-up forwards as early as possible, the others as cyclic does.

    The first forward after the warm-up waits for nothing either, so it is early as well.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", section 2
        (PipeDream-Flush), https://arxiv.org/abs/2006.09503.
    """

    @property
    def period(self) -> int:
        """Ticks per step: that of GPipe, as only the order differs."""
        return 2 * (self.num_microbatches + self.num_stages - 1)

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        is_warm_up = i <= self.num_stages - 1 - j
        return i + j if is_warm_up else 2 * i + j

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return 2 * i + 2 * self.num_stages - 1 - j
