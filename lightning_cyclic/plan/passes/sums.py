"""sums: add gradients in the order of micro-batches, wherever these run.

    S     the sum up to micro-batch i, its worker -> that of micro-batch i+1
    ADD   the own gradient to the sum that has come
    T     the total of a step, worker of the last micro-batch -> owner

Where owners add (sharding "full") gradients travel instead of sums, each once:

    H     the gradient of micro-batch i, its worker -> owner
    ADD   each of them, the own among them, to the sum so far

Within groups gradients travel, too, to the worker that leads in the stage; sums between leads:

    H     the gradient of micro-batch i, its worker -> lead of its group
    S     the sum up to the last micro-batch of a group, its lead -> lead of the next group
    ADD   those of the group, one after the other, to the sum that has come

Where one worker runs a micro-batch and the one before it, its backward adds to the sum at once. Of
replicas that sum their own (pipelines, or workers that run several rounds), the last micro-batch
of each stands for all of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Payload, Program
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.passes.updates import together

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan


def sums(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    """Yield what a worker does with the gradient that its backward ``a`` has made."""
    i = a.i or 0
    if plan.sends_gradients:
        if i < first_that_counts(plan):
            return
        if (to := adder(plan, i, a.j, a.t)) != w:
            yield message(Kind.SEND, Payload.H, a, to, i=i)
        elif not plan.axes.sharding.gathers:
            yield from _sums_of_group(plan, a, w)
        return
    before = source_of_sum(plan, a, w)
    if before is not None:
        yield message(Kind.RECV, Payload.S, a, before, i=i - 1)
        yield Action(kind=Kind.ADD, t=a.t, j=a.j, i=i, s=a.s)
    if i == plan.num_microbatches - 1:
        if plan.owner(a.j) != w:
            yield message(Kind.SEND, Payload.T, a, plan.owner(a.j))
    elif i >= first_that_counts(plan) and (after := plan.worker_of(i + 1, a.j, a.t)) != w:
        yield message(Kind.SEND, Payload.S, a, after, i=i)


def _sums_of_group(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    """Add the gradients of a group to the sum of the groups before it, and hand it on."""
    of_group = range(i := (a.i or 0) - w % plan.group_size, i + plan.group_size)
    if of_group[0] > first_that_counts(plan):
        before = adder(plan, of_group[0] - 1, a.j, a.t)
        yield message(Kind.RECV, Payload.S, a, before, i=of_group[0] - 1)
    for i in of_group:
        if i != a.i:
            yield message(Kind.RECV, Payload.H, a, plan.worker_of(i, a.j, a.t), i=i)
        yield Action(kind=Kind.ADD, t=a.t, j=a.j, i=i, s=a.s)
    if i < plan.num_microbatches - 1:
        yield message(Kind.SEND, Payload.S, a, adder(plan, i + 1, a.j, a.t), i=i)
    elif plan.owner(a.j) != w:
        yield message(Kind.SEND, Payload.T, a, plan.owner(a.j))


def adder(plan: Plan, i: int, j: int, t: int) -> int:
    """Give the worker that adds the gradient of a micro-batch to the sum of those before it."""
    if plan.axes.sharding.gathers:
        return plan.owner(j)
    w = plan.worker_of(i, j, t)
    return plan.lead(w, j) if plan.sends_gradients else w


def sums_at_owner(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Let an owner receive the gradients of its stages, and add them.

    It is ready for each while the backward is run from which it comes, and adds it behind that;
    neither before the own step begins, as a flush leaves nothing pending, nor behind the update.

    Args:
        plan: whose ownership decides; nothing is inserted unless its owners add.
        program: of worker ``w``, with UPDATEs.
        w: worker.
    """
    if not plan.axes.sharding.gathers:
        yield from program
        return
    slots = list(accumulate((a.s for a in program), max))
    places: defaultdict[int, list[Action]] = defaultdict(list)  # before which action
    for (t, j), (begin, end) in _spans_of_steps(plan, program, w).items():
        for i in range(first_that_counts(plan), plan.num_microbatches):
            source, s = plan.worker_of(i, j, t), plan.slot(Kind.B, t, i, j)
            add = Action(kind=Kind.ADD, t=t, j=j, i=i, s=s)
            if source != w:
                place = min(max(bisect_left(slots, s), begin), end)
                places[place].append(message(Kind.RECV, Payload.H, add, source, i=i))
            places[min(max(bisect_right(slots, s), begin), end)].append(add)
    for n, a in enumerate(program):
        yield from _in_time(places[n])
        yield a
    yield from _in_time(places[len(program)])


def _spans_of_steps(
    plan: Plan, program: Program, w: int
) -> dict[tuple[int, int], tuple[int, int]]:
    """Return step and own stage -> where the step begins, and its call of the optimizer."""
    begins: dict[int, int] = {}
    found: dict[tuple[int, int], tuple[int, int]] = {}
    calls = together(program)
    for n, a in enumerate(program):
        if a.kind in (Kind.F, Kind.B):
            begins.setdefault(a.t, n)
        elif a.kind is Kind.UPDATE and plan.owner(a.j) == w:
            found[a.t, a.j] = begins[a.t], calls[n][0]
    return found


def _in_time(actions: Sequence[Action]) -> list[Action]:
    """Sort what is inserted in one place: backwards go from the last stage to the first."""
    return sorted(actions, key=lambda a: (a.s, a.kind is Kind.ADD, -a.j, a.i))


def source_of_sum(plan: Plan, a: Action, w: int) -> int | None:
    """Give the worker from which the sum comes that a gradient is added to; None for no other.

    Args:
        plan: whose placement says who runs what.
        a: F, B or ADD of a micro-batch.
        w: its worker.
    """
    i = a.i or 0
    if i <= first_that_counts(plan):
        return None
    before = plan.worker_of(i - 1, a.j, a.t)
    return None if before == w else before


def completes(plan: Plan, a: Action, w: int) -> bool:
    """Say whether a sum of which a worker is the owner is whole behind an action."""
    if plan.owner(a.j) != w:
        return False
    if a.kind is Kind.RECV:
        return a.payload is Payload.T
    if a.i != plan.num_microbatches - 1:
        return False
    is_added = plan.sends_gradients or source_of_sum(plan, a, w) is not None
    return a.kind is (Kind.ADD if is_added else Kind.B)


def first_that_counts(plan: Plan) -> int:
    """Give the first micro-batch whose gradient is handed on."""
    return plan.num_microbatches - plan.replicas if plan.sums_by_replica else 0


def first_users(plan: Plan, j: int) -> tuple[int, ...]:
    """List the stages before j whose parameters stage j uses, in the order of backwards.

    The first stage that uses a parameter counts it among its own: there all gradients meet, and
    there it is updated. All stages read the version that the first one reads. Under
    ``tied=((0, 3),)``, stage 3 uses parameters of stage 0, and

        W   their gradient      after B(i, 3) -> before B(i, 0), inside a replica
        V   their new version   after UPDATE of stage 0 -> before the first F(i, 3) that reads it

    Both carry the first stage. A worker has one copy for all of its stages: it sends one W for
    each micro-batch, after the last of its backwards that add to it, and receives one V for each
    version; none if it runs the first stage itself, or is a replica of who does and has P.
    """
    return tuple(sorted({tie[0] for tie in plan.tied if j in tie[1:]}, reverse=True))


def later_users(plan: Plan, j: int) -> tuple[int, ...]:
    """List the stages behind j that use parameters of stage j, in the order of backwards."""
    return tuple(sorted({k for tie in plan.tied if tie[0] == j for k in tie[1:]}, reverse=True))


def gradient_sources(plan: Plan, a: Action, w: int) -> tuple[int, ...]:
    """List the workers that send W to worker w before its B of a first stage."""
    users = (plan.worker_of(a.i or 0, k, a.t) for k in later_users(plan, a.j))
    return tuple(dict.fromkeys(user for user in users if user != w))


def reads_tied(plan: Plan, a: Action, first: int) -> int:
    """Give the version of tied parameters that an F or B reads: the one that the first stage read.

    So a parameter has one value for each micro-batch, though later stages could read a newer one.
    """
    return plan.reads(a.t, a.i or 0, first)


def version_readers(plan: Plan, j: int) -> tuple[int, ...]:
    """List the workers that use parameters of stage j without holding stage j."""
    workers_of = plan.axes.placement.workers_of
    holders = workers_of(j)
    users = (w for k in later_users(plan, j) for w in workers_of(k))
    return tuple(dict.fromkeys(w for w in users if w not in holders))


def receive_gradients(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    """Yield what must have come before the B of a first stage."""
    for source in gradient_sources(plan, a, w):
        yield message(Kind.RECV, Payload.W, a, source, i=a.i)


def send_gradients(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    """Yield what the B of a later stage completes on its worker."""
    for j in first_users(plan, a.j):
        own = [k for k in later_users(plan, j) if plan.worker_of(a.i or 0, k, a.t) == w]
        target = plan.worker_of(a.i or 0, j, a.t)
        if target != w and a.j == own[-1]:
            yield message(Kind.SEND, Payload.W, a, target, i=a.i, j=j)
