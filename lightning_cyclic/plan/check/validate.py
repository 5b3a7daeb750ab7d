"""validate: prove on the program, before any process starts, that it can run and is right.

[1] In the timetable, everything is computed after what it needs, versions included.
[2] In the program, with receives that block, no worker waits for ever; messages pair up in order;
    every version, activation, gradient and sum that an action takes is there (replay.py).
[3] No worker keeps more versions or activations than the timetable says.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Program
from lightning_cyclic.plan.check.refusal import refuse
from lightning_cyclic.plan.check.replay import replay
from lightning_cyclic.plan.dataflow import live_activations, live_versions

if TYPE_CHECKING:
    from lightning_cyclic.plan import Plan

_COMPUTE = (Kind.F, Kind.B)
_MOST_CELLS = 2_000  # (micro-batch, stage, step) cells that a probe may have: about a second


def validate(plan: Plan, programs: tuple[Program, ...] | None = None) -> None:
    """Check a plan's programs, or others for the same plan, action by action.

    Args:
        plan: whose numbers and rules hold.
        programs: one per worker, such as read from CSV. [None: the plan's own]

    Raises:
        ValidationError: an action breaks a rule; the text has the timetable with an arrow.
    """
    check_timetable(plan)
    programs = plan.programs if programs is None else programs
    replay(plan, programs)
    _check_completeness(plan, programs)
    _check_buffers(plan, programs)


def probe(plan: Plan) -> Plan:
    """Make a plan that is cheap to check and stands for this one.

    What the passes do depends on numbers only through who reads a version first and by how much
    each forward lags, never on how many workers or stages there are. So a few steps, until the
    first versions have been round, stand for all; and many workers may be reduced in proportion
    to stages and micro-batches, which keeps those relations. What does depend on the numbers
    themselves, whether a version exists in time, is checked on the plan itself.
    """
    alike = min(plan.warmup_steps, 2)  # synchronous steps differ in nothing behind the first
    few = replace(plan, warmup_steps=alike)
    few = replace(few, num_steps=_steps_to_steady_state(few))
    if plan.num_micro * plan.num_stages * few.num_steps <= _MOST_CELLS:
        return few
    return _reduced(few)


def _steps_to_steady_state(plan: Plan) -> int:
    return plan.warmup_steps + 3 + 2 * plan.num_stages * plan.width // plan.num_micro


def _reduced(plan: Plan) -> Plan:
    width = min(plan.width, 3)  # first, last and one between: replicas differ in nothing else
    of_each = plan.num_micro // plan.width
    scale = Fraction(8, max(plan.num_stages, of_each))
    num_stages = max(1, round(plan.num_stages * scale))
    num_micro = min(of_each, max(num_stages, round(of_each * scale))) * width
    if plan.axes.weights.per_micro:
        num_micro = max(1, round(of_each * scale)) * width
    num_workers = min(plan.num_workers // plan.width, num_stages) * width
    if plan.axes.placement.runs_whole_micro:
        num_workers = num_micro = max(1, round(plan.num_micro * scale))
    spacing = plan.spacing
    if spacing * plan.num_micro == 2 * plan.num_stages:
        spacing = Fraction(2 * num_stages, num_micro)
    small = replace(
        plan,
        num_stages=num_stages,
        num_workers=num_workers,
        num_micro=num_micro,
        spacing=spacing,
        slack=round(plan.slack * scale),
        relayed=_scaled(plan.relayed, plan.num_stages, num_stages),
        width=width,
        tied=_scaled_ties(plan, num_stages),
    )
    return replace(small, num_steps=_steps_to_steady_state(small))


def _scaled(stages: tuple[int, ...], whole: int, part: int) -> tuple[int, ...]:
    return tuple(sorted({j * part // whole for j in stages}))


def _scaled_ties(plan: Plan, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Scale the stages of each group, and drop groups whose stages become one."""
    groups = {_scaled(group, plan.num_stages, num_stages) for group in plan.tied}
    return tuple(sorted(group for group in groups if len(group) > 1))


def check_timetable(plan: Plan) -> None:
    """Check that the timetable computes everything after what it needs.

    Of each stage, the first and the last micro-batch stand for all: starts grow with i, and a
    rule that asks for too much asks it of the first.

    Raises:
        ValidationError: an F or B starts too early for the version that it reads.
    """
    for t in sorted({0, 1, 2, *range(plan.warmup_steps, plan.warmup_steps + 3)}):
        for j in range(plan.num_stages):
            for i in sorted({0, plan.num_micro - 1}):
                _check_version(plan, Kind.F, t, i, j, plan.reads(t, i, j))
                _check_version(plan, Kind.B, t, i, j, plan.backward_reads(t, i, j))
                _check_order(plan, t, i, j)


def _check_version(plan: Plan, kind: Kind, t: int, i: int, j: int, v: int) -> None:
    schedule = plan.axes.schedule
    start = schedule.forward(i, j) if kind is Kind.F else schedule.backward(i, j)
    newest = schedule.updates_before(t, start, j)
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
    before = schedule.forward(i, j - 1) if j else -schedule.unit
    after = schedule.backward(i, j + 1) if j + 1 < plan.num_stages else schedule.forward(i, j)
    for kind, start, needed in (
        (Kind.F, schedule.forward(i, j), before),
        (Kind.B, schedule.backward(i, j), after),
    ):
        if start - needed < schedule.unit:
            a = Action(kind=kind, t=t, i=i, j=j, s=plan.slot(kind, t, i, j))
            refuse(
                plan,
                a,
                plan.worker_of(i, j, t),
                given=f"schedule {plan.schedule!r} starts this before what it needs has ended",
                allowed="F after F of the stage before, B after B of the stage behind it",
                todo="move it to a later slot",
            )


def _check_completeness(plan: Plan, programs: tuple[Program, ...]) -> None:
    """Check that each F and B is run once, by its worker and on its version."""
    done = Counter(
        (a, w)
        for w, program in enumerate(programs)
        for a in (replace(a, s=0) for a in program if a.kind in _COMPUTE)
    )
    for s, w, a in plan.timetable:
        times = done[replace(a, s=0), w]
        if times != 1:
            refuse(
                plan,
                replace(a, s=s),
                w,
                given=f"on the version that the rule names, runs {times} times",
                allowed="once, by the worker that the placement names",
                todo="use the programs of make_plan(...)",
            )


def _check_buffers(plan: Plan, programs: tuple[Program, ...]) -> None:
    """Check that no worker keeps more than the timetable says."""
    bounds = _activations_in_timetable(plan)
    for w, program in enumerate(programs):
        found = [("activations", live_activations(program), bounds[w])]
        for j, peak in live_versions(program).items():
            found.append((f"versions of stage {j}", peak, plan.depth(j)))
        for what, peak, bound in found:
            if peak > bound:
                refuse(
                    plan,
                    next(a for a in program if a.kind in _COMPUTE),
                    w,
                    given=f"keeps {peak} {what} at once",
                    allowed=f"{bound}, as the timetable says",
                    todo="use the programs of make_plan(...)",
                )


def _activations_in_timetable(plan: Plan) -> dict[int, int]:
    """Count the most activations that each worker keeps, by the slots of the timetable."""
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for s, w, a in plan.timetable:
        # within a slot, what is freed comes after what is made: a worker may do both there
        changes[w].append((2 * s, 1) if a.kind is Kind.F else (2 * s + 1, -1))
    peaks: dict[int, int] = defaultdict(int)
    for w, found in changes.items():
        live = 0
        for _, change in sorted(found):
            live += change
            peaks[w] = max(peaks[w], live)
    return peaks
