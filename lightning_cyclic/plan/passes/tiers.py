"""tiers: fetch optimizer state before the update that needs it, evict and drop it behind.

Copies run on a lane of their own, one after the other, beside what the worker computes:

    B1  FETCH_O2  B0  UPDATE2  EVICT_O2  UPDATE1  FREE_O2  ...

A FETCH finds the room that the FREEs before it have left, so that what is in memory at each place
of a program can be counted from the program alone.
"""

from __future__ import annotations

from collections import defaultdict

from lightning_cyclic.plan.actions import COMPUTE, Action, Kind, Lane, Payload, Program
from lightning_cyclic.plan.passes.messages import begins_of_steps, step_of
from lightning_cyclic.plan.plan import Plan

_WORK = COMPUTE | {Kind.UPDATE}


def tiers(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert what moves between tiers; change nothing where all stays in memory.

    Args:
        programs: with everything else.
    """
    if plan.tiers is None:
        return programs
    moved, ahead = plan.tiers.moved, plan.tiers.ahead
    return tuple(_with_moves(program, moved, ahead) for program in programs)


def _with_moves(program: Program, moved: tuple[int, ...], ahead: int) -> Program:
    work = [n for n, a in enumerate(program) if a.kind in _WORK]
    begins = begins_of_steps(program)
    before: defaultdict[int, list[Action]] = defaultdict(list)  # place -> what comes before it
    frees: defaultdict[int, list[Action]] = defaultdict(list)
    for k, n in enumerate(work):
        a = program[n]
        if a.kind is Kind.UPDATE and moved[a.j]:
            # not in a step before: a flush may come between
            first = max(work[max(k - ahead, 0)], begins[step_of(a)])
            before[first].append(_move(Kind.FETCH, a, program[first].s, Lane.TIERS))
            before[n + 1].insert(0, _move(Kind.EVICT, a, a.s, Lane.TIERS))
            last = work[min(k + ahead, len(work) - 1)]
            frees[last + 1].append(_move(Kind.FREE, a, program[last].s))
    found: list[Action] = []
    for n in range(len(program) + 1):
        evicted = [x for x in before[n] if x.kind is Kind.EVICT]
        fetched = [x for x in before[n] if x.kind is Kind.FETCH]
        found += [*evicted, *frees[n], *fetched, *program[n : n + 1]]
    return tuple(found)


def _move(kind: Kind, update: Action, s: int, lane: Lane = Lane.MAIN) -> Action:
    """Make a move of the state that an update needs."""
    return Action(kind=kind, payload=Payload.O, t=update.t, j=update.j, s=s, lane=lane)
