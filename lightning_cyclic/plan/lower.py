"""The heart: programs are made of plans, pass by pass.

    make_plan(...)  ->  Plan  ->  program_of(plan)  ->  proof_of(plan)

Each pass is a pure function from programs to programs; read them in this order.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from lightning_cyclic.plan.actions import Action
from lightning_cyclic.plan.actions import Program as Actions
from lightning_cyclic.plan.passes.adds import adds
from lightning_cyclic.plan.passes.batches import batches
from lightning_cyclic.plan.passes.graphs import graphs
from lightning_cyclic.plan.passes.norms import norms
from lightning_cyclic.plan.passes.receives import lanes, receives
from lightning_cyclic.plan.passes.route import route
from lightning_cyclic.plan.passes.shards import shards
from lightning_cyclic.plan.passes.tiers import tiers
from lightning_cyclic.plan.passes.updates import updates
from lightning_cyclic.plan.plan import Plan, kept
from lightning_cyclic.plan.program import NotSteadyError, Program, last_that_repeats


@kept
def program_of(plan: Plan) -> Program:
    """Return what every worker does, step by step, without end."""
    short = plan.shortest
    irregular = 2 if plan.axes.weights.needs_previous else 1  # at least: where 0 is read twice
    num_steps = 1 + irregular + short.repeats + plan.steps_under_way
    while True:  # until the window shows that the program repeats
        shown = replace(short, num_steps=num_steps)
        if shown.is_settled(last_that_repeats(shown)):  # else no window need be made to see it
            with suppress(NotSteadyError):
                return Program(plan, window(shown), shown)
        num_steps += num_steps // 2


@kept
def programs_of(plan: Plan) -> tuple[Actions, ...]:
    """Return the actions of each worker over the plan's steps, with a flush behind them."""
    return program_of(plan).first(plan.num_steps)


@lru_cache(maxsize=4)  # a plan and the probe that it is proved on look at the same steps
def window(plan: Plan) -> tuple[Actions, ...]:
    """Make the actions of each worker over the first steps of a plan, as many as it has."""
    # [1] Who computes what on which version; [2] which batch comes before it, which losses behind.
    programs = tuple(tuple(batches(plan, program, w)) for w, program in enumerate(_in_time(plan)))
    # [3] Where versions are made, [4] gradients added; [5] who is sent what others make.
    programs = updates(plan, programs)
    programs = tuple(tuple(adds(plan, program, w)) for w, program in enumerate(programs))
    programs = norms(plan, route(plan, programs))  # [6] what all owners must know of all others
    # [7] What runs beside the compute, [8] where receives are posted, [9] who holds the bytes,
    # [10] and where, [11] also those that forwards leave.
    programs = tiers(plan, shards(plan, receives(plan, lanes(plan, programs))))
    return graphs(plan, programs)


def computed(plan: Plan) -> tuple[Actions, ...]:
    """List what each worker computes and updates: its steps, without messages and made soon.

    And what moves between tiers meanwhile.
    """
    return graphs(plan, tiers(plan, updates(plan, _in_time(plan))))


def _in_time(plan: Plan) -> tuple[Actions, ...]:
    """List what each worker computes, in the order of the timetable."""
    one_by_one = not plan.axes.placement.overlaps
    cells: list[list[Action]] = [[] for _ in range(plan.num_workers)]
    for _, w, a in plan.timetable:
        cells[w].append(a)
    return tuple(
        tuple(sorted(found, key=lambda a: (a.t if one_by_one else 0, plan.time(a))))
        for found in cells
    )
