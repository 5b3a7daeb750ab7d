"""parameters: bring each new version from the owner of a stage to those who read it.

    P   a stage's parameters         replicas hand them on along a chain, in the order of need, of
                                     groups from lead to lead, who give them to their group; else
                                     the owner sends them to all who hold the stage
    V   those that other stages use  owner -> the workers of these stages (see ``sums.py``)

Both carry the step in which the version is read first. The totals that updates apply (T) are
received right before them; where updates are late, as soon as they are there, since all others
wait to hear of their norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Payload, Program
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.passes.sums import adder, first_users, reads_tied, version_readers

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan


def parameters(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Insert P and V around UPDATEs, and T before them.

    Args:
        plan: whose ownership decides.
        program: of worker ``w``, with UPDATEs.
        w: worker.
    """
    if plan.axes.placement.runs_whole_micro:
        return _along_chain(plan, program, w)
    return _from_owner(plan, program, w)


def _grouped(program: Program) -> Iterator[tuple[bool, list[Action]]]:
    """Yield updates of one step that are one behind the other together, all else alone."""
    for key, actions in groupby(program, key=lambda a: (a.kind is Kind.UPDATE, a.t)):
        if key[0]:
            yield True, list(actions)
        else:
            yield from ((False, [a]) for a in actions)


def _along_chain(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Let the owner update and the others receive, each handing the version on at once."""
    for is_update, group in _grouped(program):
        if not is_update:
            yield from group
            continue
        own = [a for a in group if plan.owner(a.j) == w]
        yield from _totals(plan, own, w)
        yield from own
        for a in group:
            if plan.axes.sharding.gathers:
                continue  # the shards pass brings parameters to users when they use them
            if (giver := plan.giver(w, a.j)) is not None:
                yield _parameter(plan, Kind.RECV, Payload.P, a, giver)
            for taker in plan.takers(w, a.j):
                yield _parameter(plan, Kind.SEND, Payload.P, a, taker)


def _from_owner(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Let owners send each version to all who read it, who receive it before they first do."""
    inbox = {(a.payload, a.j, a.v): a for a in _versions_due(plan, w)}
    early = _early_totals(plan, w) if plan.late_updates else []
    for is_update, group in _grouped(program):
        while early and early[0].s <= group[0].s:
            yield early.pop(0)
        if is_update and not plan.late_updates:
            yield from _totals(plan, group, w)
        elif group[0].kind in (Kind.F, Kind.B):
            (a,) = group
            read = [(Payload.P, a.j, a.v)]
            read += [(Payload.V, j, reads_tied(plan, a, j)) for j in first_users(plan, a.j)]
            yield from filter(None, [inbox.pop(key, None) for key in read])
        yield from group
        for a in group if is_update else ():
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
            s = plan.slot(Kind.B, t, plan.num_microbatches - 1, j) + 1
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


def _totals(plan: Plan, updates: Iterable[Action], w: int) -> Iterator[Action]:
    """Receive the totals that updates apply, unless their sums end on the owner."""
    if plan.axes.sharding.gathers:
        return
    for a in sorted(updates, key=lambda a: -a.j):  # backwards end with the first stage
        source = adder(plan, plan.num_microbatches - 1, a.j, a.t)
        if source != w:
            yield message(Kind.RECV, Payload.T, a, source)


def _early_totals(plan: Plan, w: int) -> list[Action]:
    """Receive the total of each step in the slot after its last backward, in that order."""
    last = plan.num_microbatches - 1
    ended = [
        Action(kind=Kind.UPDATE, t=t, j=j, v=t + 1, s=plan.slot(Kind.B, t, last, j) + 1)
        for t in range(plan.num_steps)
        for j in range(plan.num_stages)
        if plan.owner(j) == w
    ]
    return sorted(_totals(plan, ended, w), key=lambda a: a.s)


def _parameter(plan: Plan, kind: Kind, payload: Payload, update: Action, peer: int) -> Action:
    assert update.v is not None
    t = plan.first_read(update.v, update.j)
    return message(kind, payload, update, peer, t=t, v=update.v)
