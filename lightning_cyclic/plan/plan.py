"""Plan: one value of each axis plus the numbers, and the program that follows from them.

    make_plan(...)  ->  Plan  ->  plan.programs: for each worker, the actions in its order

A preset is only a name for four axis values. Everything else about a plan is derived: who owns
a stage, which version each forward reads, every message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import final

from lightning_cyclic.errors import PlanError, one_of
from lightning_cyclic.plan.actions import Action, Kind, Program
from lightning_cyclic.plan.check.fit import check_fit
from lightning_cyclic.plan.check.validate import check_timetable, probe, validate
from lightning_cyclic.plan.defaults import (
    check_number,
    chosen_axes,
    default_num_micro,
    default_spacing,
)
from lightning_cyclic.plan.passes.batches import batches
from lightning_cyclic.plan.passes.messages import in_order_of_sends
from lightning_cyclic.plan.passes.shards import shards
from lightning_cyclic.plan.passes.transfers import relays, transfers
from lightning_cyclic.plan.passes.updates import drain, updates
from lightning_cyclic.plan.passes.versions import Cell, versions
from lightning_cyclic.plan.presets import (
    PLACEMENTS,
    PRESETS,
    SCHEDULES,
    SHARDINGS,
    WEIGHTS,
    Axes,
    Preset,
)
from lightning_cyclic.plan.schedules.base import AbstractSchedule
from lightning_cyclic.plan.schedules.warm_up import WarmUp
from lightning_cyclic.plan.schedules.wide import Wide

__all__ = ["PRESETS", "Plan", "Preset", "lower", "make_plan"]


@final
@dataclass(frozen=True, kw_only=True)  # no slots: what is derived is cached in __dict__
class Plan:
    """Hold one value of each axis and the numbers; derive the rest.

    Made by :func:`make_plan`, which checks that everything fits.

    Args:
        preset: name that the plan was made from.
        num_stages: S.
        num_workers: N.
        num_micro: m, micro-batches per update, of all replicas together.
        num_steps: training steps that the program covers.
        slack: slots that a new version needs to travel, for the ``freshest`` rule.
        schedule: name of the axis value, as are the next three.
        placement: who runs what.
        weights: which version is read.
        sharding: who keeps what.
        relayed: stages whose buffers travel from micro-batch to micro-batch.
        spacing: slots between a micro-batch and the next on the cyclic schedule.
        width: replicas of a pipeline.
        tied: groups of stages that share parameters, the first that uses them first.
        warmup_steps: steps that do not overlap; behind them the rule begins as if at step 0.
        late_updates: whether each stage is updated right before its new version is first read,
            so that all stages can decide together about a step without making one wait.
    """

    preset: str
    num_stages: int
    num_workers: int
    num_micro: int
    num_steps: int
    slack: int
    schedule: str
    placement: str
    weights: str
    sharding: str
    relayed: tuple[int, ...]
    spacing: Fraction
    width: int = 1
    tied: tuple[tuple[int, ...], ...] = ()
    warmup_steps: int = 0
    late_updates: bool = False

    @cached_property
    def axes(self) -> Axes:
        """The four axis values as objects."""
        return Axes(
            schedule=self._warmed_up(self._overlapping),
            placement=PLACEMENTS[self.placement](
                num_stages=self.num_stages,
                num_workers=self.num_workers,
                num_micro=self.num_micro,
                width=self.width,
            ),
            weights=WEIGHTS[self.weights](),
            sharding=SHARDINGS[self.sharding](),
        )

    @cached_property
    def _overlapping(self) -> AbstractSchedule:
        """The schedule behind the warm-up."""
        base = SCHEDULES[self.schedule](
            num_stages=self.num_stages,
            num_micro=self.num_micro // self.width,
            spacing=self.spacing,
        )
        if self.width == 1:
            return base
        return Wide(
            num_stages=self.num_stages, num_micro=self.num_micro, base=base, width=self.width
        )

    def _warmed_up(self, base: AbstractSchedule) -> AbstractSchedule:
        if self.warmup_steps == 0:
            return base
        return WarmUp(
            num_stages=self.num_stages,
            num_micro=self.num_micro,
            base=base,
            num_steps=self.warmup_steps,
        )

    def slot(self, kind: Kind, t: int, i: int, j: int) -> int:
        """Give the slot in which F or B of micro-batch i of step t runs on stage j."""
        schedule = self.axes.schedule
        start = schedule.forward if kind is Kind.F else schedule.backward
        return schedule.slot(t, start(i, j))

    def worker_of(self, i: int, j: int, t: int = 0) -> int:
        """Give the worker that runs micro-batch i of step t on stage j.

        Only under placement ``shared`` does it depend on the step.
        """
        return self.axes.placement.worker(t, i, j)

    def beginner(self, w: int, t: int) -> int:
        """Give the worker of w's replica that begins step t, and so has its batch."""
        placement = self.axes.placement
        return self.worker_of(0, 0, t) if placement.takes_turns else placement.replica(w)[0]

    def reads(self, t: int, i: int, j: int) -> int:
        """Give the version of stage j that F(i, j) of step t reads."""
        late, schedule = t - self.warmup_steps, self._overlapping
        if late < 0:
            return t
        newest = schedule.updates_before(late, schedule.forward(i, j), j, self.slack)
        return self.warmup_steps + self.axes.weights.forward(late, newest)

    def backward_reads(self, t: int, i: int, j: int) -> int:
        """Give the version of stage j that B(i, j) of step t reads."""
        if not self.axes.weights.looks_ahead:
            return self.reads(t, i, j)
        schedule = self.axes.schedule
        return schedule.updates_before(t, schedule.backward(i, j), j)

    def horizon(self, t: int, i: int, j: int) -> int:
        """Count the updates of stage j that F(i, j) looks ahead of the version that it reads.

        By default those between F(i, j) and B(i, j); 0 for rules that do not predict, as their
        backward reads what the forward read.
        """
        horizons = PRESETS[self.preset].horizons
        if t >= self.warmup_steps and horizons is not None and self.axes.weights.looks_ahead:
            return horizons.forward(j, self.num_stages, self.num_micro // self.width)
        return self.backward_reads(t, i, j) - self.reads(t, i, j)

    def backward_horizon(self, t: int, j: int) -> int:
        """Count the updates of stage j that a B of step t looks ahead of the version it reads."""
        horizons = PRESETS[self.preset].horizons
        if t < self.warmup_steps or horizons is None or not self.axes.weights.looks_ahead:
            return 0
        return horizons.backward(j, self.num_micro // self.width)

    @property
    def sums_by_replica(self) -> bool:
        """Say whether replicas exchange gradients once per update, each its own sum.

        The sums are added in the order of replicas. With a flush they are added micro-batch by
        micro-batch instead, so that a step has the bits of one process, at more messages.
        """
        return self.width > 1 and self.weights != "sync"

    @property
    def guesses_once_a_step(self) -> bool:
        """Say whether all micro-batches of a step read the guess of the first."""
        horizons = PRESETS[self.preset].horizons
        return horizons is not None and horizons.once_a_step

    def depth(self, j: int) -> int:
        """Count the versions of stage j that are alive at once, anywhere, at most."""
        t = self._late_step
        schedule = self.axes.schedule
        ends = ((i, schedule.backward(i, j)) for i in range(self.num_micro))
        return 1 + max(
            schedule.updates_before(t, start, j) - self.backward_reads(t, i, j)
            for i, start in ends
        )

    def delay(self, j: int) -> Fraction:
        """Count the updates by which gradients of stage j are old when they are applied.

        A mean over the micro-batches of a step, once the run is under way; predictions do not
        count against it.
        """
        return self._delays[j]

    @property
    def steps_under_way(self) -> int:
        """Bound the steps that have begun somewhere and have not ended everywhere.

        A step ends when its micro-batches have gone through all stages and back, up to S - 1
        steps of one micro-batch behind the one that begins; late updates add two.
        """
        return self.num_stages + 2

    def ended_before(self, t: int) -> int:
        """Count the steps whose gradients all stages have when step t comes to its first loss."""
        schedule = self.axes.schedule
        return schedule.updates_before(t, schedule.forward(0, self.num_stages - 1), 0)

    def is_new(self, t: int, i: int, j: int) -> bool:
        """Say whether F(i, j) of step t reads another version than in the step before."""
        return t == 0 or self.reads(t, i, j) != self.reads(t - 1, i, j)

    def owner(self, j: int) -> int:
        """Give the worker that keeps the optimizer state of stage j and updates it."""
        return self._owners[j]

    def first_readers(self, j: int) -> tuple[int, ...]:
        """List the workers that read a new version of replicated stage j first."""
        return self._first_readers[j]

    def first_read(self, v: int, j: int) -> int:
        """Give the step in which version v of stage j is read first."""
        if v <= self.warmup_steps:
            return v
        t, ends = self._late_step, (0, self.num_micro - 1)
        reads = [f(t, i, j) for i in ends for f in (self.reads, self.backward_reads)]
        return v + t - max(reads)

    def is_late(self, j: int) -> bool:
        """Say whether the owner of a replicated stage reads a new version after somebody else."""
        return self.owner(j) not in self.first_readers(j)

    def chain(self, j: int) -> tuple[int, ...]:
        """List the workers in the order in which a new version of replicated stage j travels.

        The owner first, then the others in the order in which they need it: around the ring.
        """
        return self._chains[j]

    @property
    def timetable(self) -> Iterator[tuple[int, int, Action]]:
        """Slot, worker and action of each F and B, step by step, micro-batch by micro-batch.

        Lazy and made without messages, so that thousands of workers can be drawn.
        """
        for a in versions(self, self._cells(self.num_steps)):
            yield a.s, self.worker_of(a.i or 0, a.j, a.t), a

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """For each worker, its actions in the order in which it runs them."""
        return lower(self)

    def _cells(self, num_steps: int) -> Iterator[Cell]:
        """List F and B in the order in which a micro-batch meets them."""
        schedule = self.axes.schedule
        for t in range(num_steps):
            for i in range(self.num_micro):
                for j in range(self.num_stages):
                    yield Cell(Kind.F, t, i, j, schedule.slot(t, schedule.forward(i, j)))
                for j in reversed(range(self.num_stages)):
                    yield Cell(Kind.B, t, i, j, schedule.slot(t, schedule.backward(i, j)))

    def _time(self, cell: Cell) -> tuple[int, int, int]:
        """Give the exact time of an F or B; ties go by stage, then in order of micro-batches."""
        schedule = self.axes.schedule
        kind, t, i, j, _ = cell
        start = schedule.forward if kind is Kind.F else schedule.backward
        return schedule.begin(t) + start(i, j), j, t * self.num_micro + i

    def _lag(self, i: int, j: int) -> int:
        """Count the versions by which F(i, j) is behind once the run is under way."""
        return self._late_step - self.reads(self._late_step, i, j)

    @property
    def _late_step(self) -> int:
        """A step late enough for every rule to have reached its steady state."""
        return self.warmup_steps + 2 * self.num_stages + self.slack + 2

    def _need(self, i: int, j: int) -> int:
        """Give the time at which micro-batch i first reads a version, up to a constant."""
        schedule = self.axes.schedule
        return self._lag(i, j) * schedule.period + schedule.forward(i, j)

    @cached_property
    def _first_readers(self) -> tuple[tuple[int, ...], ...]:
        readers = []
        for j in range(self.num_stages):
            needs = [self._need(i, j) for i in range(self.num_micro)]
            readers.append(tuple(i for i, need in enumerate(needs) if need == min(needs)))
        return tuple(readers)

    @cached_property
    def _delays(self) -> tuple[Fraction, ...]:
        sums = (
            sum(self._lag(i, j) for i in range(self.num_micro)) for j in range(self.num_stages)
        )
        return tuple(Fraction(total, self.num_micro) for total in sums)

    @cached_property
    def _owners(self) -> tuple[int, ...]:
        placement, sharding = self.axes.placement, self.axes.sharding
        if not placement.runs_whole_micro:
            last = -1 if self.sums_by_replica else 0  # where the sum of all replicas ends
            return tuple(placement.workers_of(j)[last] for j in range(self.num_stages))
        return tuple(
            sharding.owner(j, readers, num_workers=self.num_workers, num_stages=self.num_stages)
            for j, readers in enumerate(self._first_readers)
        )

    @cached_property
    def _chains(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(sorted(range(self.num_workers), key=lambda w: self._place_in_chain(w, j)))
            for j in range(self.num_stages)
        )

    def _place_in_chain(self, w: int, j: int) -> tuple[bool, int, int]:
        owner = self.owner(j)
        return w != owner, self._need(w, j), (w - owner) % self.num_workers


def lower(plan: Plan) -> tuple[Program, ...]:
    """Turn a plan into programs, pass by pass.

    Returns:
        For each worker, its actions in order.
    """
    # [1] Who computes what. Replicas read a version up to two steps later: see ``drain``.
    num_steps = plan.num_steps + (2 if plan.axes.placement.runs_whole_micro else 0)
    cells: list[list[Cell]] = [[] for _ in range(plan.num_workers)]
    for cell in sorted(plan._cells(num_steps), key=plan._time):
        cells[plan.worker_of(cell.i, cell.j, cell.t)].append(cell)
    # [2] Which version it reads, [3] which batch and [4] which buffers come before it.
    programs = tuple(
        tuple(relays(plan, batches(plan, versions(plan, c), w), w)) for w, c in enumerate(cells)
    )
    # [5] Where versions are made, [6] what travels, [7] what remains after the last step.
    programs = drain(plan, transfers(plan, updates(plan, programs)))
    # [8] In which order messages are received, [9] who holds the bytes.
    programs = in_order_of_sends(programs)
    return shards(plan, programs)


def make_plan(  # noqa: PLR0913  (one argument per axis and number is the public face)
    preset: str,
    *,
    num_stages: int,
    num_workers: int,
    num_micro: int | None = None,
    num_steps: int = 4,
    slack: int = 0,
    schedule: str | None = None,
    placement: str | None = None,
    weights: str | None = None,
    sharding: str | None = None,
    relayed: Iterable[int] = (),
    width: int = 1,
    tied: Iterable[Iterable[int]] = (),
    warmup_steps: int = 0,
    late_updates: bool = False,
    proved: bool = True,
) -> Plan:
    """Make a plan from a preset, with any axis replaced, and prove that it can run.

    Args:
        preset: name in :data:`PRESETS`.
        num_stages: S, at least 1.
        num_workers: N, at least 1.
        num_micro: m, micro-batches per update. [None: one per worker where workers run whole
            micro-batches, one where the rule updates after each, else one per stage; times the
            width]
        num_steps: training steps that the program covers, at least 1. [4]
        slack: slots that a new version needs to travel. [0: CDP-v2]
        schedule: replaces the preset's axis value, as do the next three. [None: the preset's]
        placement: who runs what. [None: the preset's]
        weights: which version is read. [None: the preset's]
        sharding: who keeps what. [None: the preset's, or "none" where no stage is replicated]
        relayed: stages whose module buffers travel from micro-batch to micro-batch. [()]
        width: replicas of a pipeline; micro-batch i runs on replica i % width, as its
            micro-batch i // width. [1]
        tied: groups of stages that share parameters, ascending, such as ``((0, 3),)``; the first
            of a group updates them. [()]
        warmup_steps: first steps that do not overlap, in which every forward reads the newest
            weights; behind them the rule begins as if at step 0. [0]
        late_updates: update a stage right before its new version is first read, so that all
            stages can decide together about a step. [False: as soon as its gradients are there]
        proved: also prove that the program can run; else only that axes and numbers fit, and that
             the timetable has what it reads, for those who make many plans to run one. [True]

    Returns:
        The plan; its programs are made when first asked for.

    Raises:
        PlanError: a name is unknown, or numbers and axes do not fit together.
        ValidationError: the program would break a rule; the text points at the action.

    Example:
        >>> plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, num_steps=1)
        >>> [str(a) for a in plan.programs[1]][:4]
        ['0F1@0#0', '1F1@0#0', '1B1@0#0', '1RECV_S0<0#0']
    """
    if preset not in PRESETS:
        raise PlanError(one_of(preset, list(PRESETS), "preset", 'use preset="cyclic_dp"'))
    axes = chosen_axes(
        PRESETS[preset],
        {"schedule": schedule, "placement": placement, "weights": weights, "sharding": sharding},
    )
    check_number("num_stages", num_stages)
    check_number("num_workers", num_workers)
    check_number("num_steps", num_steps)
    check_number("slack", slack, least=0)
    check_number("width", width)
    check_number("warmup_steps", warmup_steps, least=0)
    if num_micro is None:
        num_micro = default_num_micro(preset, axes, num_stages, num_workers) * width
    check_number("num_micro", num_micro)
    plan = Plan(
        preset=preset,
        num_stages=num_stages,
        num_workers=num_workers,
        num_micro=num_micro,
        num_steps=num_steps,
        slack=slack,
        **axes,
        relayed=tuple(sorted(set(relayed))),
        spacing=default_spacing(PRESETS[preset], axes["placement"], num_stages, num_micro),
        width=width,
        tied=tuple(sorted({tuple(stages) for stages in tied})),
        warmup_steps=warmup_steps,
        late_updates=late_updates,
    )
    if proved:
        return _proved(plan)
    check_fit(plan)
    check_timetable(plan)
    return plan


@lru_cache(maxsize=32)
def _proved(plan: Plan) -> Plan:
    """Return an equal plan that can run, with what has been derived of it before."""
    check_fit(plan)
    check_timetable(plan)
    prove(plan)
    return plan


def prove(plan: Plan) -> None:
    """Prove that the program of a plan, whose axes and numbers fit, can run.

    Raises:
        ValidationError: the program would break a rule; the text points at the action.
    """
    validate(probe(plan))
