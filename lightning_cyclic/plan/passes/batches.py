"""batches: bring the batch of a step to the workers of a replica, and its losses to all of them.

    D      the batch      worker of the first F of a step -> the others, before all else
    L      the losses     worker of the last stage -> the others of its replica
    TELL   what came out  on the worker of the last stage behind its last B there, and then L is
                          sent; on the others behind their last B, before they update

Both carry the receiver's first stage, and stay inside a replica; workers that run whole
micro-batches need none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from lightning_cyclic.plan.actions import GO_BACK, Action, Kind, Payload
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.plan import Plan


def batches(plan: Plan, program: Iterable[Action], w: int) -> Iterator[Action]:
    """Put D before the first F of each step, and TELL and L behind its last B.

    Args:
        program: F and B of worker ``w``, in the order of time.
    """
    if plan.axes.placement.runs_whole_micro:
        yield from program
        return
    replica, actions = plan.axes.placement.replica(w), list(program)
    firsts = _of_each_step(actions, go_back=False)
    lasts = _of_each_step(reversed(actions), go_back=True)
    waiting: list[Action] = []  # last backwards of steps whose losses have not been sent yet
    for a in actions:
        while waiting and _slot_of_losses(plan, waiting[0].t) < a.s:
            yield from _told(plan, waiting.pop(0), w)
        if a is firsts.get(a.t) and len(replica) > 1:
            yield from _share(plan, Payload.D, a, w, plan.beginner(w, a.t))
        yield a
        has_losses = w == teller(plan, w)
        if has_losses and _makes_last_losses(plan, a):
            yield _tell(plan, a, w)
            yield from _share(plan, Payload.L, a, w, w)
        elif not has_losses and a is lasts.get(a.t):
            waiting.append(a)
            while waiting and _slot_of_losses(plan, waiting[0].t) <= a.s:
                yield from _told(plan, waiting.pop(0), w)
    for a in waiting:
        yield from _told(plan, a, w)


def teller(plan: Plan, w: int) -> int:
    """Give the worker of w's replica that has the losses of a step: that of the last stage."""
    placement = plan.axes.placement
    last, replica = plan.num_stages - 1, placement.replica(w)
    if placement.takes_turns:  # it has one place, whose worker is always the same
        return replica[-1]
    return next(x for x in placement.workers_of(last) if x in replica)


def _slot_of_losses(plan: Plan, t: int) -> int:
    """Give the slot behind which the losses of a step are sent, so as to hold up no backward."""
    return plan.slot(Kind.B, t, plan.num_microbatches - 1, plan.num_stages - 1)


def _makes_last_losses(plan: Plan, a: Action) -> bool:
    is_last = (a.i or 0) // plan.replicas == plan.num_microbatches // plan.replicas - 1
    return is_last and a.kind in GO_BACK and a.j == plan.num_stages - 1


def _told(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    yield from _share(plan, Payload.L, a, w, teller(plan, w))
    yield _tell(plan, a, w)


def _tell(plan: Plan, a: Action, w: int) -> Action:
    return Action(kind=Kind.TELL, t=a.t, j=first_stage(plan, w), s=a.s)


def _of_each_step(actions: Iterable[Action], *, go_back: bool) -> dict[int, Action]:
    found: dict[int, Action] = {}
    for a in actions:
        if (a.kind is Kind.F) is not go_back:
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
