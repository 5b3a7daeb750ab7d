"""versions: prove on the timetable itself that everything is computed after what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.plan.check.refusal import refuse

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan


def check_timetable(plan: Plan) -> None:
    """Check that the timetable computes everything after what it needs.

    Of each stage, the first and the last micro-batch (of the first round and of all) stand for
    all: starts grow with i, and a rule that asks for too much asks it of the first.

    Raises:
        ValidationError: an F or B starts too early for the version that it reads.
    """
    for t in range(3):
        for j in range(plan.num_stages):
            for i in sorted(
                {0, plan.num_microbatches // plan.rounds - 1, plan.num_microbatches - 1}
            ):
                _check_version(plan, Kind.F, t, i, j, plan.reads(t, i, j))
                _check_version(plan, Kind.B, t, i, j, plan.backward_reads(t, i, j))
                _check_order(plan, t, i, j)


def _check_version(plan: Plan, kind: Kind, t: int, i: int, j: int, v: int) -> None:
    schedule = plan.axes.schedule
    start = schedule.forward(i, j) if kind is Kind.F else schedule.backward(i, j)
    newest = schedule.updates_before(t, start, j)
    if v > newest:
        a = Action(kind=kind, t=t, i=i, j=j, v=v, s=plan.slot(kind, t, i, j))
        refuse(
            plan,
            a,
            plan.worker_of(i, j, t),
            given=f"weights {plan.weights!r} on schedule {plan.schedule!r} read version {v} of "
            f"stage {j} before its update has been made",
            allowed=f"version {newest} or older, which exists in that slot",
            todo='use weights="delayed" or weights="freshest", or schedule="lockstep" '
            'or schedule="gpipe"',
        )


def _check_order(plan: Plan, t: int, i: int, j: int) -> None:
    """Check that a micro-batch meets its stages one after the other, there and back."""
    schedule = plan.axes.schedule
    before = schedule.forward(i, j - 1) if j else -schedule.unit
    after = schedule.backward(i, j + 1) if j + 1 < plan.num_stages else schedule.forward(i, j)
    for kind, start, needed in (
        (Kind.F, schedule.forward(i, j), before),
        (Kind.B, schedule.backward(i, j), after),
    ):
        if start - needed < schedule.unit:
            a = Action(kind=kind, t=t, i=i, j=j, s=plan.slot(kind, t, i, j))
            refuse(
                plan,
                a,
                plan.worker_of(i, j, t),
                given=f"schedule {plan.schedule!r} starts this before what it needs has ended",
                allowed="F after F of the stage before, B after B of the stage behind it",
                todo="move it to a later slot",
            )
