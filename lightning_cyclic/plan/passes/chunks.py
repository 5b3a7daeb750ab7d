"""chunks: let what a stage has travel in several messages, each passed on as soon as it has come.

    whole      ADD, SEND S            K = 2     ADD.0, SEND S.0, ADD.1, SEND S.1

A sum visits all workers one after the other: whole, each hop takes as long as a stage's bytes do;
in K chunks a K-th of that, since a worker adds to chunk 0 and sends it on while chunk 1 comes.
Every element is added to in the same order, so that K changes no bit.

Receives are posted chunk by chunk where the whole would be, sends leave where it would. Only an
addition and the send of its sum, which follow each other on a lane, take turns. So each channel
has its messages in the same order as without chunks, K of them for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import IN_CHUNKS, Action, Kind, Lane, Payload

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan

_SUMS = frozenset({Payload.S, Payload.T})


def chunks(plan: Plan, actions: Iterable[Action]) -> Iterator[Action]:
    """Replace what travels whole by its chunks.

    Args:
        plan: that says how many there are.
        actions: what a worker does, in its order.
    """
    if plan.chunks == 1:
        yield from actions
        return
    numbers = range(plan.chunks)
    addition: Action | None = None  # whose sum may be sent on next
    for a in actions:
        is_sent_on = addition is not None and _sends_sum_of(a, addition)
        goes_beside = a.kind is Kind.SEND and a.lane is Lane.WEIGHTS
        if addition is not None and not goes_beside:
            for c in numbers:
                yield replace(addition, c=c)
                if is_sent_on:
                    yield replace(a, c=c)
            addition = None
        if is_sent_on:
            continue
        if a.kind is Kind.ADD:
            addition = a
        elif a.payload in IN_CHUNKS:
            yield from (replace(a, c=c) for c in numbers)
        else:
            yield a
    if addition is not None:
        yield from (replace(addition, c=c) for c in numbers)


def _sends_sum_of(a: Action, addition: Action) -> bool:
    is_sum = a.kind is Kind.SEND and a.payload in _SUMS
    return is_sum and (a.t, a.j) == (addition.t, addition.j)
