"""proof: show, before any process starts, that a program can run and is right.

[1] In the timetable, everything is computed after what it needs.
[2] The program is replayed on integers: nobody waits for ever, every message meets the one that
    was meant on a channel that is one queue, and what an action takes is there (replay.py); from
    the beginning, and again behind a flush, which leaves nothing pending. Workers that run whole
    steps need nobody's next step to end their own.
[3] No worker keeps more versions or activations than the timetable says.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, Final, NoReturn, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import COMPUTE, Action, Kind, Program
from lightning_cyclic.plan.check.replay import Replay
from lightning_cyclic.plan.clock import refuse
from lightning_cyclic.plan.dataflow import live_activations, live_versions, peak
from lightning_cyclic.plan.lower import program_of, programs_of
from lightning_cyclic.plan.plan import Plan, kept

_USE_MADE = "use the programs of make_plan(...)"
_MOST_CELLS = 2_000  # (micro-batch, stage, step) cells that a probe may have: about a second
_TOO_MANY_CELLS = 200_000  # of plans that only they themselves can stand for: some minutes
# What a smaller plan may have fewer of, and the lists of stages that it has fewer of with them.
SMALLER: Final = frozenset(
    {
        "num_stages", "num_workers", "num_microbatches", "num_steps", "slack", "spacing",
        "replicas", "group_size", "relayed", "tied", "local",
    }
)  # fmt: skip
# What it has as the plan has it, as it says nothing about single stages or workers.
KEPT: Final = frozenset(
    {
        "preset", "schedule", "placement", "weights", "sharding", "late_updates", "norms",
        "updates_meet", "offloads", "to_owners",
    }
)  # fmt: skip


def check_timetable(plan: Plan) -> None:
    """Check that the timetable computes everything after what it needs.

    Of each stage, the first and the last micro-batch (of the first round and of all) stand for
    all: starts grow with i, and a rule that asks for too much asks it of the first.

    Raises:
        ValidationError: an F or B starts too early for the version that it reads.
    """
    for t in range(3):
        for j in range(plan.num_stages):
            for i in sorted(
                {0, plan.num_microbatches // plan.rounds - 1, plan.num_microbatches - 1}
            ):
                _check_version(plan, Kind.F, t, i, j, plan.reads(t, i, j))
                _check_version(plan, Kind.B, t, i, j, plan.backward_reads(t, i, j))
                _check_order(plan, t, i, j)


def _check_version(plan: Plan, kind: Kind, t: int, i: int, j: int, v: int) -> None:
    schedule = plan.axes.schedule
    newest = schedule.updates_before(t, schedule.start(kind, i, j), j)
    if v > newest:
        a = Action(kind=kind, t=t, i=i, j=j, v=v, s=plan.slot(kind, t, i, j))
        refuse(
            plan,
            a,
            plan.worker_of(i, j, t),
            given=f"weights {plan.weights!r} on schedule {plan.schedule!r} read version {v} of "
            f"stage {j} before its update has been made",
            allowed=f"version {newest} or older, which exists in that slot",
            todo='use weights="delayed" or weights="freshest", or schedule="lockstep" '
            'or schedule="gpipe"',
        )


def _check_order(plan: Plan, t: int, i: int, j: int) -> None:
    """Check that a micro-batch meets its stages one after the other, there and back."""
    schedule = plan.axes.schedule
    is_last = j + 1 == plan.num_stages
    kinds = schedule.kinds(i, j)
    needs = {
        Kind.F: schedule.end(Kind.F, i, j - 1) if j else 0,
        kinds[1]: schedule.end(Kind.F, i, j)
        if is_last
        else schedule.end(schedule.kinds(i, j + 1)[1], i, j + 1),
    }
    if Kind.W in kinds:
        needs[Kind.W] = schedule.end(Kind.I, i, j)
    for kind, needed in needs.items():
        if schedule.start(kind, i, j) < needed:
            a = Action(kind=kind, t=t, i=i, j=j, s=plan.slot(kind, t, i, j))
            refuse(
                plan,
                a,
                plan.worker_of(i, j, t),
                given=f"schedule {plan.schedule!r} starts this before what it needs has ended",
                allowed="F after F of the stage before, B after B of the stage behind it",
                todo="move it to a later slot",
            )


def validate(plan: Plan, programs: tuple[Program, ...] | None = None) -> None:
    """Check a plan's programs, or others for the same plan, action by action.

    Args:
        programs: one per worker, of the plan's steps and a flush behind them. [the plan's own]

    Raises:
        ValidationError: an action breaks a rule; the text has the timetable with an arrow.
    """
    check_timetable(plan)
    programs = programs_of(plan) if programs is None else programs
    replay = Replay(plan)
    replay.run(programs)
    replay.check_flushed(plan.num_steps - 1)
    check_completeness(plan, programs)
    check_buffers(plan, programs)


def check_completeness(plan: Plan, programs: Sequence[Program]) -> None:
    """Check that each F and B is run once, by its worker and on its version."""
    done = Counter(
        (a, w) for w, program in enumerate(programs) for a in program if a.kind in COMPUTE
    )
    for _, w, a in plan.timetable:
        if done[a, w] != 1:
            refuse(
                plan,
                a,
                w,
                given=f"on the version that the rule names, runs {done[a, w]} times",
                allowed="once, by the worker that the placement names",
                todo=_USE_MADE,
            )


def check_buffers(plan: Plan, programs: Sequence[Program]) -> None:
    """Check that no worker keeps more than the timetable says."""
    bounds = _activations_in_timetable(plan)
    for w, program in enumerate(programs):
        found = [("activations", live_activations(program), bounds[w])]
        for j, most in live_versions(program).items():
            found.append((f"versions of stage {j}", most, plan.depth(j)))
        for what, most, bound in found:
            if most > bound:
                refuse(
                    plan,
                    next(a for a in program if a.kind in COMPUTE),
                    w,
                    given=f"keeps {most} {what} at once",
                    allowed=f"{bound}, as the timetable says",
                    todo=_USE_MADE,
                )


def _activations_in_timetable(plan: Plan) -> dict[int, int]:
    """Count the most activations that each worker keeps, by the slots of the timetable."""
    spans: defaultdict[int, dict[tuple[int, int, int], list[int]]] = defaultdict(dict)
    one_by_one = 0 if plan.axes.placement.overlaps else 1 << 32
    for s, w, a in plan.timetable:
        key, slot = (a.t, a.i or 0, a.j), s + a.t * one_by_one
        # within a slot, what is freed comes after what is made: a worker may do both there
        spans[w].setdefault(key, []).append(2 * slot if a.kind is Kind.F else 2 * slot + 1)
    return {
        w: int(peak((begin, end, 1) for begin, *_, end in found.values()))
        for w, found in spans.items()
    }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Say on which plan it was shown that a program can run.

    Args:
        is_smaller: whether it stands for one with more workers, stages or micro-batches.
    """

    plan: Plan
    is_smaller: bool

    def __str__(self) -> str:
        steps = f"{self.plan.num_steps} steps and two flushes replayed"
        if not self.is_smaller:
            return f"proved on the plan itself: {steps}"
        return (
            f"proved on a smaller plan that stands for it (num_workers={self.plan.num_workers}, "
            f"num_stages={self.plan.num_stages}, num_microbatches={self.plan.num_microbatches}, "
            f"group_size={self.plan.group_size}{self._period}): {steps}; what "
            "depends on the numbers themselves was checked on the plan"
        )

    @property
    def _period(self) -> str:
        return "" if self.plan.local is None else f", every={self.plan.local.every}"


@kept
def proof_of(plan: Plan) -> Proof:
    """Prove that the program of a plan, whose axes and numbers fit, can run.

    Raises:
        ValidationError: the program would break a rule; the text points at the action.
    """
    small = probe(plan)
    _replay_with_flushes(small)
    validate(small)
    is_smaller = _shape(small) != _shape(plan)
    return Proof(plan=small, is_smaller=is_smaller)


def _shape(plan: Plan) -> tuple[int, ...]:
    numbers = plan.num_workers, plan.num_stages, plan.num_microbatches, plan.group_size
    return *numbers, plan.repeats


def _replay_with_flushes(plan: Plan) -> None:
    """Replay some steps, a flush in the middle, as many steps more, and a flush at the end."""
    program, workers, middle = program_of(plan), range(plan.num_workers), plan.num_steps // 2
    replay = Replay(plan)
    ended = -1
    for t in range(plan.num_steps):
        begins = t == ended + 1
        replay.run([program.step(w, t, ended=ended, starts=begins) for w in workers])
        if plan.axes.placement.runs_whole_micro:  # else a step goes on while the next ones run
            replay.check_step_ended()
        if t in (middle, plan.num_steps - 1):
            replay.run([program.flush(w, t, ended=ended) for w in workers])
            replay.check_flushed(t)
            ended = t


def probe(plan: Plan) -> Plan:
    """Make a plan that is cheap to check and stands for this one.

    What the passes do depends on numbers only through who reads a version first and by how much
    each forward lags, never on how many workers or stages there are. So a few steps, until the
    program repeats, stand for all; and many workers may be reduced in proportion to stages and
    micro-batches, which keeps those relations. What does depend on the numbers themselves,
    whether a version exists in time, is checked on the plan itself. So is all of a plan of which
    a smaller one would leave something out.

    Raises:
        PlanError: nothing smaller stands for the plan, and to replay it would take too long.
    """
    few = replace(plan.shortest, num_steps=_enough_steps(plan))
    num_cells = plan.num_microbatches * plan.num_stages * few.num_steps
    if num_cells <= _MOST_CELLS:
        return few
    if left_out := _left_out(plan):
        if num_cells > _TOO_MANY_CELLS:
            _refuse_to_replay(plan, left_out)
        return few
    small = replace(few, **_fewer(few))
    return replace(small, num_steps=_enough_steps(small))


def _left_out(plan: Plan) -> list[str]:
    """Name what a smaller plan would not say as this one does.

    Who waits for buffers inside a step, and is waited for by all owners there, differs from stage
    to stage.
    """
    said = {f.name: getattr(plan, f.name) != f.default for f in fields(plan)}
    found = [name for name in said if said[name] and name not in SMALLER | KEPT]
    return found + ["relayed", "norms"] * (bool(plan.relayed) and plan.norms != "none")


def _refuse_to_replay(plan: Plan, left_out: list[str]) -> NoReturn:
    given = ", ".join(f"{name}={getattr(plan, name)!r}" for name in left_out)
    raise PlanError(
        f"{given} with num_stages={plan.num_stages}, num_workers={plan.num_workers} and "
        f"num_microbatches={plan.num_microbatches}: no smaller plan stands for it, and to prove "
        "it itself would "
        "take many minutes; allowed: fewer stages and workers, norms='none' (clip_norm='stage') "
        "where "
        "buffers change in their own stage only, or relayed=() (no buffers that training "
        "changes); use fewer stages"
    )


def _enough_steps(plan: Plan) -> int:
    """Return how many steps show the program's prologue and, behind a flush, its block."""
    period = plan.shortest.axes.weights.repeats(plan.num_stages)
    return 2 * (period + plan.steps_under_way)


def _fewer(plan: Plan) -> dict[str, Any]:
    """Give what a smaller plan has fewer of."""
    replicas = min(
        plan.replicas, 3
    )  # first, last and one between: replicas differ in nothing else
    size = min(plan.group_size, 3)  # the same of groups
    of_each = plan.num_microbatches // plan.replicas // plan.rounds // plan.group_size
    most = 8 if plan.local is None else 6  # whose period has steps for each stage
    scale = Fraction(most, max(plan.num_stages, of_each))
    num_stages = max(min(plan.num_stages, 2), round(plan.num_stages * scale))
    num_microbatches = min(of_each, max(num_stages, round(of_each * scale))) * replicas
    if plan.axes.weights.per_micro:
        num_microbatches = max(1, round(of_each * scale)) * replicas
    num_workers = min(plan.num_workers // plan.replicas, num_stages) * replicas
    if plan.axes.placement.shape != "block":  # with as many stages on each
        depth = plan.num_workers // plan.replicas
        each = plan.num_stages // depth
        depth = min(depth, max(num_stages // each, 2))
        num_workers, num_stages = depth * replicas, depth * each
        num_microbatches = min(of_each, max(num_stages, round(of_each * scale))) * replicas
    spacing = plan.spacing
    if plan.axes.placement.runs_whole_micro:
        num_groups = max(1, round(plan.num_groups * scale))
        num_workers = num_groups * size
        num_microbatches = num_workers * min(plan.rounds, 3)  # first, last and one between
        if spacing * plan.num_groups == 2 * plan.num_stages:
            spacing = Fraction(2 * num_stages, num_groups)
    elif spacing * plan.num_microbatches == 2 * plan.num_stages:
        spacing = Fraction(2 * num_stages, num_microbatches)
    return {
        "num_stages": num_stages,
        "num_workers": num_workers,
        "num_microbatches": num_microbatches,
        "spacing": spacing,
        "slack": max(round(plan.slack * scale), bool(plan.slack)),
        "relayed": _scaled(plan.relayed, plan.num_stages, num_stages),
        "replicas": replicas,
        "group_size": size,
        "tied": _scaled_ties(plan, num_stages),
        "local": None if plan.local is None else plan.local.shorter(num_stages),
    }


def _scaled(stages: tuple[int, ...], whole: int, part: int) -> tuple[int, ...]:
    return tuple(sorted({j * part // whole for j in stages}))


def _scaled_ties(plan: Plan, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Scale the stages of each group; those that become one are neighbours."""
    groups = {_scaled(group, plan.num_stages, num_stages) for group in plan.tied}
    return tuple(sorted({g if len(g) > 1 else _neighbours(g[0], num_stages) for g in groups}))


def _neighbours(j: int, num_stages: int) -> tuple[int, int]:
    first = min(j, num_stages - 2)
    return first, first + 1
