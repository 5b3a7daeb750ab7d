"""lanes: say what runs beside the compute of a worker that runs whole micro-batches.

    sums      gradients are added to the sum that has come, and it is passed on
    weights   a version that has come is passed on at once, wherever the compute is

An owner sends a version itself: behind others on a lane it would wait for what comes later.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind, Lane, Payload, Program
from lightning_cyclic.plan.passes.messages import begins_of_steps

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan


def lanes(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Put actions on lanes, and what is handed on where it can come first.

    Args:
        plan: whose workers run whole micro-batches, or single stages, which have one lane.
        programs: with all messages, each receive right before its first reader.
    """
    if not plan.axes.placement.runs_whole_micro or plan.num_workers == 1:
        return programs
    return tuple(_handed_on_early(plan, program, w) for w, program in enumerate(programs))


def _lane(plan: Plan, a: Action, w: int) -> Lane:
    if a.kind is Kind.ADD or a.payload in (Payload.S, Payload.T):
        return Lane.SUMS
    sender = w if a.kind is Kind.SEND else a.peer
    is_handed_on = a.payload is Payload.P and sender != plan.owner(a.j)
    return Lane.WEIGHTS if is_handed_on else Lane.MAIN


def _handed_on_early(plan: Plan, program: Program, w: int) -> Program:
    """Move the handing on of versions to where there is room for them.

    There is behind the last read of the version two before, as buffers come in pairs, and not
    before the step of the update begins.
    """
    marked = [replace(a, lane=lane) if (lane := _lane(plan, a, w)) else a for a in program]
    begins, numbers = begins_of_steps(marked), range(len(marked))
    last_read = {(a.j, a.v): n for n, a in enumerate(marked) if a.kind in (Kind.F, Kind.B)}
    handed_on = [n for n in numbers if marked[n].lane is Lane.WEIGHTS and _sends(marked[n])]
    places, moved, least = list(numbers), [], 0
    for n in handed_on:
        j, v = marked[n].j, marked[n].v or 0
        room = last_read.get((j, v - 2), -1) + 1
        least = min(max(least, room, begins[v - 1]), n)
        places[n] = least
        moved.append(n)
    rank = {n: k for k, n in enumerate(moved)}
    order = sorted(numbers, key=lambda n: (places[n], n not in rank, rank.get(n, n)))
    return tuple(marked[n] for n in order)


def _sends(a: Action) -> bool:
    return a.kind is Kind.SEND
