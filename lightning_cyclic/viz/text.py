"""The text picture of a plan: workers as rows, slots as columns, the weight version in each cell.

    slot     0     1     2     3     4     5 ...
    w0   0F0@0 1F0@0 1B0@0 0B0@0 0F0@0 1F0@1
    w1       .     . 0F1@0 1F1@0 1B1@0 0B1@0

The cells read as actions do: stage, F or B (or its halves, I and W), micro-batch, ``@`` weight
version.
"""

from __future__ import annotations

import io
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from itertools import product

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.clock import Entry, picture

_CELL = re.compile(r"\d+([FBIW])\d+@(\d+)")
# One colour per version, so that a read of an old version stands out from its neighbours; a
# backward is reversed, its second half underlined. They are the terminal's own colours and so fit
# dark and light themes.
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
_STYLES = {"F": "", "B": "reverse ", "I": "reverse ", "W": "underline "}
_WORD = re.compile(r"\S+")
_NARROWEST_COLUMN = len(" 0F0@0")
_MORE = " ..."


def draw(
    plan: Plan, *, colour: bool = False, width: int | None = None, first_slot: int = 0
) -> str:
    """Draw the timetable of a plan.

    Args:
        plan: the plan; as many slots are drawn as its steps take.
        colour: mark versions and backwards by the colours of a terminal. [False: plain text]
        width: most characters per line; later slots are left out and ``...`` behind the slots
            says so. At least one slot is shown. [None: all slots]
        first_slot: slot at which the picture begins. [0]

    Returns:
        Lines of text, one per worker, below one with the slots.

    Raises:
        PlanError: if the plan ends before ``first_slot``.

    Example:
        >>> from lightning_cyclic.plan import make_plan
        >>> plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, num_steps=2)
        >>> print(draw(plan, width=40))
        slot     0     1     2     3     4 ...
        w0   0F0@0 1F0@0 1B0@0 0B0@0 0F0@0
        w1       .     . 0F1@0 1F1@0 1B1@0
    """
    text = _draw(plan, first_slot) if width is None else _draw_within(plan, first_slot, width)
    return _coloured(text) if colour else text


def _draw(plan: Plan, first: int, num_slots: int | None = None) -> str:
    end = sys.maxsize if num_slots is None else first + num_slots
    entries = list(_entries(plan, first, end))
    if not entries:
        raise PlanError(
            f"nothing happens from slot {first} on; allowed: slots of the {plan.num_steps} steps; "
            "begin at an earlier slot or draw more steps"
        )
    corner = first, plan.num_workers - 1
    if all(entry[:2] != corner for entry in entries):
        entries.append(Entry(*corner, "."))  # so that idle workers and slots are drawn, too
    return picture(entries)


def _entries(plan: Plan, first: int, end: int) -> Iterator[Entry]:
    """Yield the cells of the slots from ``first`` to before ``end``.

    Slots rise with the stage in forwards and fall in backwards, so the stages to draw are found
    by bisection. A look at a few slots of a thousand workers takes no time, where the timetable
    has millions of cells.
    """
    forwards, backwards = range(plan.num_stages), range(plan.num_stages - 1, -1, -1)
    splits = plan.axes.schedule.splits
    for t, i in product(range(plan.num_steps), range(plan.num_microbatches)):
        for kind, stages in ((Kind.F, forwards), (Kind.B, backwards)):
            slot = partial(plan.slot, kind, t, i)
            for j in stages[bisect_left(stages, first, key=slot) :]:
                if slot(j) >= end:
                    break
                yield _entry(plan, kind, t, i, j)
        for j in backwards if splits else ():  # put off as far as the schedule likes
            if plan.axes.schedule.is_split(i, j) and first <= plan.slot(Kind.W, t, i, j) < end:
                yield _entry(plan, Kind.W, t, i, j)


def _entry(plan: Plan, kind: Kind, t: int, i: int, j: int) -> Entry:
    if kind is Kind.B:
        kind = plan.axes.schedule.kinds(i, j)[1]
    return Entry(plan.slot(kind, t, i, j), plan.worker_of(i, j, t), _cell(plan, kind, t, i, j))


def _cell(plan: Plan, kind: Kind, t: int, i: int, j: int) -> str:
    reads = plan.reads if kind is Kind.F else plan.backward_reads
    return f"{j}{kind}{i}@{reads(t, i, j)}"


def _draw_within(plan: Plan, first: int, width: int) -> str:
    """Draw as many slots as could fit and one more, and cut the columns that do not fit."""
    text = _draw(plan, first, max(1, width // _NARROWEST_COLUMN) + 1)
    header, *rows = text.splitlines()
    ends = [match.end() for match in _WORD.finditer(header)][1:]  # where each slot's column ends
    if ends[-1] <= width:
        return text
    cut = max([end for end in ends if end + len(_MORE) <= width], default=ends[0])
    return "\n".join([header[:cut] + _MORE, *(row[:cut] for row in rows)])


def _coloured(text: str) -> str:
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    styled = Text(text)
    for match in _CELL.finditer(text):
        colour = _COLOURS[int(match[2]) % len(_COLOURS)]
        styled.stylize(f"{_STYLES[match[1]]}{colour}", *match.span())
    widest = text.find("\n") if "\n" in text else len(text)
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False,
        width=max(widest, 1), legacy_windows=False,
    )  # fmt: skip
    with console.capture() as capture:
        console.print(styled, end="", soft_wrap=True)
    return capture.get()
