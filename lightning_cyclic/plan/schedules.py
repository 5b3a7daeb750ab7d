"""The first axis: in which slot each forward and backward runs.

Times are integers of ticks (see :mod:`lightning_cyclic.plan.clock`); a slot has ``unit`` of them.
Steps repeat: step t is step 0 moved by ``t * period`` ticks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import chain
from typing import ClassVar, TypeVar, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.clock import ceil_div

TWO_SLOTS = Fraction(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractSchedule(ABC):
    """Say at which time each F(i, j) and B(i, j) of a step starts.

    Args:
        spacing: of schedules that stagger, slots between a micro-batch and the next.
        depth: of schedules that run several stages of a worker in turn, workers that have each
            stage once.
    """

    num_stages: int
    num_microbatches: int
    spacing: Fraction = TWO_SLOTS
    depth: int = 1

    shape: ClassVar[str] = "block"
    """How the stages of a pipeline lie on workers that have several (placement.Pipelined)."""
    stages_per_worker: ClassVar[int] = 1
    """Stages that a worker of a pipeline has where nobody says how many."""

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

    def begin(self, t: int) -> int:
        return t * self.period

    def slot(self, t: int, ticks: int) -> int:
        return ceil_div(self.begin(t) + ticks, self.unit)

    def updates_before(self, t: int, start: int, j: int, slack: int = 0) -> int:
        """Count the updates of stage j that exist ``start`` ticks behind the begin of step t.

        Update u+1 exists as soon as the backward of the last micro-batch of step u has ended, and
        ``slack`` slots later for a reader to whom it has to travel.
        """
        ready = self.backward(self.num_microbatches - 1, j) + (1 + slack) * self.unit
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

    @property
    def period(self) -> int:
        return 2 * self.num_stages

    def forward(self, i: int, j: int) -> int:
        return j

    def backward(self, i: int, j: int) -> int:
        return 2 * self.num_stages - 1 - j


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

    @property
    def unit(self) -> int:
        return self.spacing.denominator  # so that all times are integers

    @property
    def period(self) -> int:
        return self.spacing.numerator * self.num_microbatches

    def forward(self, i: int, j: int) -> int:
        return self.spacing.numerator * i + self.unit * j

    def backward(self, i: int, j: int) -> int:
        return self.spacing.numerator * i + self.unit * (2 * self.num_stages - 1 - j)


@dataclass(frozen=True, kw_only=True)  # no slots: the times are cached in __dict__
class AbstractOrder(AbstractSchedule):
    """Run cells in an order, each as soon as it can; then a flush.

    So every schedule with a flush is some lists of cells, and one longest path gives their times.
    A cell is a number, as there may be millions: first all forwards, micro-batch by micro-batch
    and in each of them stage by stage, then all backwards in the same order.
    """

    @abstractmethod
    def orders(self) -> Iterator[Sequence[int]]:
        """Yield lists of cells, each of which is run one after the other."""

    @property
    def period(self) -> int:
        return self._times[1]

    def forward(self, i: int, j: int) -> int:
        return self._times[0][i * self.num_stages + j]

    def backward(self, i: int, j: int) -> int:
        return self._times[0][(self.num_microbatches + i) * self.num_stages + j]

    @cached_property
    def _times(self) -> tuple[list[int], int]:
        return _timed(self)

    @property
    def _middle(self) -> int:
        """The first backward."""
        return self.num_microbatches * self.num_stages

    def _cells(self, j: int) -> tuple[Sequence[int], Sequence[int]]:
        """List the forwards and the backwards of a stage, in the order of micro-batches."""
        begin, step = self._middle, self.num_stages
        return range(j, begin, step), range(begin + j, 2 * begin, step)


@lru_cache(maxsize=32)  # plans that differ in other numbers look at the same times
def _timed(schedule: AbstractOrder) -> tuple[list[int], int]:
    """Return the start of each cell, and the slots of a step."""
    starts = longest_path(list(schedule.orders()), schedule.num_stages, schedule.num_microbatches)
    return starts, 1 + max(starts)


_NOT_YET, _NOTHING = -2, -1  # in place of a slot: of what has not run, of what need not have


def longest_path(
    orders: Sequence[Sequence[int]], num_stages: int, num_microbatches: int
) -> list[int]:
    """Give each cell the first slot in which it can start: behind all that it reads.

    A forward reads what that of the stage before makes, a backward what its own forward has left
    and the backward of the next stage makes.

    Args:
        orders: of cells (see AbstractOrder), each run one after the other, a slot for each cell.

    Raises:
        PlanError: no order can go on.

    Example:
        >>> longest_path([[0, 2], [1, 3]], num_stages=2, num_microbatches=1)
        [0, 1, 3, 2]
    """
    middle, last = num_stages * num_microbatches, num_stages - 1
    starts = [_NOT_YET] * (2 * middle)
    places, free = [0] * len(orders), [0] * len(orders)
    goes_on = True
    while goes_on:
        goes_on = False
        for w, order in enumerate(orders):
            begin, start = places[w], free[w]
            for n in range(begin, len(order)):
                cell = order[n]
                j = cell % num_stages
                if cell < middle:
                    before = starts[cell - 1] if j else _NOTHING
                elif (before := starts[cell - middle]) != _NOT_YET and j < last:
                    before = starts[cell + 1]  # the next stage's, which is behind that forward
                if before == _NOT_YET:
                    break
                starts[cell] = start = max(start, before + 1)
                start += 1
                places[w] = n + 1
            free[w] = start
            goes_on |= places[w] > begin
    for order, place in zip(orders, places, strict=True):
        if place < len(order):
            is_backward, cell = divmod(order[place], middle)
            i, j = divmod(cell, num_stages)
            raise PlanError(
                f"in this order {j}{'FB'[is_backward]}{i} would wait for ever for what is behind "
                "it; allowed: orders in which each forward is behind that of the stage before, "
                "and each backward behind its forward and the backward of the next stage; run it "
                "later"
            )
    return starts


_Cell = TypeVar("_Cell")


def one_by_one(forwards: Sequence[_Cell], backwards: Sequence[_Cell], warm_up: int) -> list[_Cell]:
    """Run some forwards, then a forward and a backward in turn, then the other backwards."""
    warm_up = min(warm_up, len(forwards))
    turns = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return [*forwards[:warm_up], *turns, *backwards[len(forwards) - warm_up :]]


@final
@dataclass(frozen=True, kw_only=True)
class GPipe(AbstractOrder):
    """Run all forwards of a stage, then all backwards, in the order of micro-batches.

    In that order gradients are added. Three micro-batches on two pipelined stages:

        slot   0   1   2   3   4   5   6   7
        w0   0F0 0F1 0F2   .   . 0B0 0B1 0B2
        w1     . 1F0 1F1 1F2 1B0 1B1 1B2   .

    Source: Huang et al., "GPipe", https://arxiv.org/abs/1811.06965.
    """

    def orders(self) -> Iterator[Sequence[int]]:
        """Yield the order of each stage."""
        for j in range(self.num_stages):
            yield list(chain(*self._cells(j)))


@final
@dataclass(frozen=True, kw_only=True)
class OneFOneB(AbstractOrder):
    """Run S-1-j forwards of stage j, then a forward and a backward in turn.

    Three micro-batches on two stages, in as many slots as GPipe, but fewer in flight:

        slot   0   1   2   3   4   5   6   7
        w0   0F0 0F1   . 0B0 0F2 0B1   . 0B2
        w1     . 1F0 1B0 1F1 1B1 1F2 1B2   .

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", section 2
        (PipeDream-Flush), https://arxiv.org/abs/2006.09503.
    """

    def orders(self) -> Iterator[Sequence[int]]:
        """Yield the order of each stage."""
        for j in range(self.num_stages):
            yield one_by_one(*self._cells(j), self.num_stages - 1 - j)


@final
@dataclass(frozen=True, kw_only=True)
class Interleaved(AbstractOrder):
    """Run 1F1B over several stages of each worker: w, w + p, w + 2p and so on, of p workers.

    As many micro-batches as there are workers pass through a worker's first stage, then through
    its next; backwards the other way round. Two micro-batches on four stages of two workers; 1F1B
    takes 12 slots for as much work, where each worker has two neighbouring stages:

        slot   0   1   2   3   4   5   6   7   8   9
        w0   0F0 0F1 2F0 2F1   . 2B0   . 2B1 0B0 0B1
        w1     . 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1   .

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM", section 2.2, https://arxiv.org/abs/2104.04473.
    """

    shape: ClassVar[str] = "loop"
    stages_per_worker: ClassVar[int] = 2

    def orders(self) -> Iterator[Sequence[int]]:
        """Yield the order of each worker."""
        p = self.depth
        for w in range(p):
            stages = range(w, self.num_stages, p)
            forwards, backwards = (
                [
                    (first, i, j)
                    for group in range(0, self.num_microbatches, p)
                    for j in order
                    for i in range(group, group + p)
                ]
                for first, order in ((0, stages), (self._middle, stages[::-1]))
            )
            order = one_by_one(forwards, backwards, 2 * (p - 1 - w) + (len(stages) - 1) * p)
            # where the last of these groups is not full, what is left out makes nobody wait
            yield [
                first + i * self.num_stages + j
                for first, i, j in order
                if i < self.num_microbatches
            ]


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
    def unit(self) -> int:
        return self.base.unit

    @property
    def period(self) -> int:
        return self.base.period

    def forward(self, i: int, j: int) -> int:
        return self.base.forward(i // self.size, j)

    def backward(self, i: int, j: int) -> int:
        return self.base.backward(i // self.size, j)


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

    def forward(self, i: int, j: int) -> int:
        return self._moved(i) + self.base.forward(i % self.base.num_microbatches, j)

    def backward(self, i: int, j: int) -> int:
        return self._moved(i) + self.base.backward(i % self.base.num_microbatches, j)

    @property
    def _more(self) -> int:
        """Ticks from the first round of a worker to its last."""
        return (self.num_microbatches // self.base.num_microbatches - 1) * self.base.period

    def _moved(self, i: int) -> int:
        number, w = divmod(i, self.base.num_microbatches)
        return number * self.base.period + (w * self._more if self.in_succession else 0)
