"""Jitter: steps and messages that take longer now and then, drawn from a seed.

What a worker's step, or a message, takes longer depends on the seed and its numbers alone, so
that a plan and the reference meet the very same slow steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random
from typing import final

from lightning_cyclic.errors import PlanError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Say how unsteady workers and links are.

    Args:
        compute: standard deviation of the logarithm of a worker's seconds per step; the mean is
            what it is without.
        stragglers: share of all workers' steps that are slow besides.
        slowdown: how many times as long a slow step takes.
        latency: how much longer a message takes in the mean, in latencies: exponentially
            distributed.
        seed: of all draws.

    Raises:
        PlanError: a number is out of its range.

    Example:
        >>> Jitter(stragglers=1.0, slowdown=3.0).of_step(0, 5)
        3.0
    """

    compute: float = 0.0
    stragglers: float = 0.0
    slowdown: float = 2.0
    latency: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        fits = 0 <= self.compute < inf and 0 <= self.latency < inf  # and no NaN
        if not (fits and 0 <= self.stragglers <= 1 and 1 <= self.slowdown < inf):
            raise PlanError(
                f"{self}; allowed: compute and latency from 0 on, stragglers from 0 to 1, "
                "slowdown from 1 on; use Jitter(compute=0.1, latency=1.0)"
            )

    def of_step(self, worker: int, t: int) -> float:
        """Return how many times as long a worker's compute of a step takes."""
        draws = Random(f"{self.seed}/step/{worker}/{t}")
        factor = draws.lognormvariate(-(self.compute**2) / 2, self.compute)
        return factor * (self.slowdown if draws.random() < self.stragglers else 1.0)

    def of_message(self, source: int, number: int) -> float:
        """Return how many latencies a message takes.

        Args:
            source: worker that sends it.
            number: of what it sends.
        """
        if self.latency == 0:
            return 1.0
        draws = Random(f"{self.seed}/message/{source}/{number}")
        return 1.0 + draws.expovariate(1.0) * self.latency
