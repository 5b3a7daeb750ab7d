"""copies: bring module buffers, at a flush, to all who hold them.

C   who has the newest -> all other holders, one after the other
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.plan.roles import handed_at


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
    t, i = handed_at(plan, k)
    return plan.worker_of(i, j, t)
