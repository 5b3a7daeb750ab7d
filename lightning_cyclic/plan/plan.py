"""Plan: one value of each axis plus the numbers; everything else about it is derived.

    make_plan(...)  ->  Plan  ->  program_of(plan): what every worker does, step by step

A preset is only a name for four axis values. Who owns a stage, which version each forward reads,
how late gradients are: all of it follows, from integers alone. A plan knows nothing of programs,
which passes make of it (lower.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, wraps
from itertools import product
from math import lcm
from typing import TypeVar, cast, final

from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.plan.presets import (
    PLACEMENTS,
    PRESETS,
    SCHEDULES,
    SHARDINGS,
    WEIGHTS,
    Axes,
)
from lightning_cyclic.plan.schedules import AbstractSchedule, Rounds, SideBySide, ceil_div
from lightning_cyclic.plan.tiers import Tiers
from lightning_cyclic.plan.weights import LocalSteps

T = TypeVar("T")


@final
@dataclass(frozen=True, kw_only=True)  # no slots: what is derived is cached in __dict__
class Plan:
    """Hold one value of each axis and the numbers; derive the rest.

    Made by :func:`~lightning_cyclic.plan.make.make_plan`, which says what the numbers are, and
    checks that everything fits.

    Args:
        spacing: slots between a micro-batch and the next on the cyclic schedule.
        updates_meet: whether owners, who wait for each other's norms, update at one point: where
            the first worker reads a new version of sharded weights, else each behind its step. If
            not, each updates where it first reads a new version.
        tiers: what is in memory only while it is used. [all is there]
        offloads: whether what a forward leaves is away between it and its backward.
        local: the numbers of weights "local". [none: other weights]
        to_owners: whether gradients travel to owners one by one, whoever keeps the weights.
    """

    preset: str
    num_stages: int
    num_workers: int
    num_microbatches: int
    num_steps: int
    slack: int
    schedule: str
    placement: str
    weights: str
    sharding: str
    relayed: tuple[int, ...]
    spacing: Fraction
    replicas: int = 1
    tied: tuple[tuple[int, ...], ...] = ()
    late_updates: bool = False
    norms: str = "none"
    relayed_until: tuple[int, ...] = ()
    updates_meet: bool = False
    group_size: int = 1
    tiers: Tiers | None = None
    offloads: bool = False
    local: LocalSteps | None = None
    to_owners: bool = False

    @cached_property
    def axes(self) -> Axes:
        """The four axis values as objects."""
        return Axes(
            schedule=self._schedule,
            placement=PLACEMENTS[self.placement](
                num_stages=self.num_stages,
                num_workers=self.num_workers,
                num_microbatches=self.num_microbatches,
                replicas=self.replicas,
                shape=SCHEDULES[self.schedule].shape,
            ),
            weights=self.local or WEIGHTS[self.weights](),
            sharding=SHARDINGS[self.sharding](),
        )

    @cached_property
    def _one_round(self) -> AbstractSchedule:
        """The schedule of one replica, or of one round of all."""
        num_microbatches = self.num_microbatches // self.replicas // self.rounds
        of_groups = SCHEDULES[self.schedule](
            num_stages=self.num_stages,
            num_microbatches=num_microbatches // self.group_size,
            spacing=self.spacing,
            depth=self.num_workers // self.replicas,
        )
        return self._side_by_side(of_groups, num_microbatches, self.group_size)

    @cached_property
    def _schedule(self) -> AbstractSchedule:
        """The schedule of all replicas, and of all rounds."""
        if self.rounds == 1:
            return self._side_by_side(self._one_round, self.num_microbatches, self.replicas)
        return Rounds(
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            base=self._one_round,
            in_succession=bool(self.relayed),
        )

    def _side_by_side(
        self, base: AbstractSchedule, num_microbatches: int, size: int
    ) -> AbstractSchedule:
        if size == 1:
            return base
        return SideBySide(
            num_stages=self.num_stages,
            num_microbatches=num_microbatches,
            base=base,
            size=size,
        )

    @property
    def rounds(self) -> int:
        """Count the micro-batches that a worker runs in a step, where it runs whole ones; else 1.

        All of them read the version that a worker with one of them reads, so that how many there
        are changes nothing but the batch. Their gradients stay with the worker until the last,
        which adds their sum to that of the workers before: in the order of workers.
        """
        if not PLACEMENTS[self.placement].runs_whole_micro:
            return 1
        return max(1, self.num_microbatches // self.num_workers)

    def handed_on_as(self, i: int) -> int:
        """Count the micro-batches of a step whose buffers come before those of micro-batch i.

        Rounds of a worker come one after the other, those of the next worker behind them.
        """
        number, w = divmod(i, self.num_workers) if self.rounds > 1 else (0, i)
        return w * self.rounds + number

    def slot(self, kind: Kind, t: int, i: int, j: int) -> int:
        """Give the slot in which F, B, I or W of micro-batch i of step t starts on stage j."""
        schedule = self.axes.schedule
        return schedule.slot(t, schedule.start(kind, i, j))

    def last_slot(self, a: Action) -> int:
        """Give the last slot of a cell."""
        schedule = self.axes.schedule
        return a.s + schedule.length(a.kind) // schedule.unit - 1

    def end(self, t: int, j: int) -> int:
        """Give the last slot in which gradients of stage j are made in step t."""
        schedule = self.axes.schedule
        return schedule.slot(t, schedule.whole(j) - schedule.unit)

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
        schedule = self.axes.schedule
        if self.rounds > 1:  # all read what they would if there were one
            schedule, i = self._one_round, i % self.num_workers
        newest = schedule.updates_before(t, schedule.start(Kind.F, i, j), j, self.slack)
        return self.axes.weights.forward(t, newest)

    def backward_reads(self, t: int, i: int, j: int) -> int:
        """Give the version of stage j that B(i, j) of step t reads."""
        if not self.axes.weights.looks_ahead:
            return self.reads(t, i, j)
        schedule = self.axes.schedule
        return schedule.updates_before(t, schedule.start(Kind.B, i, j), j)

    def horizon(self, t: int, i: int, j: int) -> int:
        """Count the updates of stage j that F(i, j) looks ahead of the version that it reads.

        By default those between F(i, j) and B(i, j); 0 for rules that do not predict, as their
        backward reads what the forward read.
        """
        if self._predicts_round_trips:
            return j // 2 + self.num_stages - 1 - j
        return self.backward_reads(t, i, j) - self.reads(t, i, j)

    def backward_horizon(self, j: int) -> int:
        """Count the updates of stage j that a B looks ahead of the version that it reads."""
        return j // 2 if self._predicts_round_trips else 0

    @property
    def _predicts_round_trips(self) -> bool:
        return PRESETS[self.preset].round_trips and self.axes.weights.looks_ahead

    @property
    def sums_by_replica(self) -> bool:
        """Say whether replicas exchange gradients once per update, each its own sum.

        The sums are added in the order of replicas. Of pipelines with a flush they are added
        micro-batch by micro-batch instead, so that a step has the bits of one process, at more
        messages.
        """
        return self.rounds > 1 or (self.replicas > 1 and self.weights != "sync")

    @property
    def updates_apart(self) -> bool:
        """Say whether the optimizer is called for one stage at a time.

        An owner whose older version others still read makes the new one in a copy. Stage by
        stage, the gradients of one are gone before the next is copied. Where all stages are
        clipped together their gradients are needed at once. So is their optimizer state, unless it
        comes and goes.
        """
        _, _, weights, sharding = self.axes
        is_lean = sharding.gathers and not weights.at_end_of_step and self.norms == "none"
        return is_lean or self.tiers is not None

    @property
    def updates_early(self) -> bool:
        """Say whether each stage is updated right behind its backward, before the next's."""
        return self.tiers is not None and self.tiers.early

    @property
    def num_groups(self) -> int:
        """Count the groups of workers; a worker alone is one."""
        return self.num_workers // self.group_size

    def group(self, w: int) -> range:
        """List the workers of w's group."""
        first = w - w % self.group_size
        return range(first, first + self.group_size)

    def lead(self, w: int, j: int) -> int:
        """Give the worker through which w's group exchanges stage j with other groups.

        They take turns, so that stages that are sent one after the other leave by several links.
        """
        return self.group(w)[(self.num_stages - 1 - j) % self.group_size]

    @property
    def owners_add(self) -> bool:
        """Say whether owners are sent the gradients of all micro-batches, and add them up."""
        return self.axes.sharding.gathers or self.to_owners

    @property
    def sends_gradients(self) -> bool:
        """Say whether gradients travel, each to who adds several; else sums go to gradients."""
        is_grouped = self.axes.placement.runs_whole_micro and self.group_size > 1
        return self.owners_add or is_grouped

    @property
    def copies_of_stages(self) -> int:
        """Count who holds every stage: workers that run whole micro-batches, or pipelines."""
        return self.num_workers if self.axes.placement.runs_whole_micro else self.replicas

    def depth(self, j: int) -> int:
        """Count the versions of stage j that are alive at once, anywhere, at most."""
        t = self.late_step
        schedule = self.axes.schedule
        ends = ((i, schedule.start(Kind.B, i, j)) for i in range(self.num_microbatches))
        return 1 + max(
            schedule.updates_before(t, start, j) - self.backward_reads(t, i, j)
            for i, start in ends
        )

    @property
    def has_one_version(self) -> bool:
        """Say whether one worker makes all weights, and always reads the newest."""
        is_local = self.axes.weights.is_local  # beside outer weights
        late = map(self.delay, range(self.num_stages))
        return self.num_workers == 1 and not is_local and not any(late)

    def delay(self, j: int) -> Fraction:
        """Count the updates by which gradients of stage j are old when they are applied.

        A mean over the micro-batches of a step, once the run is under way; predictions do not
        count against it.
        """
        lags = (self.lag(self.late_step, i, j) for i in range(self.num_microbatches))
        return Fraction(sum(lags), self.num_microbatches)

    @property
    def steps_under_way(self) -> int:
        """Bound the steps that have begun somewhere and have not ended everywhere.

        A step ends when its micro-batches have gone through all stages and back; versions are
        first read, and late updates made, up to two steps later.
        """
        schedule = self.axes.schedule
        whole = max(map(schedule.whole, range(self.num_stages)))
        return ceil_div(whole, schedule.period) + 2

    @property
    def decides_at_end(self) -> bool:
        """Say whether workers wait, where a step ends, for the norms of all its gradients."""
        if self.norms == "all":
            return self.axes.weights.at_end_of_step
        return self.norms == "owners" and not self.late_updates

    @property
    def updates_hear_norms(self) -> bool:
        """Say whether an update waits for the norms of all gradients of its step."""
        return self.decides_at_end or (self.norms != "none" and self.late_updates)

    def ended_before(self, t: int) -> int:
        """Count the steps whose gradients all stages have when step t comes to its first loss.

        Of workers that run whole micro-batches, those whose updates all of them have read: then
        each knows, from the versions alone, how every update came out.
        """
        if self.axes.placement.runs_whole_micro:
            return max(t - self._most_behind, 0)
        schedule = self.axes.schedule
        return schedule.updates_before(t, schedule.start(Kind.F, 0, self.num_stages - 1), 0)

    def is_new(self, t: int, i: int, j: int) -> bool:
        """Say whether F(i, j) of step t reads another version than in the step before."""
        return t == 0 or self.reads(t, i, j) != self.reads(t - 1, i, j)

    def owner(self, j: int) -> int:
        """Give the worker that keeps the optimizer state of stage j and updates it."""
        return self._owners[j]

    def exchanges(self, t: int, j: int) -> bool:
        """Say whether workers exchange stage j in step t; else its gradients stay with each."""
        return self.axes.weights.exchanges(t, j, self.num_stages)

    def used(self, t: int, j: int) -> int | None:
        """Give the step whose exchange of stage j its update of step t uses; None for none."""
        return self.axes.weights.used(t, j, self.num_stages)

    def makes_versions(self, w: int, j: int) -> bool:
        """Say whether versions of stage j are made by worker w, and not sent to it."""
        return self.axes.weights.is_local or self.owner(j) == w

    def optimizes(self, w: int, j: int) -> bool:
        """Say whether worker w calls the optimizer for stage j, and so has its state."""
        return self.axes.weights.is_local or self.owner(j) == w

    @property
    def repeats(self) -> int:
        """Count the steps after which all workers do the same again."""
        _, placement, weights, _ = self.axes
        return lcm(placement.repeats, weights.repeats(self.num_stages))

    @property
    def shortest(self) -> Plan:
        """The plan with no two steps alike between two exchanges, where there are local steps."""
        if self.local is None:
            return self
        return replace(self, local=self.local.shorter(self.num_stages))

    def first_read(self, v: int, j: int) -> int:
        """Give the step in which version v of stage j is read first."""
        if v == 0:
            return 0
        t, ends = self.late_step, (0, self.num_microbatches - 1)
        reads = [f(t, i, j) for i in ends for f in (self.reads, self.backward_reads)]
        return v + t - max(reads)

    def chain(self, j: int) -> tuple[int, ...]:
        """List the workers in the order in which a new version of replicated stage j travels.

        The owner first, then those of other groups that lead in it, in the order in which they
        need it: around the ring.
        """
        return self._chains[j]

    def giver(self, w: int, j: int) -> int | None:
        """Give the worker from which w gets new versions of replicated stage j; None: itself."""
        lead = self.lead(w, j)
        if w != lead:
            return lead
        chain = self.chain(j)
        return chain[chain.index(w) - 1] if w != chain[0] else None

    def takers(self, w: int, j: int) -> tuple[int, ...]:
        """List the workers that get new versions of replicated stage j from worker w.

        Those of its group first, which read them in the same slot.
        """
        if w != self.lead(w, j):
            return ()
        chain = self.chain(j)
        place = chain.index(w) + 1
        return (*(x for x in self.group(w) if x != w), *chain[place : place + 1])

    @property
    def is_staggered(self) -> bool:
        """Say whether workers that begin together wait for a signal of the one before.

        Not where updates make all of them meet inside their forwards (the norm over all stages
        under freshest weights): who waits to begin would never get there.
        """
        meets = self.norms != "none" and self.weights == "freshest"
        runs_whole = self.axes.placement.runs_whole_micro
        return runs_whole and self.schedule == "cyclic" and self.num_groups > 1 and not meets

    @property
    def flows(self) -> bool:
        """Say whether single stages begin with a step before those ahead of it have ended."""
        _, placement, weights, _ = self.axes
        overlaps = placement.overlaps and not weights.at_end_of_step
        return overlaps and not placement.runs_whole_micro

    @property
    def late_step(self) -> int:
        """Give a step late enough for every rule to read as it ever will."""
        return 2 * self.num_stages + self.slack + 2

    @property
    def timetable(self) -> Iterator[tuple[int, int, Action]]:
        """Slot, worker and action of each F, B, I and W, step by step, micro-batch by micro-batch.

        Lazy and made without messages, so that thousands of workers can be drawn.
        """
        kinds_of, stages = self.axes.schedule.kinds, range(self.num_stages)
        for t, i in product(range(self.num_steps), range(self.num_microbatches)):
            for j in stages:
                yield self._cell(Kind.F, t, i, j, self.reads(t, i, j))
            for j in reversed(stages):
                v = self.backward_reads(t, i, j)
                yield from (self._cell(kind, t, i, j, v) for kind in kinds_of(i, j)[1:])

    def _cell(self, kind: Kind, t: int, i: int, j: int, v: int) -> tuple[int, int, Action]:
        s = self.slot(kind, t, i, j)
        return s, self.worker_of(i, j, t), Action(kind=kind, t=t, i=i, j=j, v=v, s=s)

    def time(self, a: Action) -> tuple[int, int, int]:
        """Give the exact time of a cell; ties go by stage, then in order of micro-batches."""
        schedule, i = self.axes.schedule, a.i or 0
        start = schedule.begin(a.t) + schedule.start(a.kind, i, a.j)
        return start, a.j, a.t * self.num_microbatches + i

    def lag(self, t: int, i: int, j: int) -> int:
        """Count the versions by which F(i, j) of step t is behind."""
        return t - self.reads(t, i, j)

    def is_settled(self, t: int) -> bool:
        """Say whether forwards of step t lag as those of any late step do."""
        cells = product(range(self.num_microbatches), range(self.num_stages))
        return all(self.lag(t, i, j) == self.lag(self.late_step, i, j) for i, j in cells)

    def _need(self, i: int, j: int) -> int:
        """Give the time at which micro-batch i first reads a version, up to a constant."""
        schedule = self._one_round if self.rounds > 1 else self.axes.schedule
        return self.lag(self.late_step, i, j) * schedule.period + schedule.start(Kind.F, i, j)

    @cached_property
    def _most_behind(self) -> int:
        """The most versions by which a forward of a late step is behind."""
        cells = product(range(self.num_microbatches), range(self.num_stages))
        return max(self.lag(self.late_step, i, j) for i, j in cells)

    @cached_property
    def first_readers(self) -> tuple[tuple[int, ...], ...]:
        """Of each replicated stage the workers that read a new version first."""
        readers = []
        for j in range(self.num_stages):
            needs = [self._need(i, j) for i in range(self.num_microbatches // self.rounds)]
            least = min(needs)
            readers.append(tuple(i for i, need in enumerate(needs) if need == least))
        return tuple(readers)

    @cached_property
    def _owners(self) -> tuple[int, ...]:
        placement = self.axes.placement
        if not placement.runs_whole_micro:
            last = -1 if self.sums_by_replica else 0  # where the sum of all replicas ends
            return tuple(placement.workers_of(j)[last] for j in range(self.num_stages))
        return tuple(
            self.lead(group * self.group_size, j)
            for j, group in enumerate(map(self._owning_group, range(self.num_stages)))
        )

    def _owning_group(self, j: int) -> int:
        """Give the group that owns a replicated stage; a worker alone is one."""
        first_readers = tuple({w // self.group_size: None for w in self.first_readers[j]})
        return self.axes.sharding.owner(
            j, first_readers, num_workers=self.num_groups, num_stages=self.num_stages
        )

    @cached_property
    def _chains(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(self._chain_of, range(self.num_stages)))

    def _chain_of(self, j: int) -> tuple[int, ...]:
        owner, leads = self.owner(j), range(self.lead(0, j), self.num_workers, self.group_size)
        places = {w: (w != owner, self._need(w, j), (w - owner) % self.num_workers) for w in leads}
        return tuple(sorted(places, key=places.__getitem__))


def kept(make: Callable[[Plan], T]) -> Callable[[Plan], T]:
    """Keep what a function makes of a plan for as long as the plan is there."""

    @wraps(make)
    def of(plan: Plan) -> T:
        found = vars(plan)
        if make.__name__ not in found:
            found[make.__name__] = make(plan)
        return cast("T", found[make.__name__])

    return of
