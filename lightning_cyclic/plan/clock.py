"""Slot arithmetic that is exact, the text picture of a timetable, and refusals that show it.

A timetable counts in slots: one stage forward or backward. Worker i of cyclic data parallelism
runs 2S/N slots behind worker i-1, which is a fraction when N does not divide 2S. So schedules
count in *ticks*, integers of which a slot has ``unit``, and only what is drawn is rounded up to
whole slots. No comparison in this package ever needs a tolerance.

    slot     0   1   2   3   4   5   6   7
    w0      0F0 1F0 1B0 0B0 0F0 1F0 1B0 0B0
    w1       .   .  0F1 1F1 1B1 0B1 0F1 1F1
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from lightning_cyclic.errors import ValidationError
from lightning_cyclic.plan.actions import COMPUTE, Action
from lightning_cyclic.plan.plan import Plan


class Entry(NamedTuple):
    """Hold one cell of a picture: what worker ``w`` does in slot ``s``, as text."""

    s: int
    w: int
    text: str


def picture(
    entries: Iterable[Entry], *, arrow: tuple[int, int] | None = None, first_row: int = 0
) -> str:
    """Draw a timetable: workers as rows, slots as columns.

    Args:
        entries: the cells; several in one cell are joined by ``+``, as one worker runs them
            one after the other.
        arrow: slot and worker of the cell to point at with ``^``. [None: no arrow]
        first_row: worker of the first row. [0]

    Returns:
        Lines of text without a newline at the end; a dot where a worker idles.

    Example:
        >>> print(picture([Entry(0, 0, "0F0"), Entry(1, 1, "1F0")], arrow=(1, 1)))
        slot   0   1
        w0   0F0   .
        w1     . 1F0
                   ^
    """
    cells: dict[tuple[int, int], str] = {}
    for s, w, text in entries:
        cells[s, w] = f"{cells[s, w]}+{text}" if (s, w) in cells else text
    if not cells:
        return "slot"
    slots = range(min(s for s, _ in cells), max(s for s, _ in cells) + 1)
    num_workers = max(w for _, w in cells) + 1
    replicas = max(len(text) for text in [*cells.values(), str(slots[-1]), "..."])
    head = max(len("slot"), len(f"w{num_workers - 1}"))
    lines = [_line("slot", head, (str(s) for s in slots), replicas)]
    for w in range(first_row, num_workers):
        lines.append(_line(f"w{w}", head, (cells.get((s, w), ".") for s in slots), replicas))
        if arrow is not None and arrow[1] == w:
            marks = ("^" if s == arrow[0] else "" for s in slots)
            lines.append(_line("", head, marks, replicas).rstrip())
    return "\n".join(lines)


def _line(name: str, head: int, cells: Iterable[str], replicas: int) -> str:
    return " ".join([name.ljust(head), *(cell.rjust(replicas) for cell in cells)])


_SLOTS_BEFORE, _SLOTS_AFTER, _ROWS = 10, 4, 8


def refuse(plan: Plan, a: Action, w: int, *, given: str, allowed: str, todo: str) -> NoReturn:
    """Refuse a program because of one action."""
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
        plan: whose cells are drawn; of large plans, only slots and workers near the action.
        a: the action to point at; drawn too if it is no cell.
    """
    rows = rows_around(plan, w)
    slots = range(a.s - _SLOTS_BEFORE, a.s + _SLOTS_AFTER + 1)
    entries = [
        Entry(s, row, str(cell).partition("#")[0])
        for s, row, cell in plan.timetable
        if s in slots and row in rows
    ]
    if a.kind not in COMPUTE:
        entries.append(Entry(a.s, w, str(a).partition("#")[0]))
    return picture(entries, arrow=(a.s, w), first_row=rows.start)
