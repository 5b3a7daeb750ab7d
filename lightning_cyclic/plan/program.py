"""Program: what every worker does, step by step, without end.

A worker is given one batch per step, but a plan without a flush works on several at once. So its
actions are cut where the next batch is needed first:

    worker 0   F0 F1 F2 B0 F3 B1 | F0 B2 F1 B3 UPDATE F2 B0 F3 B1 | F0 B2 ...
                 block of step 0 |  block of step 1               |

    prologue   blocks that differ
    block      from some step on, every block is the one before with larger numbers; or where the
               workers of a stage take turns, the one of some steps before
    drain      what a flush leaves: all that is left of the steps that have begun

After a flush, what it has done of later blocks is left out of them. Nobody else knows what a
steady state is: runtime, simulator, account, memory model and pictures ask here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import final

from lightning_cyclic.plan.actions import COMPUTE, Action, Kind, Lane, Payload
from lightning_cyclic.plan.actions import Program as Actions
from lightning_cyclic.plan.dataflow import Dataflow
from lightning_cyclic.plan.passes.copies import copies
from lightning_cyclic.plan.passes.messages import (
    Channel,
    Ring,
    channel_of,
    is_for_one_use,
    message,
    ring_of,
    step_of,
)
from lightning_cyclic.plan.passes.shards import last_version
from lightning_cyclic.plan.plan import Plan


@final
class Program:
    """Answer what workers do.

    Args:
        window: the actions of each worker over some steps, from the first on.
        shown: the plan of the window: with as many steps, and the shortest period.

    Raises:
        NotSteadyError: the window is too short to see the program repeat.
    """

    def __init__(self, plan: Plan, window: tuple[Actions, ...], shown: Plan) -> None:
        self.plan = plan
        self._window = window
        self._shown = shown
        self._starts = [self._begins(program) for program in window]
        self._served_in: dict[tuple[int, int], list[Action]] = {}  # by worker and block
        self._repeats = shown.repeats
        self.steady = self._first_steady()

    @property
    def num_workers(self) -> int:
        return len(self._window)

    def flow(self, w: int) -> Dataflow:
        """Return what the actions of a worker read, make and free."""
        return Dataflow(self.plan, w)

    def waiting_lanes(self, w: int) -> frozenset[Lane]:
        """List the lanes of a worker on which something waits for other workers, or for a disk."""
        flow, repeating = Dataflow(self._shown, w), range(self.steady, self.steady + self._repeats)
        steady = [a for t in repeating for a in self._block(w, t)]
        come = {(flow(a).makes[0][0], a.j) for a in steady if a.kind is Kind.RECV}
        return frozenset(
            a.lane
            for a in steady
            if a.lane
            and not is_for_one_use(a)
            and (a.lane is Lane.TIERS or any((x[0], a.j) in come for x in flow(a).reads))
        )

    # ------------------------------------------------------------------ what a worker does

    def step(self, w: int, t: int, *, ended: int = -1, starts: bool = False) -> list[Action]:
        """Return what a worker does from the first that needs the batch of step ``t`` on.

        It ends before the first that needs the next batch.

        Args:
            ended: the last step that has ended by a flush; what is left of it has been done.
        """
        back, slots = self._behind(t)
        block = self._block(w, t - back)
        actions = [_moved(a, back, slots) for a in block if step_of(a) + back > ended]
        if self.plan.axes.sharding.gathers:
            actions = self._serving(w, t, actions, behind_flush=0 < t == ended + 1)
        if starts:
            actions = list(start_signals(self.plan, list(self._with_room(w, t, actions)), w))
        return actions

    def flush(self, w: int, t: int, *, ended: int = -1, whole: bool = True) -> list[Action]:
        """Return what is left of the steps up to ``t`` behind the block of step ``t``.

        Args:
            ended: the last step that has ended by an earlier flush.
            whole: whether all workers are to have all parameters behind it.
        """
        left = self._flush(w, t, ended, list(self._dropped(w, t)))
        return [*left, *self.bring(w, t)] if whole else left

    def bring(self, w: int, t: int) -> list[Action]:
        """Return what gives all workers the parameters of step ``t``, behind a flush."""
        return list(last_version(self.plan, t + 1, w))

    def _flush(self, w: int, t: int, ended: int, dropped: list[Action]) -> list[Action]:
        left = [a for a in self._left(w, t) if ended < step_of(a) <= t and not self._is_served(a)]
        return [*left, *copies(self.plan, t, w), *dropped]

    def put_off(self, w: int, t: int) -> dict[tuple[int, int], list[Action]]:
        """Return the forwards of later steps that a flush behind step ``t`` leaves out.

        Returns:
            (step, stage) of a new version -> the forwards of that stage that come before it.
        """
        back, slots = self._behind(t)
        begin = self._starts[w][t - back + 1]
        read = {(a.j, a.v) for a in self._window[w][:begin] if _reads_weights(a)}
        put_off: dict[int, list[Action]] = {}
        found: dict[tuple[int, int], list[Action]] = {}
        for a in (_moved(a, back, slots) for a in self._window[w][begin:]):
            if a.v is not None and (a.kind is Kind.UPDATE or _reads_weights(a)):
                version = a.j, a.v - back  # what was received is taken in by its first reader
                if version not in read and a.v - 1 <= t:
                    found[a.v - 1, a.j] = list(put_off.get(a.j, ()))
                read.add(version)
            if a.kind is Kind.F and a.t > t:
                put_off.setdefault(a.j, []).append(a)
        return found

    def first(self, num_steps: int) -> tuple[Actions, ...]:
        """Return what each worker does over some steps, with a flush behind them."""
        return tuple(
            tuple(
                chain(
                    (a for t in range(num_steps) for a in self.step(w, t, starts=t == 0)
                     if step_of(a) < num_steps),
                    self._flush(w, num_steps - 1, -1, []),
                    self.bring(w, num_steps - 1),
                )
            )
            for w in range(self.num_workers)
        )  # fmt: skip

    # ------------------------------------------------------------------ what all have in common

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """List the channels that messages travel on, in one order for all workers.

        They do not depend on how many rounds a step has, which may change behind a flush.
        """
        programs = [*enumerate(self.first(self.steady + self._repeats))]
        if self.plan.repeats > self._repeats:  # whose first steps may exchange nothing
            programs += enumerate(self._window)
        found = {channel_of(a, w) for w, program in programs for a in program
                 if a.kind is Kind.SEND}  # fmt: skip
        return tuple(sorted(found))

    @property
    def communicators(self) -> Counter[int]:
        """Count the channels of each worker that take a group of NCCL: worker -> how many.

        Fewer do not do. Operations of one group run one after the other, as do those of groups
        that share resources (pytorch#130877); so what is proved of channels, each in its order,
        would have to be proved of all orders in which lanes, and both ways, may meet in one queue.
        """
        ends = [c[:2] for c in self.channels if not c.is_control]
        return Counter(w for pair in ends for w in pair)

    @cached_property
    def depths(self) -> Mapping[Ring, int]:
        """Count the sends of each ring that may wait for their receives at once.

        As many as do in the timetable, and one for the one that is being made. And all that are
        for steps that others have not begun, as all workers may meet between two steps.
        """
        posted: defaultdict[Ring, list[int]] = defaultdict(list)
        for w, program in enumerate(self._window):
            for a in program:
                if a.kind is Kind.RECV:
                    posted[ring_of(a, w)].append(a.s)
        sent: defaultdict[Ring, list[int]] = defaultdict(list)
        most: defaultdict[Ring, int] = defaultdict(partial(int, 2))
        for w, program in enumerate(self._window):
            for a in program:
                if a.kind is Kind.SEND:
                    ring = ring_of(a, w)
                    sent[ring].append(a.s)
                    taken = bisect_right(posted[ring], a.s)
                    most[ring] = max(most[ring], len(sent[ring]) - taken + 1)
            for ring, count in self._rings_ahead(w):
                most[ring] = max(most[ring], count)
        return most

    def lag(self, w: int) -> int:
        """Return with which block behind that of a step a worker is told what came out of it."""
        t = self.steady
        told = next(n for n, a in enumerate(self._window[w]) if a.t == t and a.kind is Kind.TELL)
        return bisect_right(self._starts[w], told) - 1 - t

    # ------------------------------------------------------------------ inside

    def _with_room(self, w: int, t: int, block: list[Action]) -> Iterator[Action]:
        """Drop what a flush has brought, where parameters are held only while they are used."""
        for a in last_version(self.plan, t, w) if t > 0 else ():
            if a.kind is Kind.GATHER:
                yield replace(a, kind=Kind.FREE)
        yield from block

    def _serving(self, w: int, t: int, block: list[Action], *, behind_flush: bool) -> list[Action]:
        """Return the block of a step with all that others need in the same step.

        Who is behind must not wait for a worker's next step: it may never begin, or begin with a
        meeting of all workers. Nor may a worker wait for room until others begin theirs: those in
        succession would serve whole steps ahead.
        """
        later = chain(self._served(w, t + 1), self._served(w, t + 2))
        if self._serves_in_step:
            sooner = [a for a in self._ahead(w, t - 1) if step_of(a) == t] if t > 0 else []
            block = [a for a in block if not (self._is_served(a) and step_of(a) > t)]
        else:
            sooner = self._ahead(w, t - 1) if behind_flush else []  # those that came were dropped
        return [
            *sooner,
            *(a for a in block if not (self._is_served(a) and step_of(a) < t)),
            *(a for a in later if step_of(a) == t),
        ]

    @property
    def _serves_in_step(self) -> bool:
        """Say whether nothing is sent to others for steps that have not begun here."""
        return self.plan.rounds > 1 and bool(self.plan.relayed)

    def _served(self, w: int, t: int) -> Iterator[Action]:
        """Yield what the block of a step sends of parameters for one use of them."""
        back, slots = self._behind(t)
        key = w, t - back
        if key not in self._served_in:
            self._served_in[key] = [a for a in self._block(*key) if self._is_served(a)]
        return (_moved(a, back, slots) for a in self._served_in[key])

    def _ahead(self, w: int, t: int) -> list[Action]:
        """Return what the blocks up to a step's send to those who have begun later ones before.

        Behind a flush nobody has: it takes these messages in, and they are sent once more.
        """
        found: list[Action] = []
        if not self.plan.axes.sharding.gathers:
            return found
        for s in range(max(t - 1, 0), t + 1):  # few stages: two steps ahead
            found += [a for a in self._served(w, s) if step_of(a) > t]
        return found

    def _rings_ahead(self, w: int) -> Iterator[tuple[Ring, int]]:
        """Yield how many messages of a ring each step sends to those who begin later ones."""
        for t in range(self.steady + self._repeats):
            yield from Counter(ring_of(a, w) for a in self._ahead(w, t)).items()

    def _dropped(self, w: int, t: int) -> Iterator[Action]:
        """Take in what has been sent to a worker for steps that do not begin before a flush."""
        if self._serves_in_step:
            return
        for x in range(self.num_workers):
            for a in self._ahead(x, t):
                if a.peer == w:
                    come = Action(kind=Kind.GATHER, t=a.t, j=a.j, v=a.v, s=a.s + 1)
                    yield come
                    yield replace(a, kind=Kind.RECV, peer=x, s=a.s + 1)
                    yield replace(come, kind=Kind.FREE)

    def _is_served(self, a: Action) -> bool:
        """Say whether parameters are sent for one use of them."""
        return a.kind is Kind.SEND and is_for_one_use(a)

    def _left(self, w: int, t: int) -> Iterator[Action]:
        """Yield the actions behind the block of a step, as far as the window goes."""
        back, slots = self._behind(t)
        behind = self._window[w][self._starts[w][t - back + 1] :]
        return (_moved(a, back, slots) for a in behind)

    def _block(self, w: int, t: int) -> Sequence[Action]:
        return self._window[w][self._starts[w][t] : self._starts[w][t + 1]]

    def _begins(self, program: Actions) -> list[int]:
        """Return where the block of each step begins: at the first action that belongs to it.

        What owners serve to others who are ahead is not of the worker's own step. Norms that are
        told right before it belong to an update within it: nothing comes between. Where freshest
        weights are read, others may tell theirs only in the next step, so an update that waits
        for them begins that step, and the version that it makes leaves behind it: at the end of
        its own, all others may be waiting for this worker (to write a checkpoint, say).
        """
        begins = [0]
        tells = self.plan.decides_at_end
        waits = tells and self.plan.weights == "freshest"
        first = 0  # of the norms, updates and new versions that come right before
        for n, a in enumerate(program):
            if self._is_served(a):
                continue
            begins += [first] * (step_of(a) + 1 - len(begins))
            is_told = tells and a.payload is Payload.N
            is_new = a.kind is Kind.UPDATE or (a.payload is Payload.P and a.kind is Kind.SEND)
            if not is_told and not (waits and is_new):
                first = n + 1
        return begins

    def _behind(self, t: int) -> tuple[int, int]:
        """Return how many steps before step t the window has one like it, and how many slots."""
        back = t - self._like(t)
        slot, shown = self.plan.axes.schedule.slot, self._shown.axes.schedule.slot
        return back, slot(t, 0) - shown(t - back, 0)

    def _like(self, t: int) -> int:
        """Return the step of the window that is like step t."""
        local = self.plan.local
        if local is None or self.plan.repeats == self._repeats:
            return t - max(t - self.steady, 0) // self._repeats * self._repeats
        place = local.as_shorter(t, self.plan.num_stages)
        return self.steady + (place - self.steady) % self._repeats

    def _first_steady(self) -> int:
        """Return the first step from which on all blocks repeat."""
        t = last_that_repeats(self._shown)
        if t <= 0 or not self._repeats_from(t):
            raise NotSteadyError
        while t > 0 and self._repeats_from(t - 1):
            t -= 1
        return t

    def _repeats_from(self, t: int) -> bool:
        """Say whether the block of a step is that of some steps later, for all workers.

        And whether forwards of the step lag as those of any late step do: the rule has no more
        to come.
        """
        later, shown = t + self._repeats, self._shown
        slot = shown.axes.schedule.slot
        slots = slot(later, 0) - slot(t, 0)
        return shown.is_settled(t) and all(
            [_placed(_moved(a, self._repeats, slots)) for a in self._block(w, t)]
            == [_placed(a) for a in self._block(w, later)]
            for w in range(self.num_workers)
        )


def last_that_repeats(shown: Plan) -> int:
    """Return the last step of a window whose block, and the one to compare with, are whole."""
    return shown.num_steps - 1 - shown.steps_under_way - shown.repeats


class NotSteadyError(Exception):
    """Say that a window is too short to see a program repeat; asks for a longer one."""


def _placed(a: Action) -> tuple[Action, int]:
    return a, a.s


def _reads_weights(a: Action) -> bool:
    return a.kind in COMPUTE


def _moved(a: Action, steps: int, slots: int) -> Action:
    return a if steps == 0 else a.moved(steps, slots)


def start_signals(plan: Plan, block: Sequence[Action], w: int) -> Iterator[Action]:
    """Insert K into the block of a step that all workers begin together.

    Nothing in the data that they exchange makes them stagger as wide as the timetable has it, so
    in that one step worker w + 1 (of groups: the one in the same place of the next) waits for a
    signal that worker w sends when it is as far into its step as the timetable says. In all other
    steps the stagger holds by itself, and gives way where messages need longer.
    """
    own = [a for a in block if a.kind in COMPUTE] if plan.is_staggered else []
    behind = min(2 * plan.num_stages // plan.num_groups, plan.num_stages)  # slots
    if plan.rounds > 1 and plan.relayed:  # in succession
        behind += 2 * plan.num_stages * (plan.rounds - 1)
    for a in block:
        if own and a is own[0] and w >= plan.group_size:
            yield message(Kind.RECV, Payload.K, a, w - plan.group_size)
        if own and a is own[behind] and w + plan.group_size < plan.num_workers:
            yield message(Kind.SEND, Payload.K, a, w + plan.group_size, j=0)
        yield a
