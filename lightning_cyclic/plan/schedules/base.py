"""What a schedule is: the time of each forward and backward, and nothing else.

Times are integers of ticks (see :mod:`lightning_cyclic.plan.clock`); a slot has ``unit`` of them.
Steps repeat: step t is step 0 moved by ``t * period`` ticks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction

from lightning_cyclic.plan.clock import ceil_div

TWO_SLOTS = Fraction(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractSchedule(ABC):
    """Say at which time each F(i, j) and B(i, j) of a step starts.

    Args:
        num_stages: S.
        num_microbatches: m, micro-batches per step.
        spacing: slots between a micro-batch and the next, for schedules that stagger. [2]
    """

    num_stages: int
    num_microbatches: int
    spacing: Fraction = TWO_SLOTS

    @property
    def unit(self) -> int:
        """Ticks per slot."""
        return 1

    @property
    @abstractmethod
    def period(self) -> int:
        """Ticks from the start of a step to the start of the next."""

    @abstractmethod
    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""

    @abstractmethod
    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""

    @property
    def whole(self) -> int:
        """Ticks of a step that overlaps no other: whole slots until the last backward ends."""
        last = self.backward(self.num_microbatches - 1, 0)
        return (ceil_div(last, self.unit) + 1) * self.unit

    def begin(self, t: int) -> int:
        """Give the tick at which step t begins."""
        return t * self.period

    def begun(self, time: int) -> int:
        """Count the steps that have begun at a time."""
        return max(0, time // self.period + 1)

    def slot(self, t: int, ticks: int) -> int:
        """Round a time of step t up to whole slots."""
        return ceil_div(self.begin(t) + ticks, self.unit)

    def updates_before(self, t: int, start: int, j: int, slack: int = 0) -> int:
        """Count the updates of stage j that exist at a time in step t.

        Update u+1 exists as soon as the backward of the last micro-batch of step u has ended.

        Args:
            t: training step.
            start: ticks since the start of step t.
            j: stage.
            slack: slots that a version needs to reach its reader. [0]

        Returns:
            The newest version that can be read at that time, 0 at first.
        """
        ready = self.backward(self.num_microbatches - 1, j) + (1 + slack) * self.unit
        return self.begun(self.begin(t) + start - ready)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractAround(AbstractSchedule):
    """Change a schedule in part; what is not overridden stays the inner one's.

    Args:
        base: the inner schedule.
    """

    base: AbstractSchedule

    @property
    def unit(self) -> int:
        """Ticks per slot."""
        return self.base.unit

    @property
    def period(self) -> int:
        """Ticks from the start of a step to the start of the next."""
        return self.base.period

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        return self.base.forward(i, j)

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return self.base.backward(i, j)
