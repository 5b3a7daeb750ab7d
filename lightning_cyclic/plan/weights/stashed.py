"""stashed: read the newest version, keep it until the backward, however many that are.

With one update per micro-batch, micro-batch k reads max(0, k - (S-1-j)) on stage j, so stage j
keeps S-j versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from lightning_cyclic.plan.weights.base import AbstractWeights


@final
@dataclass(frozen=True, slots=True)
class Stashed(AbstractWeights):
    """Read the newest version that exists; the backward reads the same.

    Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
        SOSP 2019, section 3.3, https://doi.org/10.1145/3341301.3359646.
    """

    per_micro: ClassVar[bool] = True
    for_replicas: ClassVar[bool] = False

    def forward(self, t: int, newest: int) -> int:
        """Give the version that a forward of step t reads."""
        return min(t, newest)
