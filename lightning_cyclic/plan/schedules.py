"""What a schedule is: the time of each forward and backward, and nothing else.

Times are integers of ticks (see :mod:`lightning_cyclic.plan.clock`); a slot has ``unit`` of them.
Steps repeat: step t is step 0 moved by ``t * period`` ticks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import final

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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lockstep(AbstractSchedule):
    """Run F(i, j) at slot j and B(i, j) at slot 2S-1-j, for every i at once.

    Two workers, two stages:

        slot   0   1   2   3
        w0   0F0 1F0 1B0 0B0
        w1   0F1 1F1 1B1 0B1
    """

    @property
    def period(self) -> int:
        """Ticks per step: one forward and one backward of all stages."""
        return 2 * self.num_stages

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        return j

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return 2 * self.num_stages - 1 - j


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cyclic(AbstractSchedule):
    """Run F(i, j) at slot d*i + j and B(i, j) at slot d*i + 2S-1-j, with d = ``spacing``.

    On workers that run whole micro-batches, the delay is 2S/N slots, so that nobody ever idles:

        slot   0   1   2   3   4   5   6   7   8   9
        w0   0F0 1F0 1B0 0B0 0F0 1F0 1B0 0B0
        w1     .   . 0F1 1F1 1B1 0B1 0F1 1F1 1B1 0B1

    On workers that run a stage each, it is two slots, and the same timetable is 1F1B without a
    flush:

        slot   0   1   2   3   4   5   6   7   8   9
        w0   0F0   . 0F1 0B0 0F0 0B1 0F1 0B0   . 0B1
        w1     . 1F0 1B0 1F1 1B1 1F0 1B0 1F1 1B1

    Source: Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep
        Neural Networks", https://arxiv.org/abs/2403.08837.
    """

    @property
    def unit(self) -> int:
        """Ticks per slot: the denominator of the delay, so that all times are integers."""
        return self.spacing.denominator

    @property
    def period(self) -> int:
        """Ticks per step: the next step starts one delay after the last micro-batch."""
        return self.spacing.numerator * self.num_microbatches

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        return self.spacing.numerator * i + self.unit * j

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return self.spacing.numerator * i + self.unit * (2 * self.num_stages - 1 - j)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GPipe(AbstractSchedule):
    """Run F(i, j) at slot i+j and B(i, j) at slot (m+S-1) + i + (S-1-j).

    Three micro-batches on two pipelined stages:

        slot   0   1   2   3   4   5   6   7
        w0   0F0 0F1 0F2   .   . 0B0 0B1 0B2
        w1     . 1F0 1F1 1F2 1B0 1B1 1B2   .

    Backwards run in micro-batch order, as sums of gradients are added in that order.

    Source: Huang et al., "GPipe", https://arxiv.org/abs/1811.06965.
    """

    @property
    def period(self) -> int:
        """Ticks per step: two diagonals of m+S-1 slots."""
        return 2 * (self.num_microbatches + self.num_stages - 1)

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        return i + j

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return self.period // 2 + i + self.num_stages - 1 - j


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OneFOneB(AbstractSchedule):
    """Run min(S-1-j, m) warm-up forwards as early as possible, the others as cyclic does.

    Three micro-batches on two pipelined stages, in as many slots as GPipe, but fewer in flight:

        slot   0   1   2   3   4   5   6   7
        w0   0F0 0F1   . 0B0 0F2 0B1   . 0B2
        w1     . 1F0 1B0 1F1 1B1 1F2 1B2   .

    The first forward after the warm-up waits for nothing either, so it is early as well.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", section 2
        (PipeDream-Flush), https://arxiv.org/abs/2006.09503.
    """

    @property
    def period(self) -> int:
        """Ticks per step: that of GPipe, as only the order differs."""
        return 2 * (self.num_microbatches + self.num_stages - 1)

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        is_warm_up = i <= self.num_stages - 1 - j
        return i + j if is_warm_up else 2 * i + j

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return 2 * i + 2 * self.num_stages - 1 - j


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wide(AbstractAround):
    """Run micro-batch i when the schedule of one replica runs its micro-batch i // replicas.

    Four micro-batches of 1F1B on two replicas (workers 0, 1 and 2, 3) of two stages:

        slot   0   1   2   3   4   5
        w0   0F0 0F2   . 0B0   . 0B2
        w1     . 1F0 1B0 1F2 1B2   .
        w2   0F1 0F3   . 0B1   . 0B3
        w3     . 1F1 1B1 1F3 1B3   .

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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InGroups(AbstractAround):
    """Run micro-batch i as the schedule of groups runs its micro-batch i // size.

    Four workers in two groups, one stage; a group takes the place that one worker has without
    groups:

        slot   0   1   2   3   4   5
        w0   0F0 0B0 0F0 0B0
        w1   0F1 0B1 0F1 0B1
        w2     . 0F2 0B2 0F2 0B2
        w3     . 0F3 0B3 0F3 0B3

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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds(AbstractAround):
    """Run micro-batch i as the schedule of one round runs its micro-batch i % N, i // N rounds on.

    Two rounds of the cyclic timetable, of two workers and one stage; the timetable runs on:

        slot   0   1   2   3   4   5
        w0   0F0 0B0 0F2 0B2
        w1     . 0F1 0B1 0F3 0B3

    In succession, a worker begins when the one before it comes to its last round, so that what the
    last round's forward leaves (module buffers) is there for the first of the next worker:

        slot   0   1   2   3   4   5   6   7
        w0   0F0 0B0 0F2 0B2
        w1     .   .   . 0F1 0B1 0F3 0B3

    Args:
        base: the schedule of one round, for N micro-batches.
        in_succession: whether workers wait for each other's rounds but the last.
    """

    in_succession: bool = False

    @property
    def period(self) -> int:
        """Ticks from the start of a step to the start of the next."""
        waits = self.base.num_microbatches if self.in_succession else 1
        return self.base.period + waits * self._more

    def forward(self, i: int, j: int) -> int:
        """Give the tick at which F(i, j) of step 0 starts."""
        return self._moved(i) + self.base.forward(i % self.base.num_microbatches, j)

    def backward(self, i: int, j: int) -> int:
        """Give the tick at which B(i, j) of step 0 starts."""
        return self._moved(i) + self.base.backward(i % self.base.num_microbatches, j)

    @property
    def _more(self) -> int:
        """Ticks from the first round of a worker to its last."""
        return (self.num_microbatches // self.base.num_microbatches - 1) * self.base.period

    def _moved(self, i: int) -> int:
        number, w = divmod(i, self.base.num_microbatches)
        return number * self.base.period + (w * self._more if self.in_succession else 0)
