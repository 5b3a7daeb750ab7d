"""tiers: fetch what a stage needs before it is used; evict what has changed, and drop it behind.

Copies run on a lane of their own, one after the other, beside what the worker computes. Optimizer
state comes for its update, and where memory has no room for all weights they come for all uses of
a stage that follow each other:

    B1  FETCH_O2  B0  UPDATE2  EVICT_O2  UPDATE1  FREE_O2  ...
    FETCH_P1  F0  FREE_P0  FETCH_P2  F1  FREE_P1  F2 B2 UPDATE2  EVICT_P2  ...

A FETCH finds the room that the FREEs before it have left, so that what is in memory at each place
of a program can be counted from the program alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from lightning_cyclic.plan.actions import COMPUTE, Action, Kind, Lane, Payload, Program
from lightning_cyclic.plan.passes.messages import begins_of_steps, step_of
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.plan.tiers import Tiers

_WORK = COMPUTE | {Kind.UPDATE}
_IN_ONE_PLACE = (Kind.EVICT, Kind.FREE, Kind.FETCH)  # what goes makes room for what comes


def tiers(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert what moves between tiers; change nothing where all stays in memory.

    Args:
        programs: with everything else.
    """
    if plan.tiers is None:
        return programs
    return tuple(tuple(_with_moves(program, plan.tiers)) for program in programs)


class _Use(NamedTuple):
    """Be a run of works that need something of a stage.

    Args:
        first, last: works, counted in the program without anything else.
    """

    payload: Payload
    first: int
    last: int


def _with_moves(program: Program, moved: Tiers) -> Iterator[Action]:
    work = [n for n, a in enumerate(program) if a.kind in _WORK]
    begins = begins_of_steps(program)
    moves: defaultdict[int, list[Action]] = defaultdict(list)  # place -> what comes before it
    # what leaves -> its last use, where it goes, FREE
    leaving: dict[tuple[Payload, int], tuple[int, int, Action]] = {}
    for payload, k, last in _uses(program, work, moved):
        a, b = program[work[k]], program[work[last]]
        # not in a step before: a flush may come between
        first = max(work[max(k - moved.ahead, 0)], begins[step_of(a)])
        if (payload, a.j) in leaving:  # what has not gone yet goes, before it comes again
            before, place, free = leaving[payload, a.j]
            first = max(first, before + 1)
            moves[min(place, first)].append(free)
        moves[first].append(_move(Kind.FETCH, payload, a, program[first].s, Lane.TIERS))
        end = work[last]
        if b.kind is Kind.UPDATE:  # else where there is room has the same
            moves[end + 1].append(_move(Kind.EVICT, payload, b, b.s, Lane.TIERS))
            end = work[min(last + moved.ahead, len(work) - 1)]
        leaving[payload, a.j] = (
            work[last], end + 1, _move(Kind.FREE, payload, b, program[end].s)
        )  # fmt: skip
    for _, place, free in leaving.values():
        moves[place].append(free)
    for n in range(len(program) + 1):
        yield from sorted(moves[n], key=lambda a: _IN_ONE_PLACE.index(a.kind))
        yield from program[n : n + 1]


def _uses(program: Program, work: list[int], moved: Tiers) -> Iterator[_Use]:
    """Yield what needs something that moves, in the order of the program."""
    of_one = groupby(enumerate(work), key=lambda x: (program[x[1]].j, step_of(program[x[1]])))
    for (j, _), group in of_one:
        works = list(group)
        if moved.moves_weights(j):
            yield _Use(Payload.P, works[0][0], works[-1][0])
        for k, n in works:
            if program[n].kind is Kind.UPDATE and moved.moved[j]:
                yield _Use(Payload.O, k, k)


def _move(kind: Kind, payload: Payload, at: Action, s: int, lane: Lane = Lane.MAIN) -> Action:
    """Make a move of what a work needs, or has made."""
    is_before = kind is Kind.FETCH and at.kind is Kind.UPDATE
    v = None if payload is Payload.O or at.v is None else at.v - is_before
    return Action(kind=kind, payload=payload, t=at.t, j=at.j, v=v, s=s, lane=lane)
