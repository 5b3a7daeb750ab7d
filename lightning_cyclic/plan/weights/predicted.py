"""predicted: read a guess of the weights that the backward will find; the backward reads those.

The forward of micro-batch k starts from version v = max(0, k - (S-1-j)) and moves it s updates
along the optimizer's direction: W - lr * s * direction. s is the true number of updates between
this forward and its backward, min(k, S-1-j), so it grows during warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from lightning_cyclic.plan.weights.base import AbstractWeights


@final
@dataclass(frozen=True, slots=True)
class Predicted(AbstractWeights):
    """Predict from the newest version in the forward, read the newest in the backward.

    Source: PipeOptim, https://arxiv.org/abs/2312.00839; SpecTrain,
        https://arxiv.org/abs/1809.02839, which looks floor(j/2) + S-1-j updates ahead, and
        floor(j/2) in the backward.
    """

    looks_ahead: ClassVar[bool] = True
    per_micro: ClassVar[bool] = True
    for_replicas: ClassVar[bool] = False

    def forward(self, t: int, newest: int) -> int:
        """Give the version from which a forward of step t predicts."""
        return min(t, newest)
