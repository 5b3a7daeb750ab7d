"""Wide: several replicas of a pipeline, each with every replicas-th micro-batch, side by side.

Four micro-batches of 1F1B on two replicas (workers 0, 1 and 2, 3) of two stages:

    slot   0   1   2   3   4   5
    w0   0F0 0F2   . 0B0   . 0B2
    w1     . 1F0 1B0 1F2 1B2   .
    w2   0F1 0F3   . 0B1   . 0B3
    w3     . 1F1 1B1 1F3 1B3   .
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lightning_cyclic.plan.schedules.base import AbstractAround


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wide(AbstractAround):
    """Run micro-batch i when the schedule of one replica runs its micro-batch i // replicas.

    Args:
        base: the schedule of one replica, for ``num_microbatches / replicas`` micro-batches.
        replicas: replicas.
    """

    replicas: int

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        return self.base.forward(i // self.replicas, j)

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return self.base.backward(i // self.replicas, j)
