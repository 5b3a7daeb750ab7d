"""parameters: bring each new version from the owner of a stage to those who read it.

    P   a stage's parameters         replicas hand them on along a chain, in the order of need;
                                     else the owner sends them to all who hold the stage
    V   those that other stages use  owner -> the workers of these stages (see ``ties.py``)

Both carry the step in which the version is read first. The total that an update applies (T) is
received right before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.passes.ties import first_users, reads_tied, version_readers

if TYPE_CHECKING:
    from lightning_cyclic.plan import Plan


def parameters(plan: Plan, program: Iterable[Action], w: int) -> Iterator[Action]:
    """Insert P and V around UPDATEs, and T before them.

    Args:
        plan: whose ownership decides.
        program: of worker ``w``, with UPDATEs.
        w: worker.
    """
    place = _along_chain if plan.axes.placement.runs_whole_micro else _from_owner
    return place(plan, program, w)


def _along_chain(plan: Plan, program: Iterable[Action], w: int) -> Iterator[Action]:
    """Let the owner update and the others receive, each handing the version on at once."""
    waiting: list[Action] = []
    for a in program:
        if a.kind is not Kind.UPDATE:
            yield a
            continue
        chain = plan.chain(a.j)
        if plan.axes.sharding.gathers:
            chain = chain[:1]  # the shards pass brings parameters to the others when they use them
            if w not in chain:
                continue
        if chain[0] == w:
            yield from _total(plan, a, w)
            yield a
        else:
            yield _parameter(plan, Kind.RECV, Payload.P, a, chain[chain.index(w) - 1])
        if w != chain[-1]:
            after = chain[chain.index(w) + 1]
            waiting.append(_parameter(plan, Kind.SEND, Payload.P, a, after))
        if not _is_more_to_come(plan, a, w):
            yield from sorted(waiting, key=lambda send: send.j)
            waiting.clear()


def _is_more_to_come(plan: Plan, a: Action, w: int) -> bool:
    """Say whether a later update must be sent first, as its stage comes earlier in a forward.

    A late owner updates in the order of backwards, its receiver reads in the order of forwards.
    """
    below = a.j - 1
    if plan.owner(a.j) != w or not plan.is_late(a.j) or below < 0 or not plan.is_late(below):
        return False
    return plan.chain(below)[1] == plan.chain(a.j)[1]


def _from_owner(plan: Plan, program: Iterable[Action], w: int) -> Iterator[Action]:
    """Let owners send each version to all who read it, who receive it before they first do."""
    inbox = {(a.payload, a.j, a.v): a for a in _versions_due(plan, w)}
    for a in program:
        if a.kind is Kind.UPDATE:
            yield from _total(plan, a, w)
        elif a.kind in (Kind.F, Kind.B):
            read = [(Payload.P, a.j, a.v)]
            read += [(Payload.V, j, reads_tied(plan, a, j)) for j in first_users(plan, a.j)]
            found = [inbox.pop(key, None) for key in read]
            yield from filter(None, found)
        yield a
        if a.kind is Kind.UPDATE:
            yield from _sends(plan, a)
    yield from inbox.values()  # what nobody read any more: all end with the same weights


def _versions_due(plan: Plan, w: int) -> Iterator[Action]:
    """Yield what worker w receives of owners, in the order of versions."""
    sources = [
        (payload, j)
        for j in range(plan.num_stages)
        for payload, workers in (
            (Payload.P, _others(plan, j)),
            (Payload.V, version_readers(plan, j)),
        )
        if w in workers
    ]
    for t in range(plan.num_steps):
        for payload, j in sources:
            s = plan.slot(Kind.B, t, plan.num_micro - 1, j) + 1
            update = Action(kind=Kind.UPDATE, t=t, j=j, v=t + 1, s=s)
            yield _parameter(plan, Kind.RECV, payload, update, plan.owner(j))


def _sends(plan: Plan, update: Action) -> Iterator[Action]:
    for other in _others(plan, update.j):
        yield _parameter(plan, Kind.SEND, Payload.P, update, other)
    for other in version_readers(plan, update.j):
        yield _parameter(plan, Kind.SEND, Payload.V, update, other)


def _others(plan: Plan, j: int) -> tuple[int, ...]:
    """List the workers that hold stage j without owning it."""
    owner = plan.owner(j)
    return tuple(w for w in plan.axes.placement.workers_of(j) if w != owner)


def _total(plan: Plan, update: Action, w: int) -> Iterator[Action]:
    """Receive the total that an update applies, unless its sum ends on the owner."""
    source = plan.worker_of(plan.num_micro - 1, update.j, update.t)
    if source != w:
        yield message(Kind.RECV, Payload.T, update, source)


def _parameter(plan: Plan, kind: Kind, payload: Payload, update: Action, peer: int) -> Action:
    assert update.v is not None
    t = plan.first_read(update.v, update.j)
    return message(kind, payload, update, peer, t=t, v=update.v)
