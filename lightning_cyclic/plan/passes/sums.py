"""sums: add gradients in the order of micro-batches, wherever these run.

    S     the sum up to micro-batch i, its worker -> that of micro-batch i+1
    ADD   the own gradient to the sum that has come
    T     the total of a step, worker of the last micro-batch -> owner

Where one worker runs a micro-batch and the one before it, its backward adds to the sum at once. Of
replicas that sum their own (pipelines, or workers that run several rounds), the last micro-batch
of each stands for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.messages import message

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan


def sums(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    """Yield what a worker does with the gradient that its backward ``a`` has made."""
    i = a.i or 0
    before = source_of_sum(plan, a, w)
    if before is not None:
        yield message(Kind.RECV, Payload.S, a, before, i=i - 1)
        yield Action(kind=Kind.ADD, t=a.t, j=a.j, i=i, s=a.s)
    if i == plan.num_micro - 1:
        if plan.owner(a.j) != w:
            yield message(Kind.SEND, Payload.T, a, plan.owner(a.j))
    elif i >= _first(plan) and (after := plan.worker_of(i + 1, a.j, a.t)) != w:
        yield message(Kind.SEND, Payload.S, a, after, i=i)


def source_of_sum(plan: Plan, a: Action, w: int) -> int | None:
    """Give the worker from which the sum comes that a gradient is added to; None for no other.

    Args:
        plan: whose placement says who runs what.
        a: F, B or ADD of a micro-batch.
        w: its worker.
    """
    i = a.i or 0
    if i <= _first(plan):
        return None
    before = plan.worker_of(i - 1, a.j, a.t)
    return None if before == w else before


def completes(plan: Plan, a: Action, w: int) -> bool:
    """Say whether a sum of which a worker is the owner is whole behind an action."""
    if plan.owner(a.j) != w:
        return False
    if a.kind is Kind.RECV:
        return a.payload is Payload.T
    if a.i != plan.num_micro - 1:
        return False
    is_added = source_of_sum(plan, a, w) is not None
    return a.kind is (Kind.ADD if is_added else Kind.B)


def _first(plan: Plan) -> int:
    """Give the first micro-batch whose gradient is handed on."""
    return plan.num_micro - plan.replicas if plan.sums_by_replica else 0
