"""graphs: put away what a forward leaves for its backward, and bring it back before that.

Copies run on the lane of the tiers, beside what the worker computes:

    F1  EVICT_A1  F2  FREE_A1  B0 ... F5  FETCH_A1  B4  B1

One forward or backward runs while a graph leaves, and one while it comes back. Where none would be
left between these two, the graph stays: nothing moves that would come right back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lightning_cyclic.plan.actions import (
    COMPUTE,
    GO_BACK,
    Action,
    Kind,
    Lane,
    Payload,
    Program,
)
from lightning_cyclic.plan.plan import Plan

_LEAST = 4  # from a forward to its backward: F, leaving, away, coming back, B
_IN_ONE_PLACE = (Kind.EVICT, Kind.FREE, Kind.FETCH)  # what goes makes room for what comes


def graphs(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Insert what moves graphs; change nothing where they stay in memory.

    Args:
        programs: with all that is computed.
    """
    if not plan.offloads:
        return programs
    return tuple(tuple(_with_moves(program)) for program in programs)


def _with_moves(program: Program) -> Iterator[Action]:
    cells = [n for n, a in enumerate(program) if a.kind in COMPUTE]
    moves: defaultdict[int, list[Action]] = defaultdict(list)  # place -> what comes before it
    begins: dict[tuple[int, int | None, int], int] = {}  # of forwards, among the cells
    for k, n in enumerate(cells):
        a = program[n]
        if a.kind is Kind.F:
            begins[a.t, a.i, a.j] = k
        elif a.kind in GO_BACK and k - (begin := begins[a.t, a.i, a.j]) >= _LEAST:
            first, second, last = cells[begin], cells[begin + 1], cells[k - 1]
            moves[first + 1].append(_move(Kind.EVICT, program[first], a, Lane.TIERS))
            moves[second + 1].append(_move(Kind.FREE, program[second], a))
            moves[last].append(_move(Kind.FETCH, program[last], a, Lane.TIERS))
    for n in range(len(program) + 1):
        yield from sorted(moves[n], key=lambda a: _IN_ONE_PLACE.index(a.kind))
        yield from program[n : n + 1]


def _move(kind: Kind, at: Action, backward: Action, lane: Lane = Lane.MAIN) -> Action:
    """Make a move of the graph that a backward needs, in the slot of another action."""
    t, i, j = backward.t, backward.i, backward.j
    return Action(kind=kind, payload=Payload.A, t=t, i=i, j=j, s=at.s, lane=lane)
