"""adds: add gradients in the order of micro-batches, wherever these run.

    ADD   a gradient to the sum of those before it, which are in it

Where one worker runs a micro-batch and the one before it, its backward adds at once. Else ADD
does, behind the backward; within groups at the worker that leads in the stage, which adds the
gradients of the group one after the other. Where owners add (sharding "full", or a codec of
gradients) gradients travel to them: an owner is ready for each while the backward is run from
which it comes, and adds it behind that; neither before the own step begins, as a flush leaves
nothing pending, nor behind the update.

Of local steps differences of weights are added: differences.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from lightning_cyclic.plan.actions import COMPUTE, MAKE_GRADIENTS, Action, Kind, Payload, Program
from lightning_cyclic.plan.passes.differences import differences
from lightning_cyclic.plan.passes.messages import message
from lightning_cyclic.plan.passes.updates import together
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.plan.roles import adder, adds_at_once, first_that_counts


def adds(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    """Insert ADD, and where owners add, their receives.

    Args:
        program: of worker ``w``, with UPDATEs.
    """
    if plan.axes.weights.is_local:
        return differences(plan, program, w)
    travel = plan.owners_add and plan.axes.placement.runs_whole_micro
    return (_at_owner if travel else _behind_backwards)(plan, program, w)


def _behind_backwards(plan: Plan, program: Program, w: int) -> Iterator[Action]:
    for a in program:
        yield a
        if a.kind in MAKE_GRADIENTS:
            for i in _added_behind(plan, a, w):
                yield Action(kind=Kind.ADD, t=a.t, j=a.j, i=i, s=a.s)


def _added_behind(plan: Plan, a: Action, w: int) -> Sequence[int]:
    """List the micro-batches whose gradients a worker adds when its backward is over."""
    i = a.i or 0
    if i < first_that_counts(plan) or adder(plan, i, a.j, a.t) != w:
        return ()
    if plan.sends_gradients and plan.axes.placement.runs_whole_micro:
        return range(first := i - w % plan.group_size, first + plan.group_size)
    return () if adds_at_once(plan, a) else (i,)


def _at_owner(plan: Plan, program: Program, w: int) -> Iterator[Action]:
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
        if a.kind in COMPUTE:
            begins.setdefault(a.t, n)
        elif a.kind is Kind.UPDATE and plan.owner(a.j) == w:
            found[a.t, a.j] = begins[a.t], calls[n][0]
    return found


def _in_time(actions: Sequence[Action]) -> list[Action]:
    """Sort what is inserted in one place: backwards go from the last stage to the first."""
    return sorted(actions, key=lambda a: (a.s, a.kind is Kind.ADD, -a.j, a.i))
