"""The first axis: in which slot each forward and backward runs.

Times are integers of ticks (see :mod:`lightning_cyclic.plan.clock`); a slot has ``unit`` of them.
Steps repeat: step t is step 0 moved by ``t * period`` ticks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, final

from lightning_cyclic.plan.actions import Kind

TWO_SLOTS = Fraction(2)
_WHOLE, _SPLIT = (Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)


def ceil_div(ticks: int, unit: int) -> int:
    """Round a time up to whole slots.

    Example:
        >>> ceil_div(4, 3), ceil_div(6, 3), ceil_div(-1, 3)
        (2, 2, 0)
    """
    return -(-ticks // unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractSchedule(ABC):
    """Say at which time each F(i, j) and B(i, j) of a step starts, or I and W in place of B.

    Args:
        spacing: of schedules that stagger, slots between a micro-batch and the next.
        depth: of schedules that run several stages of a worker in turn, workers that have each
            stage once.
    """

    num_stages: int
    num_microbatches: int
    spacing: Fraction = TWO_SLOTS
    depth: int = 1

    placements: ClassVar[tuple[str, ...]] = ("pipelined", "single")
    """Names of those under which no worker has two actions where one fits."""
    shape: ClassVar[str] = "block"
    """How the stages of a pipeline lie on workers that have several (placement.Pipelined)."""
    stages_per_worker: ClassVar[int] = 1
    """Stages that a worker of a pipeline has where nobody says how many."""
    splits: ClassVar[bool] = False
    """Whether some backwards are split: into the gradient of the input, and of the weights."""

    @property
    def unit(self) -> int:
        """Ticks per slot."""
        return 1

    @property
    @abstractmethod
    def period(self) -> int:
        """Ticks from the start of a step to the start of the next."""

    @abstractmethod
    def start(self, kind: Kind, i: int, j: int) -> int:
        """Give the tick at which a cell of step 0 starts; I starts where a whole B would."""

    def is_split(self, i: int, j: int) -> bool:
        """Say whether the backward of a micro-batch on a stage is I and W, and not B."""
        return False

    def length(self, kind: Kind) -> int:
        """Give the ticks that a cell takes."""
        return self.unit

    def kinds(self, i: int, j: int) -> tuple[Kind, ...]:
        """List the cells of a micro-batch on a stage, in their order."""
        return _SPLIT if self.is_split(i, j) else _WHOLE

    def end(self, kind: Kind, i: int, j: int) -> int:
        return self.start(kind, i, j) + self.length(kind)

    def whole(self, j: int) -> int:
        """Give the tick at which the last gradient of a stage has been made: its sum is whole."""
        last = self.num_microbatches - 1
        return self.end(self.kinds(last, j)[-1], last, j)

    def misfit(self) -> str | None:
        """Say what is wrong with the numbers and what to do, or None where they fit."""
        return None

    def begin(self, t: int) -> int:
        return t * self.period

    def slot(self, t: int, ticks: int) -> int:
        return ceil_div(self.begin(t) + ticks, self.unit)

    def updates_before(self, t: int, start: int, j: int, slack: int = 0) -> int:
        """Count the updates of stage j that exist ``start`` ticks behind the begin of step t.

        Update u+1 exists as soon as the sum of gradients of step u is whole, and ``slack`` slots
        later for a reader to whom it has to travel.
        """
        ready = self.whole(j) + slack * self.unit
        return max(0, (self.begin(t) + start - ready) // self.period + 1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lockstep(AbstractSchedule):
    """Run every micro-batch in the same slots, as in plain data parallelism.

    Two workers, two stages:

        slot   0   1   2   3
        w0   0F0 1F0 1B0 0B0
        w1   0F1 1F1 1B1 0B1
    """

    placements: ClassVar[tuple[str, ...]] = ("replicated", "single")

    @property
    def period(self) -> int:
        return 2 * self.num_stages

    def start(self, kind: Kind, i: int, j: int) -> int:
        return j if kind is Kind.F else 2 * self.num_stages - 1 - j


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cyclic(AbstractSchedule):
    """Run F(i, j) at slot d*i + j, B(i, j) at slot d*i + 2S-1-j, d being ``spacing``; no flush.

    On workers that run whole micro-batches, the delay d is 2S/N slots, so that nobody ever idles:

        slot   0   1   2   3   4   5   6   7   8   9
        w0   0F0 1F0 1B0 0B0 0F0 1F0 1B0 0B0
        w1     .   . 0F1 1F1 1B1 0B1 0F1 1F1 1B1 0B1

    On workers that run a stage each, it is two slots, and this timetable is 1F1B without a flush:

        slot   0   1   2   3   4   5   6   7   8   9
        w0   0F0   . 0F1 0B0 0F0 0B1 0F1 0B0   . 0B1
        w1     . 1F0 1B0 1F1 1B1 1F0 1B0 1F1 1B1

    Source: Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep
        Neural Networks", https://arxiv.org/abs/2403.08837.
    """

    placements: ClassVar[tuple[str, ...]] = ("replicated", "pipelined", "shared", "single")

    @property
    def unit(self) -> int:
        return self.spacing.denominator  # so that all times are integers

    @property
    def period(self) -> int:
        return self.spacing.numerator * self.num_microbatches

    def start(self, kind: Kind, i: int, j: int) -> int:
        slots = j if kind is Kind.F else 2 * self.num_stages - 1 - j
        return self.spacing.numerator * i + self.unit * slots


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide(AbstractSchedule):
    """Run ``size`` neighbouring micro-batches in the slots of one micro-batch of ``base``.

    So run replicas of a pipeline. Four micro-batches of 1F1B on two (workers 0, 1 and 2, 3):

        slot   0   1   2   3   4   5
        w0   0F0 0F2   . 0B0   . 0B2
        w1     . 1F0 1B0 1F2 1B2   .
        w2   0F1 0F3   . 0B1   . 0B3
        w3     . 1F1 1B1 1F3 1B3   .

    And groups of workers, which are staggered. Four workers in two groups, one stage:

        slot   0   1   2   3   4   5
        w0   0F0 0B0 0F0 0B0
        w1   0F1 0B1 0F1 0B1
        w2     . 0F2 0B2 0F2 0B2
        w3     . 0F3 0B3 0F3 0B3
    """

    base: AbstractSchedule
    size: int

    @property
    def splits(self) -> bool:  # type: ignore[override]
        return self.base.splits

    @property
    def unit(self) -> int:
        return self.base.unit

    @property
    def period(self) -> int:
        return self.base.period

    def start(self, kind: Kind, i: int, j: int) -> int:
        return self.base.start(kind, i // self.size, j)

    def is_split(self, i: int, j: int) -> bool:
        return self.base.is_split(i // self.size, j)

    def length(self, kind: Kind) -> int:
        return self.base.length(kind)

    def misfit(self) -> str | None:
        return self.base.misfit()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds(AbstractSchedule):
    """Run micro-batch i as ``base``, of one round, runs its micro-batch i % N, i // N rounds on.

    Each worker runs several whole micro-batches in a step. Two rounds of the cyclic timetable, of
    two workers and one stage; the timetable runs on:

        slot   0   1   2   3   4   5
        w0   0F0 0B0 0F2 0B2
        w1     . 0F1 0B1 0F3 0B3

    In succession, a worker begins when the one before it comes to its last round, so that what the
    last round's forward leaves (module buffers) is there for the first of the next worker:

        slot   0   1   2   3   4   5   6   7
        w0   0F0 0B0 0F2 0B2
        w1     .   .   . 0F1 0B1 0F3 0B3
    """

    base: AbstractSchedule
    in_succession: bool

    @property
    def unit(self) -> int:
        return self.base.unit

    @property
    def period(self) -> int:
        waits = self.base.num_microbatches if self.in_succession else 1
        return self.base.period + waits * self._more

    def start(self, kind: Kind, i: int, j: int) -> int:
        return self._moved(i) + self.base.start(kind, i % self.base.num_microbatches, j)

    @property
    def _more(self) -> int:
        """Ticks from the first round of a worker to its last."""
        return (self.num_microbatches // self.base.num_microbatches - 1) * self.base.period

    def _moved(self, i: int) -> int:
        number, w = divmod(i, self.base.num_microbatches)
        return number * self.base.period + (w * self._more if self.in_succession else 0)
