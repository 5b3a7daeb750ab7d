"""validate: check programs, those of a plan or altered ones, against the plan they are for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Kind, Program
from lightning_cyclic.plan.check.refusal import refuse
from lightning_cyclic.plan.check.replay import Replay
from lightning_cyclic.plan.check.versions import check_timetable
from lightning_cyclic.plan.dataflow import live_activations, live_versions, peak

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan

_COMPUTE = (Kind.F, Kind.B)
_TODO = "use the programs of make_plan(...)"


def validate(plan: Plan, programs: tuple[Program, ...] | None = None) -> None:
    """Check a plan's programs, or others for the same plan, action by action.

    Args:
        plan: whose numbers and rules hold.
        programs: one per worker, of the plan's steps and a flush behind them. [the plan's own]

    Raises:
        ValidationError: an action breaks a rule; the text has the timetable with an arrow.
    """
    check_timetable(plan)
    programs = plan.programs if programs is None else programs
    replay = Replay(plan)
    replay.run(programs)
    replay.check_flushed(plan.num_steps - 1)
    check_completeness(plan, programs)
    check_buffers(plan, programs)


def check_completeness(plan: Plan, programs: Sequence[Program]) -> None:
    """Check that each F and B is run once, by its worker and on its version.

    Raises:
        ValidationError: one is not.
    """
    done = Counter(
        (a, w) for w, program in enumerate(programs) for a in program if a.kind in _COMPUTE
    )
    for _, w, a in plan.timetable:
        if done[a, w] != 1:
            refuse(
                plan,
                a,
                w,
                given=f"on the version that the rule names, runs {done[a, w]} times",
                allowed="once, by the worker that the placement names",
                todo=_TODO,
            )


def check_buffers(plan: Plan, programs: Sequence[Program]) -> None:
    """Check that no worker keeps more than the timetable says.

    Raises:
        ValidationError: with what it keeps.
    """
    bounds = _activations_in_timetable(plan)
    for w, program in enumerate(programs):
        found = [("activations", live_activations(program), bounds[w])]
        for j, most in live_versions(program).items():
            found.append((f"versions of stage {j}", most, plan.depth(j)))
        for what, most, bound in found:
            if most > bound:
                refuse(
                    plan,
                    next(a for a in program if a.kind in _COMPUTE),
                    w,
                    given=f"keeps {most} {what} at once",
                    allowed=f"{bound}, as the timetable says",
                    todo=_TODO,
                )


def _activations_in_timetable(plan: Plan) -> dict[int, int]:
    """Count the most activations that each worker keeps, by the slots of the timetable."""
    spans: defaultdict[int, dict[tuple[int, int, int], list[int]]] = defaultdict(dict)
    one_by_one = 0 if plan.axes.placement.overlaps else 1 << 32
    for s, w, a in plan.timetable:
        key, slot = (a.t, a.i or 0, a.j), s + a.t * one_by_one
        # within a slot, what is freed comes after what is made: a worker may do both there
        spans[w].setdefault(key, []).append(2 * slot if a.kind is Kind.F else 2 * slot + 1)
    return {
        w: int(peak((begin, end, 1) for begin, end in found.values()))
        for w, found in spans.items()
    }
