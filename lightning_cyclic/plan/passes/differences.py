"""differences: of local steps, what workers exchange behind a step, and who makes something of it.

    ADD     how a worker has changed its weights, to the sum of those before it; or where owners
            add (a codec), H to the owner, who adds those of all
    OUTER   the owner: outer weights, of the sum
    U       owner -> all others, along the chain of versions

All of it stands behind the backwards of a step, before its updates, and runs on lanes, beside the
steps that follow: what waits for outer weights is the update that uses them, in the same step or
some steps later. So nothing of an exchange is left behind the block of its step but what lanes do,
which a flush waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_cyclic.plan.actions import Action, Kind, Payload, Program
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.plan.roles import completes


def differences(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Insert exchanges.

    Args:
        program: of worker ``w``, with UPDATEs.
    """
    done = -1  # the last step whose updates have begun
    for a in program:
        if a.kind is Kind.UPDATE and a.t > done:
            done = a.t
            stages = [j for j in reversed(range(plan.num_stages)) if plan.exchanges(a.t, j)]
            yield from _exchanged(plan, a, stages, w)
        yield a


def _exchanged(plan: Plan, at: Action, stages: Sequence[int], w: int) -> Iterator[Action]:
    """Exchange stages; totals that come from others do not hold up what is added here."""
    waiting = list(stages)
    for j in stages:
        for a in _added(plan, at, j, w):
            yield a
            if completes(plan, a, w):
                waiting.remove(j)
                yield from _brought(plan, at, j, w)
    for j in waiting:
        yield from _brought(plan, at, j, w)


def _added(plan: Plan, at: Action, j: int, w: int) -> Iterator[Action]:
    """Add the difference of a worker to the sum that travels, or send it to who adds all."""
    if not plan.owners_add:
        yield Action(kind=Kind.ADD, t=at.t, j=j, i=w, s=at.s)
    elif w != plan.owner(j):
        yield message(Kind.SEND, Payload.H, at, plan.owner(j), i=w, j=j)
    else:
        for i in range(plan.num_workers):
            if i != w:
                yield message(Kind.RECV, Payload.H, at, i, i=i, j=j)
            yield Action(kind=Kind.ADD, t=at.t, j=j, i=i, s=at.s)


def _brought(plan: Plan, at: Action, j: int, w: int) -> Iterator[Action]:
    """Make outer weights, or receive them, and hand them on at once."""
    giver = plan.giver(w, j)
    if giver is None:
        yield Action(kind=Kind.OUTER, t=at.t, j=j, s=at.s)
    else:
        yield message(Kind.RECV, Payload.U, at, giver, j=j)
    for taker in plan.takers(w, j):
        yield message(Kind.SEND, Payload.U, at, taker, j=j)
