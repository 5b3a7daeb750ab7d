"""A plan as a trace for ui.perfetto.dev, with a process for each worker.

Source: Trace Event Format (Google), the JSON array form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.viz.words import sentence

if TYPE_CHECKING:
    from lightning_cyclic.viz.picture import Cell

_SLOT_US = 1000.0  # a slot is shown as a millisecond


def trace_of(programs: Sequence[Sequence[Action]], cells: Iterable[Cell]) -> bytes:
    """Return the file of a plan: forwards, backwards and updates in their slots.

    Args:
        programs: of each worker.
        cells: their forwards and backwards.
    """
    return json.dumps(list(_events(programs, cells)), indent=0).encode()


def _events(
    programs: Sequence[Sequence[Action]], cells: Iterable[Cell]
) -> Iterator[dict[str, Any]]:
    for w in range(len(programs)):
        name = {"name": f"worker {w}"}
        yield {"name": "process_name", "ph": "M", "pid": w + 1, "args": name}
    for cell in cells:
        length = {"ph": "X", "cat": "compute", "dur": round(cell.width * _SLOT_US, 3)}
        yield _event(cell.action, cell.x, cell.w) | length
    for w, program in enumerate(programs):
        for a in program:
            if a.kind is Kind.UPDATE:
                yield _event(a, float(a.s or 0), w) | {"ph": "i", "cat": "update", "s": "t"}


def _event(a: Action, x: float, w: int) -> dict[str, Any]:
    numbers = {"step": a.t, "stage": a.j, "micro-batch": a.i, "version": a.v, "action": str(a)}
    args = {name: number for name, number in numbers.items() if number is not None}
    # process 0 is the viewers' own
    place = {"ts": round(x * _SLOT_US, 3), "pid": w + 1, "tid": 1}
    return {"name": sentence(a), **place, "args": args}
