"""sums: add gradients in the order of micro-batches, wherever these run, and tell their norms.

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

What decides about a step as a whole, the gradient norm over all stages or whether one of them
overflowed, needs the norms of all gradients before any update:

    N     the norms of a stage's gradients, its owner -> all other owners, or all other workers

They are sent as soon as a stage's sum is whole where updates are late, so that nobody waits; else
right before the update.
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
        a: F, B or ADD of a micro-batch.
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
    return plan.num_microbatches - plan.copies_of_stages if plan.sums_by_replica else 0


def norms(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert N; change nothing where nobody decides about all stages together."""
    if plan.norms == "none" or plan.num_workers == 1:
        return programs
    place = _at_updates if plan.decides_at_end else _early
    return tuple(tuple(place(plan, program, w)) for w, program in enumerate(programs))


def _at_updates(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Exchange right before the updates of each step, which are one behind the other.

    Who updates nothing, but is told, receives before the first new version comes.
    """
    told, calls = 0, together(program)  # steps whose norms have been exchanged
    hears = plan.norms == "all" and not calls
    for n, a in enumerate(program):
        comes = hears and a.kind is Kind.RECV and a.payload is Payload.P
        if (a.kind is Kind.UPDATE or comes) and (a.v or 0) > told:
            told = a.v or 0
            for b in () if comes else program[slice(*calls[n])]:
                yield from _sends(plan, b, w)
            yield from _receives(plan, a, w, told - 1)
        yield a


def _early(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Send behind what completes a sum; receive before the first action that needs to know."""
    t = 0  # the next step whose norms are received
    for a in program:
        while _needs(plan, a, t):
            yield from _receives(plan, a, w, t)
            t += 1
        yield a
        if completes(plan, a, w):
            yield from _sends(plan, a, w)


def _needs(plan: Plan, a: Action, t: int) -> bool:
    """Say whether an action needs to know of all gradients of step ``t``.

    The scale of a loss follows from the steps that have ended when the first loss of its step is
    computed; backwards multiply by it.
    """
    if a.kind is Kind.UPDATE:
        return plan.late_updates and a.t >= t
    return plan.norms == "all" and a.kind is Kind.B and plan.ended_before(a.t) > t


def _sends(plan: Plan, a: Action, w: int) -> Iterator[Action]:
    owners = {plan.owner(j) for j in range(plan.num_stages)}
    told = range(plan.num_workers) if plan.norms == "all" else sorted(owners)
    return (message(Kind.SEND, Payload.N, a, other) for other in told if other != w)


def _receives(plan: Plan, a: Action, w: int, t: int) -> Iterator[Action]:
    for j in range(plan.num_stages):
        if plan.owner(j) != w:
            yield message(Kind.RECV, Payload.N, a, plan.owner(j), t=t, j=j)
