"""transfers: insert the messages, so that what one worker makes reaches those that need it.

Each is inserted where it is made and where it is needed first; ``receives.py`` says where it is
received, and ``messages.py`` in which order.

    R   module buffers          micro-batch i -> i+1, around each F of a relayed stage: buffers.py
    A   activations             stage j-1 -> j, where another worker runs the next stage
    G   activation gradients    stage j+1 -> j
    W   tied gradients          a later stage that uses parameters -> the first: sums.py
    S   partial gradient sums   micro-batch i -> i+1, and T, the total, to the owner: sums.py
    H   gradients               micro-batch i -> the owner, where owners add: sums.py
    P   parameters, V, tied     owner -> the others: parameters.py

Messages that cannot be told apart by worker carry the numbers of their receiver: A and G the
stage, R the step and micro-batch, P the step of the first reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Payload, Program
from lightning_cyclic.plan.passes.buffers import relays
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.passes.parameters import parameters
from lightning_cyclic.plan.passes.sums import (
    receive_gradients,
    send_gradients,
    sums,
    sums_at_owner,
)

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan


def transfers(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert every SEND and RECV but those of sharded parameters, of batches and of norms.

    Args:
        plan: whose placement and ownership decide.
        programs: with UPDATEs, one program per worker.

    Returns:
        Programs with a receive for each send, where its message is needed first.
    """
    return tuple(
        tuple(sums_at_owner(plan, tuple(_with_messages(plan, program, w)), w))
        for w, program in enumerate(programs)
    )


def _with_messages(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    return parameters(plan, tuple(_messages(plan, relays(plan, program, w), w)), w)


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


def batches(plan: Plan, program: Iterable[Action], w: int) -> Iterator[Action]:
    """Put D before the first F of each step, and TELL and L behind its last B.

        D      the batch        worker of the first F of a step -> the others, first of all
        L      the losses       worker of the last stage -> the others of its replica
        TELL   what came out    on the worker of the last stage behind its last B there, and then L
                                is sent; on the others behind their last B, before they update

    D and L carry the first stage of the receiver, and both stay inside a replica. Workers that run
    whole micro-batches need none of these.

    Args:
        plan: whose placement says who works together.
        program: F and B of worker ``w``, in the order of time.
        w: worker.
    """
    if plan.axes.placement.runs_whole_micro:
        yield from program
        return
    replica, actions = plan.axes.placement.replica(w), list(program)
    firsts = _of_each_step(actions, Kind.F)
    lasts = _of_each_step(reversed(actions), Kind.B)
    waiting: list[Action] = []  # last backwards of steps whose losses have not been sent yet
    for a in actions:
        while waiting and _losses_leave(plan, waiting[0].t) < a.s:
            yield from _told(plan, waiting.pop(0), w, replica[-1])
        if a is firsts.get(a.t) and len(replica) > 1:
            yield from _share(plan, Payload.D, a, w, plan.beginner(w, a.t))
        yield a
        is_last = _local(plan, a) == plan.num_microbatches // plan.replicas - 1
        if w == replica[-1] and is_last and a.kind is Kind.B and a.j == plan.num_stages - 1:
            yield _tell(plan, a, w)
            yield from _share(plan, Payload.L, a, w, w)
        elif w != replica[-1] and a is lasts.get(a.t):
            waiting.append(a)
            while waiting and _losses_leave(plan, waiting[0].t) <= a.s:
                yield from _told(plan, waiting.pop(0), w, replica[-1])
    for a in waiting:
        yield from _told(plan, a, w, replica[-1])


def _losses_leave(plan: Plan, t: int) -> int:
    """Give the slot behind which the losses of a step are sent."""
    return plan.slot(Kind.B, t, plan.num_microbatches - 1, plan.num_stages - 1)


def _told(plan: Plan, a: Action, w: int, source: int) -> Iterator[Action]:
    yield from _share(plan, Payload.L, a, w, source)
    yield _tell(plan, a, w)


def _tell(plan: Plan, a: Action, w: int) -> Action:
    return Action(kind=Kind.TELL, t=a.t, j=first_stage(plan, w), s=a.s)


def _of_each_step(actions: Iterable[Action], kind: Kind) -> dict[int, Action]:
    """Return the first action of a kind of each step."""
    found: dict[int, Action] = {}
    for a in actions:
        if a.kind is kind:
            found.setdefault(a.t, a)
    return found


def _local(plan: Plan, a: Action) -> int:
    """Count the micro-batches of the same replica and step before an action's."""
    return (a.i or 0) // plan.replicas


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
