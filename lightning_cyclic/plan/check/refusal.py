"""How a program is refused: the rule, the worker, and the timetable with an arrow."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from lightning_cyclic.errors import ValidationError
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.plan.clock import Entry, picture

if TYPE_CHECKING:
    from lightning_cyclic.plan import Plan

_SLOTS_BEFORE, _SLOTS_AFTER, _ROWS = 10, 4, 8


def refuse(plan: Plan, a: Action, w: int, *, given: str, allowed: str, todo: str) -> NoReturn:
    """Refuse a program because of one action.

    Args:
        plan: whose timetable is drawn.
        a: the offending action.
        w: its worker.
        given: what is wrong with it.
        allowed: what would be right.
        todo: what to do next, pasteable.

    Raises:
        ValidationError: always.
    """
    where = f"worker {w}, slot {a.s}, action {a}"
    raise ValidationError(
        f"{given} ({where}); allowed: {allowed}; {todo}\n{timetable_around(plan, a, w)}"
    )


def rows_around(plan: Plan, w: int) -> range:
    """Return the workers whose rows are drawn near one."""
    first_row = max(0, min(w - _ROWS // 2, plan.num_workers - _ROWS))
    return range(first_row, min(first_row + _ROWS, plan.num_workers))


def timetable_around(plan: Plan, a: Action, w: int) -> str:
    """Draw the timetable near an action, with an arrow under it.

    Args:
        plan: whose F and B are drawn; of large plans, only slots and workers near the action.
        a: the action to point at; drawn too if it is neither F nor B.
        w: its worker.
    """
    rows = rows_around(plan, w)
    slots = range(a.s - _SLOTS_BEFORE, a.s + _SLOTS_AFTER + 1)
    entries = [
        Entry(s, row, str(cell).partition("#")[0])
        for s, row, cell in plan.timetable
        if s in slots and row in rows
    ]
    if a.kind not in (Kind.F, Kind.B):
        entries.append(Entry(a.s, w, str(a).partition("#")[0]))
    return picture(entries, arrow=(a.s, w), first_row=rows.start)
