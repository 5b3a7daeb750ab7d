"""buffers: hand module buffers that training changes on from micro-batch to micro-batch.

Of workers that run several rounds, from the last of one worker to the first of the next.

    R   around each forward of a relayed stage: what micro-batch k left, to the worker of k + 1
    C   at a flush: the newest, from who has them to all other holders, one after the other

R carries the step and micro-batch that it is received for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.messages import message

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan


def relays(plan: Plan, program: Iterable[Action], w: int) -> Iterator[Action]:
    """Put R around the forwards of relayed stages.

    A stage whose buffers change in later stages, too, hands them on behind the last of these.

    Args:
        plan: names the relayed stages.
        program: of worker ``w``.
        w: worker.
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

    Args:
        plan: names the relayed stages.
        t: the last step that has begun.
        w: worker.
    """
    s = plan.slot(Kind.B, t, plan.num_microbatches - 1, 0) + 1
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
