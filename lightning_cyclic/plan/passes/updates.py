"""updates: say where each worker that holds a stage moves on to its next version.

Where stages are replicated, every worker gets an UPDATE here, as if each applied the gradients
to its own copy. The transfers pass lets the owner alone do so, and the others receive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Payload, Program

if TYPE_CHECKING:
    from lightning_cyclic.plan import Plan


def updates(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert UPDATEs.

    Args:
        plan: whose rules decide.
        programs: F and B with versions, one program per worker.

    Returns:
        Programs in which every version is made before it is read.
    """
    if not plan.axes.placement.runs_whole_micro:
        return tuple(tuple(_by_slot(plan, program, w)) for w, program in enumerate(programs))
    place = _at_end if plan.axes.weights.at_end_of_step else _at_first_use
    return tuple(
        tuple(action for a in program for action in place(plan, a, w))
        for w, program in enumerate(programs)
    )


def _at_end(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    """Update all stages after the last backward of a step."""
    yield a
    if a.kind is Kind.B and a.j == 0:
        for j in range(plan.num_stages):
            yield _update(j, a.t + 1, a.s + 1)


def _at_first_use(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    """Update a stage right before the first forward that reads the new version.

    An owner that is not among the first readers would keep them waiting, so it updates as soon
    as it has the total, which it has without a message: it is the last worker.
    """
    is_late_owner = w == plan.owner(a.j) and w not in plan.first_readers(a.j)
    if a.kind is Kind.F and a.v and not is_late_owner and plan.is_new(a.t, w, a.j):
        yield _update(a.j, a.v, a.s)
    yield a
    if a.kind is Kind.B and is_late_owner:
        yield _update(a.j, a.t + 1, a.s + 1)


def _by_slot(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Update a stage in the slot after the last backward of a step, before that slot's work.

    Late updates wait for the slot of the first forward that reads the new version.
    """
    due = sorted(
        (
            _update(j, t + 1, _slot_of_update(plan, t, j))
            for j in range(plan.num_stages)
            if plan.owner(j) == w
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
    if plan.late_updates and t < plan.warmup_steps:  # behind it there is a flush
        return plan.slot(Kind.B, t, plan.num_micro - 1, 0) + 1
    if plan.late_updates:
        return plan.slot(Kind.F, plan.first_read(t + 1, j), 0, j)
    return plan.slot(Kind.B, t, plan.num_micro - 1, j) + 1


def _update(j: int, v: int, s: int) -> Action:
    return Action(kind=Kind.UPDATE, t=v - 1, j=j, v=v, s=s)


def drain(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Leave of the steps after the last one only what brings all versions home.

    Replicas read a version up to two steps after it was computed. So programs are made for two
    more steps, and what is left of those without their computation is the drain: it uses no other
    messages than a step does, in the same order.

    Args:
        plan: whose ``num_steps`` says where the computation ends.
        programs: of two more steps, with messages.

    Returns:
        Programs after which every worker holds version ``num_steps`` of every stage.
    """
    return tuple(tuple(a for a in program if _is_kept(plan, a)) for program in programs)


def _is_kept(plan: Plan, a: Action) -> bool:
    if a.kind is Kind.UPDATE or a.payload in (Payload.P, Payload.V):
        return a.v is not None and a.v <= plan.num_steps
    if a.payload is Payload.R and a.t == plan.num_steps and a.i is not None:
        # the last micro-batch's buffers go round once, so that all workers end with the same
        return plan.axes.placement.runs_whole_micro and a.i < plan.num_workers - 1
    return a.t < plan.num_steps
