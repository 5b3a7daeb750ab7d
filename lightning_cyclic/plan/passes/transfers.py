"""transfers: insert the messages, so that what one worker makes reaches those that need it.

Each is inserted where it is made and where it is needed first; ``messages.py`` brings receives
into the order of the sends.

    R   module buffers          micro-batch i -> i+1, around each F of a relayed stage
    A   activations             stage j-1 -> j, where another worker runs the next stage
    G   activation gradients    stage j+1 -> j
    S   partial gradient sums   micro-batch i -> i+1, and T, the total, to the owner
    W   tied gradients          a later stage that uses parameters -> the first: see ``ties.py``
    P   parameters, V, tied     owner -> the others: see ``parameters.py``

Messages that cannot be told apart by worker carry the numbers of their receiver: A and G the
stage, R the step and micro-batch, P the step of the first reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Payload, Program
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.passes.parameters import parameters
from lightning_cyclic.plan.passes.ties import receive_gradients, send_gradients

if TYPE_CHECKING:
    from lightning_cyclic.plan import Plan


def transfers(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert every SEND and RECV but those of ``sharding="full"``.

    Args:
        plan: whose placement and ownership decide.
        programs: with UPDATEs, one program per worker.

    Returns:
        Programs with a receive for each send, where its message is needed first.
    """
    return tuple(
        tuple(parameters(plan, _messages(plan, program, w), w))
        for w, program in enumerate(programs)
    )


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
        yield message(Kind.RECV, Payload.R, a, other, i=a.i)
    elif other != w:
        yield message(Kind.SEND, Payload.R, a, other, t=t_other, i=i_other)


def _messages(plan: Plan, program: Iterable[Action], w: int) -> Iterator[Action]:
    """Put A, G, W, S and the sending of T around each F and B."""
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
            yield message(kind, payload, a, other, i=a.i, j=j)


def _sum(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    """Add to the sum of the micro-batches before, and hand it on.

    Of replicas that sum their own, it is the last one of each that does so.
    """
    i = a.i or 0
    first = plan.num_micro - plan.width if plan.sums_by_replica else 0
    if i < first:
        return
    if i > first and (before := plan.worker_of(i - 1, a.j, a.t)) != w:
        yield message(Kind.RECV, Payload.S, a, before, i=i - 1)
    if i == plan.num_micro - 1:
        if plan.owner(a.j) != w:
            yield message(Kind.SEND, Payload.T, a, plan.owner(a.j))
    elif (after := plan.worker_of(i + 1, a.j, a.t)) != w:
        yield message(Kind.SEND, Payload.S, a, after, i=i)
