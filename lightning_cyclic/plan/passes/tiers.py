"""tiers: fetch optimizer state before the update that needs it, evict and drop it behind.

Copies run on a lane of their own, one after the other, beside what the worker computes:

    B1  FETCH_O2  B0  UPDATE2  EVICT_O2  UPDATE1  FREE_O2  ...

A FETCH finds the room that the FREEs before it have left, so that what is in memory at each place
of a program can be counted from the program alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lightning_cyclic.plan.actions import COMPUTE, Action, Kind, Lane, Payload, Program
from lightning_cyclic.plan.passes.messages import begins_of_steps, step_of
from lightning_cyclic.plan.plan import Plan

_WORK = COMPUTE | {Kind.UPDATE}
_IN_ONE_PLACE = (Kind.EVICT, Kind.FREE, Kind.FETCH)  # what goes makes room for what comes


def tiers(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert what moves between tiers; change nothing where all stays in memory.

    Args:
        programs: with everything else.
    """
    if plan.tiers is None:
        return programs
    moved, ahead = plan.tiers.moved, plan.tiers.ahead
    return tuple(tuple(_with_moves(program, moved, ahead)) for program in programs)


def _with_moves(program: Program, moved: tuple[int, ...], ahead: int) -> Iterator[Action]:
    work = [n for n, a in enumerate(program) if a.kind in _WORK]
    begins = begins_of_steps(program)
    moves: defaultdict[int, list[Action]] = defaultdict(list)  # place -> what comes before it
    leaving: dict[int, tuple[int, int, Action]] = {}  # stage -> its UPDATE, where it goes, FREE
    for k, n in enumerate(work):
        a = program[n]
        if a.kind is Kind.UPDATE and moved[a.j]:
            # not in a step before: a flush may come between
            first = max(work[max(k - ahead, 0)], begins[step_of(a)])
            if a.j in leaving:  # what has not gone yet goes, before it comes again
                before, place, free = leaving[a.j]
                first = max(first, before + 1)
                moves[min(place, first)].append(free)
            last = work[min(k + ahead, len(work) - 1)]
            moves[first].append(_move(Kind.FETCH, a, program[first].s, Lane.TIERS))
            moves[n + 1].append(_move(Kind.EVICT, a, a.s, Lane.TIERS))
            leaving[a.j] = n, last + 1, _move(Kind.FREE, a, program[last].s)
    for _, place, free in leaving.values():
        moves[place].append(free)
    for n in range(len(program) + 1):
        yield from sorted(moves[n], key=lambda a: _IN_ONE_PLACE.index(a.kind))
        yield from program[n : n + 1]


def _move(kind: Kind, update: Action, s: int, lane: Lane = Lane.MAIN) -> Action:
    """Make a move of the state that an update needs."""
    return Action(kind=kind, payload=Payload.O, t=update.t, j=update.j, s=s, lane=lane)
