"""Warm-up: first steps that do not overlap, so that every forward can read the newest weights.

One synchronous step, then the cyclic timetable, of two stages and two micro-batches:

    slot   0   1   2   3   4   5   6   7   8   9  10  11  12  13
    w0   0F0   . 0F1 0B0   . 0B1 0F0   . 0F1 0B0 0F0 0B1 0F1 0B0
    w1     . 1F0 1B0 1F1 1B1   .   . 1F0 1B0 1F1 1B1 1F0 1B0 1F1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lightning_cyclic.plan.schedules.base import AbstractAround


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp(AbstractAround):
    """Let each of the first steps end before the next begins, then follow a schedule.

    Args:
        base: the schedule behind the warm-up, and of each step within it.
        num_steps: how many steps do not overlap.

    Source: PipeMare, technique 3, https://arxiv.org/abs/1910.05124.
    """

    num_steps: int

    def begin(self, t: int) -> int:
        """Give the tick at which step t begins."""
        return min(t, self.num_steps) * self.whole + max(t - self.num_steps, 0) * self.period

    def begun(self, time: int) -> int:
        """Count the steps that have begun at a time."""
        late = time - self.num_steps * self.whole
        if late >= 0:
            return self.num_steps + late // self.period + 1
        return max(0, time // self.whole + 1)
