"""norms: tell who decides about a step as a whole the norms of all its gradients.

The gradient norm over all stages, or whether one of them overflowed, needs them before any update:

    N     the norms of a stage's gradients, its owner -> all other owners, or all other workers

They are sent as soon as a stage's sum is whole where updates are late, so that nobody waits; else
right before the update.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_cyclic.plan.actions import GO_BACK, Action, Kind, Payload, Program
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.passes.updates import together
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.plan.roles import completes


def norms(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert N; change nothing where nobody decides about all stages together."""
    if plan.norms == "none" or plan.num_workers == 1:
        return programs
    place = _at_updates if plan.decides_at_end else _early
    return tuple(tuple(place(plan, program, w)) for w, program in enumerate(programs))


def _at_updates(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Exchange right before the updates of each step, which are one behind the other.

    Who updates nothing, but is told, receives before the first new version comes.
    """
    told, calls = 0, together(program)  # steps whose norms have been exchanged
    hears = plan.norms == "all" and not calls
    for n, a in enumerate(program):
        comes = hears and a.kind is Kind.RECV and a.payload is Payload.P
        if (a.kind is Kind.UPDATE or comes) and (a.v or 0) > told:
            told = a.v or 0
            for b in () if comes else program[slice(*calls[n])]:
                yield from _sends(plan, b, w)
            yield from _receives(plan, a, w, told - 1)
        yield a


def _early(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Send behind what completes a sum; receive before the first action that needs to know."""
    t = 0  # the next step whose norms are received
    for a in program:
        while _needs(plan, a, t):
            yield from _receives(plan, a, w, t)
            t += 1
        yield a
        if completes(plan, a, w):
            yield from _sends(plan, a, w)


def _needs(plan: Plan, a: Action, t: int) -> bool:
    """Say whether an action needs to know of all gradients of step ``t``.

    The scale of a loss follows from the steps that have ended when the first loss of its step is
    computed; backwards multiply by it.
    """
    if a.kind is Kind.UPDATE:
        return plan.late_updates and a.t >= t
    return plan.norms == "all" and a.kind in GO_BACK and plan.ended_before(a.t) > t


def _sends(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    owners = {plan.owner(j) for j in range(plan.num_stages)}
    told = range(plan.num_workers) if plan.norms == "all" else sorted(owners)
    return (message(Kind.SEND, Payload.N, a, other) for other in told if other != w)


def _receives(plan: Plan, a: Action, w: int, t: int) -> Iterator[Action]:
    for j in range(plan.num_stages):
        if plan.owner(j) != w:
            yield message(Kind.RECV, Payload.N, a, plan.owner(j), t=t, j=j)
