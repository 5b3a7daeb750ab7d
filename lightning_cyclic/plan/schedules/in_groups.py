"""In groups: workers of a group run in the same slots, and the groups are staggered.

Four workers in two groups, one stage; a group takes the place that one worker has without groups:

    slot   0   1   2   3   4   5
    w0   0F0 0B0 0F0 0B0
    w1   0F1 0B1 0F1 0B1
    w2     . 0F2 0B2 0F2 0B2
    w3     . 0F3 0B3 0F3 0B3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lightning_cyclic.plan.schedules.base import AbstractAround


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InGroups(AbstractAround):
    """Run micro-batch i as the schedule of groups runs its micro-batch i // size.

    Args:
        base: the schedule of as many micro-batches as there are groups.
        size: micro-batches of a group.
    """

    size: int

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        return self.base.forward(i // self.size, j)

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return self.base.backward(i // self.size, j)
