"""The stream of one worker: its program without end, cut where the next batch is needed.

A worker is given one batch per step, but a plan without a flush works on several at once:

    worker 0   F0 F1 F2 B0 F3 B1 | F0 B2 F1 B3 UPDATE F2 B0 F3 B1 | F0 B2 ...
                 block of step 0 |  block of step 1               |

From some step on, every block is the one before with larger numbers; or where the workers of a
stage take turns, the one of some steps before. So are the blocks of synchronous steps at first,
each of which ends before the next begins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.lower import blocking


@final
class Stream:
    """Answer what a worker does with each batch.

    Args:
        plan: without a flush between steps.
        worker: whose program it is.
    """

    def __init__(self, plan: Plan, worker: int) -> None:
        self._worker = worker
        self._is_alone = len(plan.axes.placement.replica(worker)) == 1
        self._repeats = plan.axes.placement.repeats
        self._warm_up, self._schedule = plan.warmup_steps, plan.axes.schedule
        # synchronous steps repeat, too, but for the first
        skipped = max(plan.warmup_steps - 1 - self._repeats, 0) // self._repeats * self._repeats
        self._skipped, few = skipped, plan.warmup_steps - skipped
        # until the rule reads as ever on, and until all that a step begins has ended
        self._steady, lasts = few + 2 * plan.num_stages, plan.steps_under_way
        num_steps = self._steady + self._repeats + lasts
        self._plan = plan = replace(plan, num_steps=num_steps, warmup_steps=few)
        self._short = plan.axes.schedule
        program: Sequence[Action] = blocking(plan)[worker]
        if plan.width > 1:
            program = _with_buffers_last(program)
        self._program = [a for a in program if a.payload is not Payload.D]
        self._starts = [
            next(n for n, a in enumerate(self._program) if _begins_in(a) == t)
            for t in range(num_steps)
        ]
        assert self._is_steady(), "the plan never becomes steady"

    @property
    def lag(self) -> int:
        """Return with which block behind that of a step its outcomes come or are told."""
        t = self._steady
        told = (n for n, a in enumerate(self._program) if a.t == t and self.tells(a))
        return bisect_right(self._starts, next(told)) - 1 - t

    def tells(self, a: Action) -> bool:
        """Say whether an action tells the worker, or its last backward shows, what came out."""
        if not self._is_alone:
            return a.payload is Payload.L
        plan = self._plan
        is_last = a.i is not None and a.i >= plan.num_micro - plan.width
        return a.kind is Kind.B and a.j == plan.num_stages - 1 and is_last

    def completes(self, a: Action) -> bool:
        """Say whether an action ends the sum of gradients that this worker updates with."""
        plan = self._plan
        if plan.owner(a.j) != self._worker:
            return False
        if plan.sums_by_replica:
            return a.kind is Kind.RECV and a.payload is Payload.S
        return a.kind is Kind.B and a.i == plan.num_micro - 1

    def block(self, t: int) -> list[Action]:
        """Return the actions from the first that needs the batch of step ``t``.

        They end before the first that needs the next batch.
        """
        steps, slots = self._behind(t)
        return [_moved(a, steps, slots) for a in self._block(t - steps)]

    def rest(self, t: int) -> list[Action]:
        """Return what is left of steps up to ``t`` behind the block of step ``t``.

        Actions of later steps that the stream has in between are left out.
        """
        steps, slots = self._behind(t)
        behind = self._program[self._starts[t - steps + 1] :]
        return [_moved(a, steps, slots) for a in behind if step_of(a) <= t - steps]

    def put_off(self, t: int) -> dict[tuple[int, int], list[Action]]:
        """Return the forwards of later steps that the rest of step ``t`` leaves out.

        Returns:
            (step, stage) of a new version -> the forwards of that stage that come before it.
        """
        steps, slots = self._behind(t)
        put_off: dict[int, list[Action]] = {}
        found: dict[tuple[int, int], list[Action]] = {}
        for a in self._program[self._starts[t - steps + 1] :]:
            if a.kind is Kind.F and a.t > t - steps:
                put_off.setdefault(a.j, []).append(_moved(a, steps, slots))
            elif _moves_on(a) and step_of(a) <= t - steps:
                found[step_of(a) + steps, a.j] = list(put_off.get(a.j, ()))
        return found

    def _behind(self, t: int) -> tuple[int, int]:
        """Return how many steps before step t the program has one like it, and how many slots."""
        if t < self._warm_up:
            steps = max(t - 1, 0) // self._repeats * self._repeats
        else:
            late = max(t - self._skipped - self._steady, 0)
            steps = self._skipped + late // self._repeats * self._repeats
        return steps, self._schedule.slot(t, 0) - self._short.slot(t - steps, 0)

    def _is_steady(self) -> bool:
        t, later = self._steady, self._steady + self._repeats
        slots = self._short.slot(later, 0) - self._short.slot(t, 0)
        return [_moved(a, later - t, slots) for a in self._block(t)] == self._block(later)

    def _block(self, t: int) -> Sequence[Action]:
        return self._program[self._starts[t] : self._starts[t + 1]]


def step_of(a: Action) -> int:
    """Return the step without which an action would not be: a version's is that of its update."""
    is_version = a.payload in (Payload.P, Payload.V)
    return a.v - 1 if is_version and a.v is not None else a.t


def _with_buffers_last(program: Sequence[Action]) -> list[Action]:
    """Send the buffers for the first micro-batch of a step right before its receiver's forward.

    So that what comes out of the step before, behind the sending, does not come with the next
    batch for some replicas and with this one for others.
    """
    made: list[Action] = []
    waiting: list[Action] = []
    for a in program:
        if a.kind is Kind.SEND and a.payload is Payload.R and a.i == 0:
            waiting.append(a)
            continue
        if waiting and _begins_in(a) == waiting[0].t:
            made += waiting
            waiting = []
        made.append(a)
    return made + waiting


def _moves_on(a: Action) -> bool:
    """Say whether an action gives the worker the next version of a stage that it holds."""
    return a.kind is Kind.UPDATE or (a.kind is Kind.RECV and a.payload is Payload.P)


def _begins_in(a: Action) -> int:
    """Return the step with whose batch an action comes: versions are received before a forward."""
    return a.t if a.kind is Kind.RECV else step_of(a)


def _moved(a: Action, steps: int, slots: int) -> Action:
    if steps == 0:
        return a
    return replace(a, t=a.t + steps, v=None if a.v is None else a.v + steps, s=a.s + slots)
