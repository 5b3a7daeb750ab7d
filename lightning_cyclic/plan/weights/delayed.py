"""delayed: step t reads version t-1 everywhere; the cheapest rule that never waits.

theta_{t+1} = theta_t - lr * opt(mean_i grad f_i(theta_{t-1}))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from lightning_cyclic.plan.weights.base import AbstractWeights


@final
@dataclass(frozen=True, slots=True)
class Delayed(AbstractWeights):
    """Read version t-1, or the first weights in step 0.

    Source: CDP-v1, https://arxiv.org/abs/2403.08837; PipeDream-2BW, section 3.1,
        https://arxiv.org/abs/2006.09503.
    """

    needs_previous: ClassVar[bool] = True

    def forward(self, t: int, newest: int) -> int:
        """Give the version that a forward of step t reads: max(t-1, 0)."""
        return max(t - 1, 0)
