"""Trace events: a plan as ui.perfetto.dev and chrome://tracing read it, a process for each worker.

Source: Trace Event Format,
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lightning_cyclic.plan.actions import Action
from lightning_cyclic.viz.scene import Scene
from lightning_cyclic.viz.words import sentence

_SLOT_US = 1000.0  # a slot is shown as a millisecond


def trace_of(seen: Scene) -> bytes:
    """Return the file of a plan: forwards, backwards and updates in their slots."""
    return json.dumps(list(_events(seen)), indent=0).encode()


def _events(seen: Scene) -> Iterator[dict[str, Any]]:
    for w in range(seen.plan.num_workers):
        name = {"name": f"worker {w}"}
        yield {"name": "process_name", "ph": "M", "pid": w + 1, "args": name}
    for cell in seen.cells:
        length = {"ph": "X", "cat": "compute", "dur": round(cell.width * _SLOT_US, 3)}
        yield _event(cell.action, cell.x, cell.w) | length
    for mark in seen.updates:
        yield _event(mark.action, mark.x, mark.w) | {"ph": "i", "cat": "update", "s": "t"}


def _event(a: Action, x: float, w: int) -> dict[str, Any]:
    numbers = {"step": a.t, "stage": a.j, "micro-batch": a.i, "version": a.v, "action": str(a)}
    args = {name: number for name, number in numbers.items() if number is not None}
    # process 0 is the viewers' own
    place = {"ts": round(x * _SLOT_US, 3), "pid": w + 1, "tid": 1}
    return {"name": sentence(a), **place, "args": args}
