"""Cyclic with a flush: micro-batches one behind the other, and each step ends before the next.

Two workers that run whole micro-batches of two stages, one slot apart, so that a stage is used by
one of them after the other:

    slot   0   1   2   3   4   5   6   7   8   9
    w0   0F0 1F0 1B0 0B0   . 0F0 1F0 1B0 0B0   .
    w1     . 0F1 1F1 1B1 0B1   . 0F1 1F1 1B1 0B1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lightning_cyclic.plan.schedules.base import AbstractSchedule
from lightning_cyclic.plan.schedules.cyclic import Cyclic


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CyclicFlush(AbstractSchedule):
    """Run each step as the cyclic schedule does, and begin it when the one before has ended.

    Then every version exists before it is read, so that weights can be ``sync``.

    Source: WeiPipe, PPoPP 2025, https://github.com/Gvilenius/weipipe, where workers take turns
        with the weights of a stage.
    """

    @property
    def _cyclic(self) -> Cyclic:
        return Cyclic(num_stages=self.num_stages, num_micro=self.num_micro, spacing=self.spacing)

    @property
    def unit(self) -> int:
        """Ticks per slot: those of cyclic."""
        return self._cyclic.unit

    @property
    def period(self) -> int:
        """Ticks per step: whole slots until its last backward has ended."""
        return self._cyclic.whole

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        return self._cyclic.forward(i, j)

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return self._cyclic.backward(i, j)
