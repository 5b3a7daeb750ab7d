"""updates: say where each worker that holds a stage moves on to its next version.

Where stages are replicated, every worker gets an UPDATE here, as if each applied the gradients
to its own copy. The parameters pass lets the owner alone do so, and the others receive.

Stages of one worker that are due at one place are updated there together, so that a step is one
call of the optimizer, or one for each stage (``Plan.updates_apart``):

    sync, or one worker alone     all of them behind all else of the step
    one that has no room for all  each right behind its backward (``Tiers.early``)
    local steps                   the same, those first that may not wait for an exchange
    an owner that reads late      the same: its totals end with its own backward
    an owner that reads first     before the first forward that reads a new version
    owners who wait for all       behind their step, or where the first worker reads new weights
    pipelines without a flush     each as soon as its sum is whole, or right before it is read
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile

from lightning_cyclic.plan.actions import Action, Kind, Payload, Program
from lightning_cyclic.plan.plan import Plan


def updates(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert UPDATEs.

    Args:
        programs: F and B with versions, one program per worker.

    Returns:
        Programs in which every version is made before it is read.
    """
    return tuple(tuple(_inserted(plan, program, w)) for w, program in enumerate(programs))


def calls(plan: Plan, program: Program) -> dict[int, tuple[int, int]]:
    """Return where an update is -> the span of those that are one call of the optimizer."""
    found = together(program)
    return {n: (n, n + 1) for n in found} if plan.updates_apart else found


def together(program: Program) -> dict[int, tuple[int, int]]:
    """Return where an update is -> the span of those that are due at one place.

    They are of one step, one behind the other, in a program that has its updates.
    """
    places = [n for n, a in enumerate(program) if a.kind is Kind.UPDATE]
    found: dict[int, tuple[int, int]] = {}
    for _, group in groupby(enumerate(places), key=lambda x: (x[1] - x[0], program[x[1]].t)):
        each = [n for _, n in group]
        found |= dict.fromkeys(each, (each[0], each[-1] + 1))
    return found


def _inserted(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    if plan.updates_early:
        return _behind_backwards(program)
    if plan.axes.weights.at_end_of_step or not plan.axes.placement.overlaps:
        held = _held(plan, w)
        return _at_end(plan, program, held)
    if plan.updates_meet and plan.axes.sharding.gathers:
        return _where_all_meet(plan, program, w)
    if plan.axes.placement.runs_whole_micro:
        return _at_first_use(plan, program, w)
    return _by_slot(plan, program, w)


def _held(plan: Plan, w: int) -> list[int]:
    """List the stages whose versions a worker makes, or gets from who makes them."""
    stages = range(plan.num_stages)
    if plan.axes.placement.runs_whole_micro:
        return list(stages)
    return [j for j in stages if plan.owner(j) == w]


def _behind_backwards(program: Program) -> Iterator[Action]:
    for a in program:
        yield a
        if a.kind is Kind.B:
            yield _update(a.j, a.t + 1, a.s + 1)


def _at_end(plan: Plan, program: Program, stages: list[int]) -> Iterator[Action]:
    for t, actions in groupby(program, key=lambda a: a.t):
        last = 0
        if plan.rounds > 1:  # others may end later, and are served until then
            last = plan.end(t, 0)
        for a in actions:
            last = max(last, plan.last_slot(a))
            yield a
        # what a worker makes alone does not wait for what is exchanged
        in_order = sorted(stages, key=lambda j: plan.exchanges(t, j))
        yield from (_update(j, t + 1, last + 1) for j in in_order)


def _at_first_use(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Update stages right before the first forward that reads a new version of any of them.

    An owner that is not among the first readers would keep them waiting, so it updates when its
    step ends: it has the totals then, as it is the last worker. So do all owners whose updates
    meet, who wait there for the end of the last worker's step.
    """
    own = [j for j in range(plan.num_stages) if plan.owner(j) == w]
    late = [j for j in own if plan.updates_meet or w not in plan.first_readers[j]]
    done: set[tuple[int, int]] = set()  # stage, version
    for n, a in enumerate(program):
        if a.kind is Kind.F and a.v and plan.is_new(a.t, w, a.j) and a.j not in late:
            for j in _due_with(plan, a, w, late):
                if (j, a.v) not in done:
                    done.add((j, a.v))
                    yield _update(j, a.v, a.s)
        yield a
        if late and (n + 1 == len(program) or program[n + 1].t > a.t):
            yield from (_update(j, a.t + 1, a.s + 1) for j in late)


def _where_all_meet(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Update where the first of all workers reads a new version, as updates wait for each other.

    What is served in an earlier slot goes before it: an owner whose forwards read the old version
    until later would else wait for it, and all others for the norms of its stages.
    """
    due = [(v, _first_read_slot(plan, v)) for v in range(1, plan.num_steps + 1)]
    begin = 0  # the slot behind what this worker has done
    for a in program:
        while due and a.kind is Kind.F and a.s >= due[0][1]:
            v, s = due.pop(0)
            yield from (_update(j, v, max(s, begin)) for j in range(plan.num_stages))
        yield a
        begin = a.s + 1
    for v, s in due:
        yield from (_update(j, v, max(s, begin)) for j in range(plan.num_stages))


def _first_read_slot(plan: Plan, v: int) -> int:
    """Return the first slot in which a forward reads version v of any stage, or a newer one."""
    return min(
        plan.slot(Kind.F, t, i, j)
        for t in (v, v + 1)
        for j in range(plan.num_stages)
        for i in range(plan.num_microbatches)
        if plan.reads(t, i, j) >= v
    )


def _due_with(plan: Plan, a: Action, w: int, late: list[int]) -> Iterator[int]:
    """List the stages to update before a forward: its own, and an owner's that it reads next.

    Their totals come before that of the first of them, as backwards end with the first stage.
    """
    yield a.j
    for j in range(a.j + 1, plan.num_stages) if plan.owner(a.j) == w else ():
        is_due = plan.reads(a.t, w, j) == a.v and plan.is_new(a.t, w, j)
        if plan.owner(j) == w and is_due and j not in late:
            yield j


def _by_slot(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Update a stage in the slot after the last backward of a step, before that slot's work.

    Late updates wait for the slot of the first forward that reads the new version.
    """
    due = sorted(
        (
            _update(j, t + 1, _slot_of_update(plan, t, j))
            for j in _held(plan, w)
            for t in range(plan.num_steps)
        ),
        key=lambda a: (a.s, a.j),
    )
    for a in program:
        while due and due[0].s <= a.s:
            yield due.pop(0)
        yield a
    yield from due


def _slot_of_update(plan: Plan, t: int, j: int) -> int:
    if plan.late_updates:
        return plan.slot(Kind.F, plan.first_read(t + 1, j), 0, j)
    return plan.end(t, j) + 1


def _update(j: int, v: int, s: int) -> Action:
    return Action(kind=Kind.UPDATE, t=v - 1, j=j, v=v, s=s)


def is_of_update(a: Action) -> bool:
    """Say whether an action makes an update, or tells what it needs to know."""
    return a.kind is Kind.UPDATE or (a.kind is Kind.SEND and a.payload is Payload.N)


def needs_step(a: Action, *, adds_differences: bool) -> bool:
    """Say whether an action needs something of the step under way, or of its hyper-parameters.

    Args:
        adds_differences: whether what is added are not gradients, but how a worker has changed
            its weights by them.
    """
    takes = a.kind is Kind.ADD or (a.kind is Kind.SEND and a.payload is Payload.H)
    return a.kind in (Kind.F, Kind.B) or is_of_update(a) or (adds_differences and takes)


def up_to_call(actions: Sequence[Action], t: int, *, apart: bool) -> Sequence[Action]:
    """Return the first of some actions, up to the last update of one call of the optimizer.

    Receives of a step that others have begun may be posted among them, which block nobody.

    Args:
        actions: of which the first is of an update.
        t: step of the call.
        apart: whether each update is a call of its own.
    """
    near = list(
        takewhile(lambda a: a.kind is Kind.RECV or (is_of_update(a) and a.t == t), actions)
    )
    last = (min if apart else max)(n for n, a in enumerate(near) if a.kind is Kind.UPDATE)
    return near[: last + 1]


def needs_older(a: Action, t: int) -> bool:
    """Say whether an action of step t needs a version before that of the step, or its place."""
    if a.kind is Kind.UPDATE:
        return a.v == t
    is_use = a.kind in (Kind.F, Kind.B) or (a.kind is Kind.SEND and a.payload is Payload.P)
    return is_use and a.v is not None and a.v < t
