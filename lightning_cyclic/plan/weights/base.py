"""What a weight rule is: which version a forward and a backward read.

A rule sees two numbers only: the step, and the newest version that exists in the timetable at
that moment. So rules know nothing of schedules, and a new schedule needs no new rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class AbstractWeights(ABC):
    """Say which version F and B of step t read, given the newest one there is."""

    at_end_of_step: ClassVar[bool] = False
    """Whether an update is made as soon as its step has ended, not when it is first read."""
    per_micro: ClassVar[bool] = False
    """Whether the published rule updates after each micro-batch, of which there is one."""
    needs_previous: ClassVar[bool] = False
    """Whether version t-1 must exist wherever step t reads: of few micro-batches it does not."""
    looks_ahead: ClassVar[bool] = False
    """Whether a backward reads the newest version, not the one that its forward read."""
    for_replicas: ClassVar[bool] = True
    """Whether the rule makes sense where every worker holds every stage."""

    @abstractmethod
    def forward(self, t: int, newest: int) -> int:
        """Give the version that a forward of step t reads.

        Args:
            t: training step.
            newest: updates of this stage that exist when the forward starts, slack included.
        """
