"""transfers: insert the messages, so that what one worker makes reaches those that need it.

Each is inserted where it is made and where it is needed first; ``receives.py`` says where it is
received, and ``messages.py`` in which order.

    A   activations             stage j-1 -> j, where another worker runs the next stage
    G   activation gradients    stage j+1 -> j
    W   tied gradients          a later stage that uses parameters -> the first: ties.py
    S   partial gradient sums   micro-batch i -> i+1, and T, the total, to the owner: sums.py
    H   gradients               micro-batch i -> the owner, where owners add: sums.py
    R   module buffers          around each F of a relayed stage, micro-batch k -> k+1 (of several
                                rounds, from the last of one worker to the first of the next)
    C   the same at a flush     who has the newest -> all other holders, one after the other
    P   parameters              replicas hand them on along a chain, in the order of need, of
                                groups from lead to lead, who give them to their group; else the
                                owner sends them to all who hold the stage
    V   those of other stages   owner -> the workers of these stages: ties.py
    D   the batch               worker of the first F of a step -> the others, before all else
    L   the losses              worker of the last stage -> the others of its replica
    TELL   what came out        on the worker of the last stage behind its last B there, and then L
                                is sent; on the others behind their last B, before they update

Messages that cannot be told apart by worker carry the numbers of their receiver: A and G the
stage, R the step and micro-batch, P and V the step of the first reader, D and L the receiver's
first stage. The totals that updates apply (T) are received right before them; where updates are
late, as soon as they are there, since all others wait to hear of their norms. D, L and TELL stay
inside a replica; workers that run whole micro-batches need none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, product
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Payload, Program
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.passes.sums import adder, sums, sums_at_owner
from lightning_cyclic.plan.passes.ties import (
    first_users,
    reads_tied,
    receive_gradients,
    send_gradients,
    version_readers,
)

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan


def transfers(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert every SEND and RECV but those of sharded parameters, of batches and of norms.

    Returns:
        Programs with a receive for each send, where its message is needed first.
    """
    found = []
    for w, program in enumerate(programs):
        with_messages = tuple(_messages(plan, relays(plan, program, w), w))
        with_versions = tuple(parameters(plan, with_messages, w))
        found.append(tuple(sums_at_owner(plan, with_versions, w)))
    return tuple(found)


def _messages(plan: Plan, program: Iterable[Action], w: int) -> Iterator[Action]:
    """Put A, G, W, S and the sending of T and H around each F and B."""
    for a in program:
        if a.kind is Kind.F:
            yield from _edge(plan, a, w, Kind.RECV, Payload.A, a.j - 1, a.j)
            yield a
            yield from _edge(plan, a, w, Kind.SEND, Payload.A, a.j + 1, a.j + 1)
        elif a.kind is Kind.B:
            yield from _edge(plan, a, w, Kind.RECV, Payload.G, a.j + 1, a.j)
            yield from receive_gradients(plan, a, w)
            yield a
            yield from _edge(plan, a, w, Kind.SEND, Payload.G, a.j - 1, a.j - 1)
            yield from send_gradients(plan, a, w)
            yield from sums(plan, a, w)
        else:
            yield a


def _edge(
    plan: Plan, a: Action, w: int, kind: Kind, payload: Payload, j_other: int, j: int
) -> Iterator[Action]:
    """Exchange with the worker of a neighbouring stage, if there is one and it is another."""
    if 0 <= j_other < plan.num_stages:
        other = plan.worker_of(a.i or 0, j_other, a.t)
        if other != w:
            yield message(kind, payload, a, other, i=a.i, j=j)


def relays(plan: Plan, program: Iterable[Action], w: int) -> Iterator[Action]:
    """Put R around the forwards of relayed stages.

    A stage whose buffers change in later stages, too, hands them on behind the last of these.

    Args:
        program: of worker ``w``.
    """
    ends = dict(zip(plan.relayed, plan.relayed_until or plan.relayed, strict=True))
    for a in program:
        if a.kind is Kind.F and a.j in ends:
            yield from _received(plan, a, w)
        yield a
        if a.kind is Kind.F:
            for j in (j for j, end in ends.items() if end == a.j):
                yield from _handed_on(plan, a, j, w)


def _received(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    k = a.t * plan.num_microbatches + plan.handed_on_as(a.i or 0)
    if k > 0 and (source := _worker_of(plan, k - 1, a.j)) != w:
        yield message(Kind.RECV, Payload.R, a, source, i=a.i)


def _handed_on(plan: Plan, a: Action, j: int, w: int) -> Iterator[Action]:
    k = a.t * plan.num_microbatches + plan.handed_on_as(a.i or 0) + 1
    if (target := _worker_of(plan, k, j)) != w:
        t, i = _micro_of(plan, k)
        yield message(Kind.SEND, Payload.R, a, target, t=t, i=i, j=j)


def copies(plan: Plan, t: int, w: int) -> Iterator[Action]:
    """Bring the buffers behind step ``t``, which has ended, to all who hold them.

    The worker of the next micro-batch has received them; they go round from there.
    """
    s = plan.end(t, 0) + 1
    for j in plan.relayed:
        chain = _without_them(plan, t, j)
        if w not in chain:
            continue
        place, at = chain.index(w), Action(kind=Kind.F, t=t, j=j, s=s)
        if place > 0:
            yield message(Kind.RECV, Payload.C, at, chain[place - 1])
        if place + 1 < len(chain):
            yield message(Kind.SEND, Payload.C, at, chain[place + 1])


def _without_them(plan: Plan, t: int, j: int) -> list[int]:
    """List who hands buffers on: the worker that has received them, then all without them."""
    last = (t + 1) * plan.num_microbatches - 1
    source, first = _worker_of(plan, last, j), _worker_of(plan, last + 1, j)
    holders = plan.axes.placement.workers_of(j)
    start = holders.index(first)
    around = [*holders[start + 1 :], *holders[:start]]
    return [first, *(w for w in around if w != source)]


def _worker_of(plan: Plan, k: int, j: int) -> int:
    t, i = _micro_of(plan, k)
    return plan.worker_of(i, j, t)


def _micro_of(plan: Plan, k: int) -> tuple[int, int]:
    """Return step and number of the micro-batch before whose buffers those of k others come."""
    t, place = divmod(k, plan.num_microbatches)
    w, number = divmod(place, plan.rounds)
    return t, number * plan.num_workers + w if plan.rounds > 1 else place


def parameters(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Insert P and V around UPDATEs, and T before them.

    Args:
        program: of worker ``w``, with UPDATEs.
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
            yield from _send_version(plan, a)
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
            s = plan.end(t, j) + 1
            update = Action(kind=Kind.UPDATE, t=t, j=j, v=t + 1, s=s)
            yield _parameter(plan, Kind.RECV, payload, update, plan.owner(j))


def _send_version(plan: Plan, update: Action) -> Iterator[Action]:
    for other in _others(plan, update.j):
        yield _parameter(plan, Kind.SEND, Payload.P, update, other)
    for other in version_readers(plan, update.j):
        yield _parameter(plan, Kind.SEND, Payload.V, update, other)


def _others(plan: Plan, j: int) -> tuple[int, ...]:
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
    ended = [
        Action(kind=Kind.UPDATE, t=t, j=j, v=t + 1, s=plan.end(t, j) + 1)
        for t in range(plan.num_steps)
        for j in range(plan.num_stages)
        if plan.owner(j) == w
    ]
    return sorted(_totals(plan, ended, w), key=lambda a: a.s)


def _parameter(plan: Plan, kind: Kind, payload: Payload, update: Action, peer: int) -> Action:
    assert update.v is not None
    t = plan.first_read(update.v, update.j)
    return message(kind, payload, update, peer, t=t, v=update.v)


def batches(plan: Plan, program: Iterable[Action], w: int) -> Iterator[Action]:
    """Put D before the first F of each step, and TELL and L behind its last B.

    Args:
        program: F and B of worker ``w``, in the order of time.
    """
    if plan.axes.placement.runs_whole_micro:
        yield from program
        return
    replica, actions = plan.axes.placement.replica(w), list(program)
    firsts = _of_each_step(actions, Kind.F)
    lasts = _of_each_step(reversed(actions), Kind.B)
    last_stage = plan.num_stages - 1  # behind whose last backward losses are sent
    waiting: list[Action] = []  # last backwards of steps whose losses have not been sent yet
    for a in actions:
        while waiting and plan.end(waiting[0].t, last_stage) < a.s:
            yield from _told(plan, waiting.pop(0), w, replica[-1])
        if a is firsts.get(a.t) and len(replica) > 1:
            yield from _share(plan, Payload.D, a, w, plan.beginner(w, a.t))
        yield a
        is_last = (a.i or 0) // plan.replicas == plan.num_microbatches // plan.replicas - 1
        if w == replica[-1] and is_last and a.kind is Kind.B and a.j == last_stage:
            yield _tell(plan, a, w)
            yield from _share(plan, Payload.L, a, w, w)
        elif w != replica[-1] and a is lasts.get(a.t):
            waiting.append(a)
            while waiting and plan.end(waiting[0].t, last_stage) <= a.s:
                yield from _told(plan, waiting.pop(0), w, replica[-1])
    for a in waiting:
        yield from _told(plan, a, w, replica[-1])


def _told(plan: Plan, a: Action, w: int, source: int) -> Iterator[Action]:
    yield from _share(plan, Payload.L, a, w, source)
    yield _tell(plan, a, w)


def _tell(plan: Plan, a: Action, w: int) -> Action:
    return Action(kind=Kind.TELL, t=a.t, j=first_stage(plan, w), s=a.s)


def _of_each_step(actions: Iterable[Action], kind: Kind) -> dict[int, Action]:
    found: dict[int, Action] = {}
    for a in actions:
        if a.kind is kind:
            found.setdefault(a.t, a)
    return found


def _share(plan: Plan, payload: Payload, a: Action, w: int, source: int) -> Iterator[Action]:
    """Send from the source to all others of its replica, or receive from it."""
    if w != source:
        yield message(Kind.RECV, payload, a, source, j=first_stage(plan, w))
        return
    for other in plan.axes.placement.replica(w):
        if other != w and _takes_part(plan, other, a.t):
            yield message(Kind.SEND, payload, a, other, j=first_stage(plan, other))


def _takes_part(plan: Plan, w: int, t: int) -> bool:
    """Say whether a worker runs anything of a step; where they take turns, some may not."""
    if not plan.axes.placement.takes_turns:
        return True
    cells = product(range(plan.num_microbatches), range(plan.num_stages))
    return any(plan.worker_of(i, j, t) == w for i, j in cells)


def first_stage(plan: Plan, w: int) -> int:
    """Return the first stage of a worker, by which it is told of a step."""
    workers_of = plan.axes.placement.workers_of
    return next(j for j in range(plan.num_stages) if w in workers_of(j))
