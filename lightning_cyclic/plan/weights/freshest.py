"""freshest: read version t where it exists already, else t-1; two versions at most.

On the cyclic timetable with S = N this is the mask of CDP-v2, i + j >= N-1:

            j=0  j=1  j=2
    i=0     t-1  t-1   t
    i=1     t-1   t    t
    i=2      t    t    t
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from lightning_cyclic.plan.weights.base import AbstractWeights


@final
@dataclass(frozen=True, slots=True)
class Freshest(AbstractWeights):
    """Read the newest version that exists, but none older than t-1.

    Slack makes versions appear later to their readers; the floor of t-1 keeps two versions, so a
    large slack is the delayed rule.

    Source: CDP-v2, https://arxiv.org/abs/2403.08837.
    """

    needs_previous: ClassVar[bool] = True

    def forward(self, t: int, newest: int) -> int:
        """Give the version that a forward of step t reads."""
        return min(t, max(newest, t - 1, 0))
