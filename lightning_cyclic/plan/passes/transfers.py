"""transfers: insert the messages, so that what one worker makes reaches those that need it.

Each is inserted where it is made and where it is needed first; ``receives.py`` says where it is
received, and ``messages.py`` in which order.

    R   module buffers          micro-batch i -> i+1, around each F of a relayed stage: buffers.py
    A   activations             stage j-1 -> j, where another worker runs the next stage
    G   activation gradients    stage j+1 -> j
    W   tied gradients          a later stage that uses parameters -> the first: ties.py
    S   partial gradient sums   micro-batch i -> i+1, and T, the total, to the owner: sums.py
    H   gradients               micro-batch i -> the owner, where owners add: sums.py
    P   parameters, V, tied     owner -> the others: parameters.py

Messages that cannot be told apart by worker carry the numbers of their receiver: A and G the
stage, R the step and micro-batch, P the step of the first reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Payload, Program
from lightning_cyclic.plan.passes.buffers import relays
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.passes.parameters import parameters
from lightning_cyclic.plan.passes.sums import sums, sums_at_owner
from lightning_cyclic.plan.passes.ties import receive_gradients, send_gradients

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
