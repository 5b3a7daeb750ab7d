"""ties: parameters that several stages use stay one parameter, wherever the stages run.

The first stage that uses a parameter counts it among its own: there all gradients meet, and
there it is updated. All stages read the version that the first one reads. Under
``tied=((0, 3),)``, stage 3 uses parameters of stage 0, and

    W   their gradient      after B(i, 3) -> before B(i, 0), inside a replica
    V   their new version   after UPDATE of stage 0 -> before the first F(i, 3) that reads it

Both carry the first stage. A worker has one copy for all of its stages: it sends one W for each
micro-batch, after the last of its backwards that add to it, and receives one V for each version;
none if it runs the first stage itself, or is a replica of who does and has P.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.messages import message

if TYPE_CHECKING:
    from lightning_cyclic.plan import Plan


def first_users(plan: Plan, j: int) -> tuple[int, ...]:
    """List the stages before j whose parameters stage j uses, in the order of backwards."""
    return tuple(sorted({tie[0] for tie in plan.tied if j in tie[1:]}, reverse=True))


def later_users(plan: Plan, j: int) -> tuple[int, ...]:
    """List the stages behind j that use parameters of stage j, in the order of backwards."""
    return tuple(sorted({k for tie in plan.tied if tie[0] == j for k in tie[1:]}, reverse=True))


def gradient_sources(plan: Plan, a: Action, w: int) -> tuple[int, ...]:
    """List the workers that send W to worker w before its B of a first stage."""
    users = (plan.worker_of(a.i or 0, k, a.t) for k in later_users(plan, a.j))
    return tuple(dict.fromkeys(user for user in users if user != w))


def reads_tied(plan: Plan, a: Action, first: int) -> int:
    """Give the version of tied parameters that an F or B reads: the one that the first stage read.

    So a parameter has one value for each micro-batch, though later stages could read a newer one.
    """
    return plan.reads(a.t, a.i or 0, first)


def version_readers(plan: Plan, j: int) -> tuple[int, ...]:
    """List the workers that use parameters of stage j without holding stage j."""
    workers_of = plan.axes.placement.workers_of
    holders = workers_of(j)
    users = (w for k in later_users(plan, j) for w in workers_of(k))
    return tuple(dict.fromkeys(w for w in users if w not in holders))


def receive_gradients(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    """Yield what must have come before the B of a first stage."""
    for source in gradient_sources(plan, a, w):
        yield message(Kind.RECV, Payload.W, a, source, i=a.i)


def send_gradients(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    """Yield what the B of a later stage completes on its worker."""
    for j in first_users(plan, a.j):
        own = [k for k in later_users(plan, j) if plan.worker_of(a.i or 0, k, a.t) == w]
        target = plan.worker_of(a.i or 0, j, a.t)
        if target != w and a.j == own[-1]:
            yield message(Kind.SEND, Payload.W, a, target, i=a.i, j=j)
