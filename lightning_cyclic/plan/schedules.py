"""The first axis: in which slot each forward and backward runs.

Times are integers of ticks (see :mod:`lightning_cyclic.plan.clock`); a slot has ``unit`` of them.
Steps repeat: step t is step 0 moved by ``t * period`` ticks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import ClassVar, NamedTuple, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import Kind
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


class Cell(NamedTuple):
    """Name a forward or backward of a step."""

    kind: Kind
    i: int
    j: int


@dataclass(frozen=True, kw_only=True)  # no slots: the times are cached in __dict__
class AbstractOrder(AbstractSchedule):
    """Run cells in an order, each as soon as it can; then a flush.

    So every schedule with a flush is some lists of cells, and one longest path gives its times.
    """

    @abstractmethod
    def orders(self) -> Iterator[Sequence[Cell]]:
        """Yield lists of cells, each of which is run one after the other."""

    @cached_property
    def _starts(self) -> dict[Cell, int]:
        return longest_path(list(self.orders()), self.num_stages)

    @cached_property
    def _period(self) -> int:
        return 1 + max(self._starts.values())

    @property
    def period(self) -> int:
        return self._period

    def forward(self, i: int, j: int) -> int:
        return self._starts[Cell(Kind.F, i, j)]

    def backward(self, i: int, j: int) -> int:
        return self._starts[Cell(Kind.B, i, j)]

    def _cells(self, kind: Kind, j: int) -> list[Cell]:
        return [Cell(kind, i, j) for i in range(self.num_microbatches)]


def longest_path(orders: Sequence[Sequence[Cell]], num_stages: int) -> dict[Cell, int]:
    """Give each cell the first slot in which it can start: behind all that it reads.

    Args:
        orders: of which each is run one after the other, a slot for each cell.

    Raises:
        PlanError: no order can go on.

    Example:
        >>> f, b = Cell(Kind.F, 0, 0), Cell(Kind.B, 0, 0)
        >>> longest_path([[f, b]], 1) == {f: 0, b: 1}
        True
    """
    starts: dict[Cell, int] = {}
    places, free = [0] * len(orders), [0] * len(orders)
    goes_on = True
    while goes_on:
        goes_on = False
        for w, order in enumerate(orders):
            for cell in order[places[w] :]:
                before = list(_reads(cell, num_stages))
                if not all(x in starts for x in before):
                    break
                starts[cell] = max([free[w], *(starts[x] + 1 for x in before)])
                free[w], places[w], goes_on = starts[cell] + 1, places[w] + 1, True
    for order, place in zip(orders, places, strict=True):
        if place < len(order):
            kind, i, j = order[place]
            raise PlanError(
                f"in this order {j}{kind}{i} would wait for ever for what is behind it; allowed: "
                "orders in which each forward is behind that of the stage before, and each "
                "backward behind its forward and the backward of the next stage; run it later"
            )
    return starts


def _reads(cell: Cell, num_stages: int) -> Iterator[Cell]:
    """Yield the cells that make what one reads."""
    kind, i, j = cell
    if kind is Kind.F:
        if j > 0:
            yield Cell(Kind.F, i, j - 1)
        return
    yield Cell(Kind.F, i, j)
    if j + 1 < num_stages:
        yield Cell(Kind.B, i, j + 1)


def one_by_one(forwards: Sequence[Cell], backwards: Sequence[Cell], warm_up: int) -> list[Cell]:
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

    def orders(self) -> Iterator[Sequence[Cell]]:
        """Yield the order of each stage."""
        for j in range(self.num_stages):
            yield self._cells(Kind.F, j) + self._cells(Kind.B, j)


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

    def orders(self) -> Iterator[Sequence[Cell]]:
        """Yield the order of each stage."""
        for j in range(self.num_stages):
            forwards, backwards = self._cells(Kind.F, j), self._cells(Kind.B, j)
            yield one_by_one(forwards, backwards, self.num_stages - 1 - j)


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

    def orders(self) -> Iterator[Sequence[Cell]]:
        """Yield the order of each worker."""
        p, chunks = self.depth, range(self.num_stages // self.depth)
        for w in range(p):
            forwards, backwards = (
                [
                    Cell(kind, i, chunk * p + w)
                    for first in range(0, self.num_microbatches, p)
                    for chunk in order
                    for i in range(first, first + p)
                ]
                for kind, order in ((Kind.F, chunks), (Kind.B, chunks[::-1]))
            )
            order = one_by_one(forwards, backwards, 2 * (p - 1 - w) + (len(chunks) - 1) * p)
            # where the last of these groups is not full, what is left out makes nobody wait
            yield [cell for cell in order if cell.i < self.num_microbatches]


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
