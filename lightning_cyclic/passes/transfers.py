"""transfers: insert the messages, so that what one worker makes reaches those that need it.

Five kinds of message, each in its own function below, and one rule for all of them: on each
ordered pair of workers, messages of one payload are received in the order in which they are sent.
Transports without tags need that, and where the receiver needs them in another order, it costs
nothing to take first what was sent first.

    R   module buffers          micro-batch i -> i+1, around each F of a relayed stage
    A   activations             stage j-1 -> j, where another worker runs the next stage
    G   activation gradients    stage j+1 -> j
    S   partial gradient sums   micro-batch i -> i+1, and T, the total, to the owner
    P   parameters              owner -> the others, in the order in which they need them

Messages that cannot be told apart by worker carry the numbers of their receiver: A and G the
stage, R the step and micro-batch, P the step of the first reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lightning_cyclic.actions import Action, Kind, Payload, Program

if TYPE_CHECKING:
    from lightning_cyclic.plan import Plan


def transfers(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert every SEND and RECV but those of ``sharding="full"``.

    Args:
        plan: whose placement and ownership decide.
        programs: with UPDATEs, one program per worker.

    Returns:
        Programs whose messages pair up.
    """
    programs = tuple(tuple(_messages(plan, program, w)) for w, program in enumerate(programs))
    if plan.axes.placement.runs_whole_micro:
        return tuple(tuple(_along_chain(plan, program, w)) for w, program in enumerate(programs))
    sent = _sent_versions(plan, programs)
    return tuple(tuple(_from_owner(plan, program, w, sent)) for w, program in enumerate(programs))


def relays(plan: Plan, program: Iterable[Action], w: int) -> Iterator[Action]:
    """Hand module buffers on from micro-batch to micro-batch, around each relayed F.

    Args:
        plan: names the relayed stages.
        program: of worker ``w``.
        w: worker.
    """
    for a in program:
        is_relayed = a.kind is Kind.F and a.j in plan.relayed
        yield from _relay(plan, a, w, before=True) if is_relayed else ()
        yield a
        yield from _relay(plan, a, w, before=False) if is_relayed else ()


def _relay(plan: Plan, a: Action, w: int, *, before: bool) -> Iterator[Action]:
    k = a.t * plan.num_micro + (a.i or 0)
    if before and k == 0:
        return
    t_other, i_other = divmod(k - 1 if before else k + 1, plan.num_micro)
    other = plan.worker_of(i_other, a.j, t_other)
    if other != w and before:
        yield _message(Kind.RECV, Payload.R, a, other, i=a.i)
    elif other != w:
        yield _message(Kind.SEND, Payload.R, a, other, t=t_other, i=i_other)


def _messages(plan: Plan, program: Iterable[Action], w: int) -> Iterator[Action]:
    """Put A, G, S and the sending of T around each F and B."""
    for a in program:
        if a.kind is Kind.F:
            yield from _edge(plan, a, w, Kind.RECV, Payload.A, a.j - 1, a.j)
            yield a
            yield from _edge(plan, a, w, Kind.SEND, Payload.A, a.j + 1, a.j + 1)
        elif a.kind is Kind.B:
            yield from _edge(plan, a, w, Kind.RECV, Payload.G, a.j + 1, a.j)
            yield a
            yield from _edge(plan, a, w, Kind.SEND, Payload.G, a.j - 1, a.j - 1)
            yield from _sum(plan, a, w)
        else:
            yield a


def _edge(
    plan: Plan, a: Action, w: int, kind: Kind, payload: Payload, j_other: int, j: int
) -> Iterator[Action]:
    """Exchange with the worker of a neighbouring stage, if there is one and it is another."""
    if 0 <= j_other < plan.num_stages:
        other = plan.worker_of(a.i or 0, j_other, a.t)
        if other != w:
            yield _message(kind, payload, a, other, i=a.i, j=j)


def _sum(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    """Add to the sum of the micro-batches before, and hand it on."""
    i = a.i or 0
    if i > 0 and (before := plan.worker_of(i - 1, a.j, a.t)) != w:
        yield _message(Kind.RECV, Payload.S, a, before, i=i - 1)
    if i == plan.num_micro - 1:
        if plan.owner(a.j) != w:
            yield _message(Kind.SEND, Payload.T, a, plan.owner(a.j))
    elif (after := plan.worker_of(i + 1, a.j, a.t)) != w:
        yield _message(Kind.SEND, Payload.S, a, after, i=i)


def _along_chain(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Let the owner update and the others receive, each handing the version on at once."""
    totals = _totals_to(plan, w)
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
            yield from _take_until(plan, totals, a)
            yield a
        else:
            yield _parameter(plan, Kind.RECV, a, chain[chain.index(w) - 1])
        if w != chain[-1]:
            waiting.append(_parameter(plan, Kind.SEND, a, chain[chain.index(w) + 1]))
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


def _totals_to(plan: Plan, w: int) -> list[tuple[int, int]]:
    """List step and stage of the totals that owner ``w`` receives, in the order of sending."""
    if w == plan.num_workers - 1:
        return []  # the sums end here
    owned = [j for j in reversed(range(plan.num_stages)) if plan.owner(j) == w]
    return [(t, j) for t in range(plan.num_steps) for j in owned]


def _take_until(plan: Plan, totals: list[tuple[int, int]], update: Action) -> Iterator[Action]:
    """Receive totals until the one that an update applies has come; it may have already."""
    while (update.t, update.j) in totals:
        t, j = totals.pop(0)
        yield _message(Kind.RECV, Payload.T, update, plan.num_workers - 1, t=t, j=j)


def _sent_versions(
    plan: Plan, programs: tuple[Program, ...]
) -> dict[tuple[int, int], list[Action]]:
    """List, for each owner and each other holder of its stages, the updates in order."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for w, program in enumerate(programs):
        for a in program:
            if a.kind is Kind.UPDATE:
                for other in _others(plan, a.j):
                    sent[w, other].append(a)
    return sent


def _others(plan: Plan, j: int) -> tuple[int, ...]:
    owner = plan.owner(j)
    return tuple(w for w in plan.axes.placement.workers_of(j) if w != owner)


def _from_owner(
    plan: Plan, program: Program, w: int, sent: dict[tuple[int, int], list[Action]]
) -> Iterator[Action]:
    """Let owners send each version to all other holders, who receive before they first read."""
    inbox = {owner: list(queue) for (owner, to), queue in sent.items() if to == w}
    held: set[tuple[int, int]] = set()
    for a in program:
        if a.kind is Kind.UPDATE:
            yield from _update_and_send(plan, a, w)
            continue
        owner = plan.owner(a.j)
        if a.kind in (Kind.F, Kind.B) and a.v and owner != w:
            while (a.j, a.v) not in held:
                update = inbox[owner].pop(0)
                held.add((update.j, update.v or 0))
                yield _parameter(plan, Kind.RECV, update, owner)
        yield a
    for owner, queue in inbox.items():  # what nobody read any more: all end with the same weights
        yield from (_parameter(plan, Kind.RECV, update, owner) for update in queue)


def _update_and_send(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    source = plan.worker_of(plan.num_micro - 1, a.j, a.t)
    if source != w:
        yield _message(Kind.RECV, Payload.T, a, source)
    yield a
    for other in _others(plan, a.j):
        yield _parameter(plan, Kind.SEND, a, other)


def _parameter(plan: Plan, kind: Kind, update: Action, peer: int) -> Action:
    assert update.v is not None
    t = plan.first_read(update.v, update.j)
    return _message(kind, Payload.P, update, peer, t=t, v=update.v)


def _message(
    kind: Kind,
    payload: Payload,
    at: Action,
    peer: int,
    *,
    t: int | None = None,
    i: int | None = None,
    j: int | None = None,
    v: int | None = None,
) -> Action:
    """Make a message that belongs to an action, with that action's numbers where none given."""
    return Action(
        kind=kind,
        payload=payload,
        t=at.t if t is None else t,
        j=at.j if j is None else j,
        i=i,
        v=v,
        peer=peer,
        s=at.s,
    )
