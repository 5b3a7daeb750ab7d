"""Lockstep: every micro-batch in the same slot, as in plain data parallelism.

Two workers, two stages:

    slot   0   1   2   3
    w0   0F0 1F0 1B0 0B0
    w1   0F1 1F1 1B1 0B1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lightning_cyclic.plan.schedules.base import AbstractSchedule


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lockstep(AbstractSchedule):
    """Run F(i, j) at slot j and B(i, j) at slot 2S-1-j, for every i at once."""

    @property
    def period(self) -> int:
        """Ticks per step: one forward and one backward of all stages."""
        return 2 * self.num_stages

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        return j

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return 2 * self.num_stages - 1 - j
