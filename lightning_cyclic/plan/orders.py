"""Schedules with a flush: an order of cells for each worker; one longest path gives the times.

    F   a forward
    B   a backward, whole; of schedules that split some, it takes two slots
    I   its first half: the gradient of what entered the stage, for which the stage before waits
    W   its second half: the gradient of the weights, for which nobody waits before the update

A worker with nothing to wait for runs Ws that it has put off; how many it may, is in the order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import ClassVar, NoReturn, TypeVar, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.schedules import AbstractSchedule


@dataclass(frozen=True, kw_only=True)  # no slots: the times are cached in __dict__
class AbstractOrder(AbstractSchedule):
    """Run cells in an order, each as soon as it can; then a flush.

    A cell is a number, as there may be millions: first all forwards, micro-batch by micro-batch
    and in each of them stage by stage, then all backwards (B or I) in the same order, then all W.
    """

    @abstractmethod
    def orders(self) -> Iterator[Sequence[int]]:
        """Yield lists of cells, each of which is run one after the other."""

    @property
    def period(self) -> int:
        return self._times.period

    def start(self, kind: Kind, i: int, j: int) -> int:
        return self._times.starts[_ROW[kind] * self._middle + i * self.num_stages + j]

    def is_split(self, i: int, j: int) -> bool:
        return self._times.starts[2 * self._middle + i * self.num_stages + j] != _NOT_YET

    def length(self, kind: Kind) -> int:
        return 2 if kind is Kind.B and self.splits else 1

    @cached_property
    def _times(self) -> Times:
        return _timed(self)

    @property
    def _middle(self) -> int:
        """The first backward."""
        return self.num_microbatches * self.num_stages

    def _cells(self, j: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """List forwards, backwards and Ws of a stage, in the order of micro-batches."""
        begin, step = self._middle, self.num_stages
        first, second, third = (range(n * begin + j, (n + 1) * begin, step) for n in range(3))
        return first, second, third

    def _joined(self, order: list[int]) -> list[int]:
        """Leave backwards of stage 0 whole whose halves come together: nobody waits for the first.

        A whole one takes no longer than its halves, and is one backward less to start.
        """
        cells, behind = self._middle, self.num_stages
        halves = {
            b for a, b in pairwise(order) if b - a == cells and not b % behind and a >= cells
        }
        return [cell for cell in order if cell not in halves]


_ROW = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2}
_NOT_YET, _NOTHING = -2, 0  # in place of a slot: of what has not run, of what need not have


@final
@dataclass(frozen=True, slots=True)
class Times:
    """Hold the start of each cell, and the slots of a step; none of a W that is in no order."""

    starts: list[int]
    period: int


@lru_cache(maxsize=32)  # plans that differ in other numbers look at the same times
def _timed(schedule: AbstractOrder) -> Times:
    orders, whole = list(schedule.orders()), schedule.length(Kind.B)
    return longest_path(orders, schedule.num_stages, schedule.num_microbatches, whole)


def longest_path(
    orders: Sequence[Sequence[int]], num_stages: int, num_microbatches: int, whole: int = 1
) -> Times:
    """Give each cell the first slot in which it can start: behind all that it reads.

    A forward reads what that of the stage before makes, a backward what its own forward has left
    and the backward of the next stage makes, a W what its own I has left.

    Args:
        orders: of cells (see AbstractOrder), each run one after the other, a slot for each cell.
        whole: slots of a backward without a W. [1]

    Raises:
        PlanError: no order can go on.

    Example:
        >>> longest_path([[0, 2], [1, 3]], num_stages=2, num_microbatches=1).starts[:4]
        [0, 1, 3, 2]
    """
    middle = num_stages * num_microbatches
    slots = [1] * middle + [whole] * middle + [1] * middle
    for cell in chain.from_iterable(orders):
        if cell >= 2 * middle:
            slots[cell - middle] = 1
    ends = [_NOT_YET] * len(slots)

    places, free = [0] * len(orders), [0] * len(orders)
    goes_on = True
    while goes_on:
        goes_on = False
        for w, order in enumerate(orders):
            begin, end = places[w], free[w]
            for n in range(begin, len(order)):
                cell = order[n]
                before = _end_of_need(ends, cell, num_stages, middle)
                if before == _NOT_YET:
                    break
                ends[cell] = end = max(end, before) + slots[cell]
                places[w] = n + 1
            free[w] = end
            goes_on |= places[w] > begin
    for order, place in zip(orders, places, strict=True):
        if place < len(order):
            _refuse_to_wait(order, place, num_stages, middle, whole)
    starts = [end - long if end > 0 else end for end, long in zip(ends, slots, strict=True)]
    return Times(starts, max(ends))


def _end_of_need(ends: list[int], cell: int, num_stages: int, middle: int) -> int:
    """Return the end of what a cell waits for; _NOT_YET if it has not run."""
    j = cell % num_stages
    if cell < middle:
        return ends[cell - 1] if j else _NOTHING
    own = ends[cell - middle]
    if j == num_stages - 1 or cell >= 2 * middle or own == _NOT_YET:
        return own
    return ends[cell + 1]  # the next stage's, which is behind that forward


_SHOWN = 6  # cells before and behind


def _refuse_to_wait(
    order: Sequence[int], place: int, num_stages: int, middle: int, whole: int
) -> NoReturn:
    """Refuse an order, and draw the cells around the one that cannot run."""

    def text(cell: int) -> str:
        row, number = divmod(cell, middle)
        i, j = divmod(number, num_stages)
        return f"{j}{('FBW' if whole == 1 else 'FIW')[row]}{i}"

    shown = [text(cell) for cell in order[max(0, place - _SHOWN) : place + _SHOWN + 1]]
    before = len(" ".join(shown[: min(place, _SHOWN)]))
    raise PlanError(
        f"in this order {text(order[place])} would wait for ever for what is behind "
        "it; allowed: orders in which each forward is behind that of the stage before, "
        "and each backward behind its forward and the backward of the next stage; run it "
        f"later\n{' '.join(shown)}\n{' ' * (before + bool(before))}^"
    )


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
            yield list(chain(*self._cells(j)[:2]))


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
            yield one_by_one(*self._cells(j)[:2], self.num_stages - 1 - j)


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
@dataclass(frozen=True, kw_only=True)
class ZeroBubbleH1(AbstractOrder):
    """Run 1F1B with split backwards; worker w of p puts off w Ws.

    So it keeps p micro-batches, as 1F1B does on its first worker. Two micro-batches on two stages,
    whose first one puts nothing off, so that its backwards are whole:

        slot   0   1   2   3   4   5   6
        w0   0F0 0F1   . 0B0   . 0B1   .
        w1     . 1F0 1I0 1F1 1I1 1W0 1W1

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", section 2.3,
        https://arxiv.org/abs/2401.10241.
    """

    splits: ClassVar[bool] = True

    def orders(self) -> Iterator[Sequence[int]]:
        """Yield the order of each worker; its stages are run as if they were one."""
        p = self.depth
        for w in range(p):
            stages = [j for j in range(self.num_stages) if j * p // self.num_stages == w]
            forwards, backwards, weights = (
                deque(zip(*cells, strict=True))
                for cells in (
                    [self._cells(j)[0] for j in stages],
                    [self._cells(j)[1] for j in reversed(stages)],
                    [self._cells(j)[2] for j in reversed(stages)],
                )
            )
            order = [forwards.popleft() for _ in range(p - 1 - w) if forwards]
            put_off = 0
            while backwards:
                if forwards:
                    order.append(forwards.popleft())
                order.append(backwards.popleft())
                put_off += 1
                if not forwards or put_off > w:
                    order.append(weights.popleft())
                    put_off -= 1
            yield self._joined(list(chain.from_iterable([*order, *weights])))


@dataclass(frozen=True, kw_only=True)
class AbstractVee(AbstractOrder):
    """Pass all workers, and come back: two stages on each of p workers, w and 2p-1-w."""

    splits: ClassVar[bool] = True
    shape: ClassVar[str] = "vee"
    stages_per_worker: ClassVar[int] = 2

    def misfit(self) -> str | None:
        """Say that workers would not have two stages each; one worker may stand for several."""
        workers = self.depth if self.depth > 1 else -(-self.num_stages // 2)
        if self.num_stages == 2 * workers:
            return None
        return (
            f"num_stages={self.num_stages} with {self.depth} workers of each replica; under this "
            "schedule each has two stages, w and 2p-1-w of p workers, so allowed: twice as many "
            f"stages as workers; use num_stages={2 * workers}"
        )

    @property
    def _workers(self) -> int:
        return self.num_stages // 2

    def orders(self) -> Iterator[Sequence[int]]:
        """Yield the order of each worker."""
        for w in range(self._workers):
            there, back = _Hand(*self._cells(w)), _Hand(*self._cells(self.num_stages - 1 - w))
            order: list[int] = []
            self._order(w, there, back, order)
            yield self._joined(order)

    @abstractmethod
    def _order(self, w: int, there: _Hand, back: _Hand, order: list[int]) -> None:
        """Put all cells of two stages of a worker into an order."""


@final
class _Hand:
    """Deal the cells of one stage, of each kind in the order of micro-batches."""

    def __init__(
        self, forwards: Sequence[int], backwards: Sequence[int], weights: Sequence[int]
    ) -> None:
        self.forwards = deque(forwards)
        self.backwards = deque(backwards)
        self.weights = deque(weights)

    def forward(self, times: int = 1) -> Iterator[int]:
        """Deal some forwards, or as many as there are left."""
        yield from (self.forwards.popleft() for _ in range(min(times, len(self.forwards))))

    def first_half(self) -> Iterator[int]:
        """Deal I, if the forward has been dealt."""
        if len(self.backwards) > len(self.forwards):
            yield self.backwards.popleft()

    def second_half(self) -> Iterator[int]:
        """Deal W, if its I has been dealt."""
        if len(self.weights) > len(self.backwards):
            yield self.weights.popleft()

    def split(self) -> Iterator[int]:
        yield from self.first_half()
        yield from self.second_half()

    def whole(self) -> Iterator[int]:
        """Deal B: there is no W of it."""
        self.weights.popleft()
        yield self.backwards.popleft()


@final
@dataclass(frozen=True, kw_only=True)
class ZeroBubbleV(AbstractVee):
    """Run both stages of a worker in turn, so that each holds as much as any other.

    No worker idles from its first cell to its last, if forward, I and W take as long, and there
    are twice as many micro-batches as workers. Each keeps 2p stage-activations at most, as much
    as the first worker of 1F1B, whose stages are twice as large, in p. Two micro-batches on four
    stages of two workers:

        slot   0   1   2   3   4   5   6   7   8   9  10  11  12
        w0   0F0 0F1   . 3F0 3I0 3W0 3F1 3I1 3W1 0B0   . 0B1   .
        w1     . 1F0 2F0 1F1 2F1 2I0 2W0 1I0 2I1 1I1 1W0 2W1 1W1

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", appendix,
        https://arxiv.org/abs/2405.15362; section 6 of https://arxiv.org/abs/2401.10241.
    """

    def _order(self, w: int, there: _Hand, back: _Hand, order: list[int]) -> None:
        _there_and_back(self._workers - w, w, there, back, order)


def _in_turn(times: int, one: _Hand, other: _Hand) -> Iterator[int]:
    """Deal forwards of both hands."""
    for _ in range(times):
        yield from one.forward()
        yield from other.forward()


def _there_and_back(behind: int, before: int, there: _Hand, back: _Hand, order: list[int]) -> None:
    """Order the cells of a worker of ZeroBubbleV that has so many before it, or from it on."""
    order += chain(there.forward(2 * behind - 1), _in_turn(before, back, there))
    for _ in range(behind):
        order += chain(back.forward(), back.split())
    while back.forwards or there.forwards:
        order += chain(there.forward(), there.split(), back.forward(), back.split())
    for _ in range(before):
        order += chain(there.first_half(), back.first_half())
    for _ in range(behind):
        order += there.split()
    order += chain(back.weights, there.weights)


@final
@dataclass(frozen=True, kw_only=True)
class DualPipeV(AbstractVee):
    """Run forwards of one stage of a worker beside backwards of its other one.

    Most backwards are whole; those are split that others wait for, where the step begins and
    ends. A worker keeps 2p + 1 stage-activations at most. With fewer micro-batches than stages,
    which cannot go both ways at once, it is ZeroBubbleV.

    Source: the V-shaped half of DualPipe, https://arxiv.org/abs/2412.19437, section 3.2.1;
        https://github.com/deepseek-ai/DualPipe.
    """

    def _order(self, w: int, there: _Hand, back: _Hand, order: list[int]) -> None:
        if self.num_microbatches < self.num_stages:
            _there_and_back(self._workers - w, w, there, back, order)
            return
        behind = self._workers - 1 - w
        put_off: deque[_Hand] = deque()

        def split(hand: _Hand) -> Iterator[int]:
            put_off.append(hand)
            yield from hand.first_half()

        order += chain(there.forward(2 * behind), _in_turn(w + 1, there, back))
        for _ in range(behind):
            order += chain(back.split(), back.forward())
        while there.forwards:
            order += chain(there.forward(), back.whole(), back.forward(), there.whole())
        for _ in range(behind):
            order += chain(back.whole(), back.forward(), there.whole())
        for n in range(w + 1):  # in the second half of these, somebody waits
            for k, hand in enumerate((back, there)):
                order += split(hand) if 2 * n + k > w else hand.whole()
        for _ in range(behind):
            order += chain(put_off.popleft().second_half(), split(there))
        while put_off:
            order += put_off.popleft().second_half()
