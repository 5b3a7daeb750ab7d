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
        https://arxiv.org/abs/1809.02839; XPipe, https://arxiv.org/abs/1911.04610.
    """

    looks_ahead: ClassVar[bool] = True
    per_micro: ClassVar[bool] = True
    for_replicas: ClassVar[bool] = False

    def forward(self, t: int, newest: int) -> int:
        """Give the version from which a forward of step t predicts."""
        return min(t, newest)

    def horizon(self, forward: int, backward: int) -> int:
        """Give s, the number of updates between a forward and its backward.

        Args:
            forward: the version that the forward starts from.
            backward: the version that the backward reads.
        """
        return backward - forward


@dataclass(frozen=True, slots=True)
class Horizons:
    """Say how many updates ahead a rule looks that does not stop at its own backward.

    SpecTrain predicts for the moment at which a micro-batch's round trip ends on stage 0, where
    all stages meet; it assumes that a forward takes as long as a backward. Its backward predicts,
    too. XPipe does so for steps of T micro-batches; at T = 1 both agree.

    Args:
        once_a_step: all micro-batches of a step read the guess of its first.

    Source: SpecTrain, https://arxiv.org/abs/1809.02839: floor(j/2) + S-1-j and floor(j/2).
        XPipe, https://arxiv.org/abs/1911.04610: (S + T - j/2 - 2) / T, rounded, and
        (T + floor(j/2) - 1) / T, rounded down; read in notes on the paper, where halves are
        left open: they are rounded down here, as SpecTrain's are at T = 1.
    """

    once_a_step: bool

    def forward(self, j: int, num_stages: int, num_micro: int) -> int:
        """Give the horizon of a forward on stage j."""
        if not self.once_a_step:
            return j // 2 + num_stages - 1 - j
        twice = 2 * (num_stages + num_micro - 2) - j
        return -((num_micro - twice) // (2 * num_micro))  # halves down, in whole numbers

    def backward(self, j: int, num_micro: int) -> int:
        """Give the horizon of a backward on stage j."""
        return (num_micro + j // 2 - 1) // num_micro if self.once_a_step else j // 2
