"""Legend: what the signs of a picture mean, for somebody who has read nothing else.

Only signs that the picture has are explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.viz.look import LINES, OTHER, Line, Look
from lightning_cyclic.viz.scene import Scene
from lightning_cyclic.viz.shapes import (
    DARK,
    GREY,
    STRIPE,
    Box,
    Paint,
    put_arrow,
    put_box,
    put_diamond,
    put_text,
    put_version,
)
from lightning_cyclic.viz.words import CARRIED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIDDLE, _REACH = 0.55, 0.3  # of a sample, in inches


class Entry(NamedTuple):
    """Hold a line of the legend: what paints its sample at a height, and its text."""

    put: Callable[[Axes, float], None]
    text: str


def legend(scene: Scene, look: Look) -> tuple[Entry, ...]:
    """List the signs of a picture with their meanings."""
    return (*_of_cells(scene, look), *_of_updates(scene), *_of_messages(scene))


def introduction(look: Look) -> tuple[str, str]:
    """Say how to read the picture, in two lines."""
    rows = "Each row is a worker"
    if look.has_own_stage:
        rows += ", which has a stage (some layers of the model) of its own"
    elif look.has_own_micro:
        rows += ", which has the whole model and a micro-batch (a part of the batch) of its own"
    else:
        rows += "; cells say which stage (some layers of the model) it runs"
    slots = "Time goes from left to right; a slot is one forward or one backward of one stage."
    return f"{rows}.", slots


_COUNTED = {
    "stage": "through stage {} (some layers of the model)",
    "micro-batch": "of micro-batch {} (a part of the batch)",
    "step": "of the batch of step {}",
}


def _of_cells(scene: Scene, look: Look) -> Iterator[Entry]:
    forward = next(cell.action for cell in scene.cells if cell.action.kind is Kind.F)
    backward = replace(forward, kind=Kind.B)
    which = _COUNTED[look.counted].format(look.number(forward))
    text = f"forward {which}; each {look.counted} has its colour"
    yield Entry(partial(_put_cell, look, forward), text)
    yield Entry(partial(_put_cell, look, backward), "its backward, which computes gradients")
    if any(cell.width < 1 for cell in scene.cells):
        yield Entry(_put_halves, "cells that share a slot: they run one after the other")
    version = "the version of the stage's weights that is used: how many updates it has had"
    if scene.plan.axes.weights.looks_ahead:
        version += "; forwards predict newer weights from it"
    yield Entry(partial(_put_version, False), version)
    if any(look.is_old(cell.action) for cell in scene.cells):
        yield Entry(
            partial(_put_version, True),
            "in red: older than in plain training, where step 1 uses v1, step 2 uses v2 and so on",
        )
    yield Entry(_put_nothing, "no cell: the worker waits, or has done all steps of this picture")


def _of_updates(scene: Scene) -> Iterator[Entry]:
    if scene.updates:
        yield Entry(
            _put_update,
            "an update: the optimizer makes this version of a stage's weights from the gradients "
            "of a step",
        )


def _of_messages(scene: Scene) -> Iterator[Entry]:
    payloads = {a.action.payload: None for a in scene.arrows if a.action.payload is not None}
    for line in dict.fromkeys(LINES[p] for p in LINES if p in payloads):
        yield Entry(partial(_put_line, line), f"message: {line.text}")
    others = sorted({CARRIED[p] for p in payloads if p not in LINES})
    if others:
        yield Entry(partial(_put_line, OTHER), f"message: {', '.join(others)}")


def _put_cell(look: Look, a: Action, axes: Axes, y: float) -> None:
    paint = look.paint(a)
    put_box(axes, Box(_MIDDLE, y, 2 * _REACH, 0.2), paint)
    put_text(axes, _MIDDLE, y, look.cell(a)[0], size=9, colour=paint.ink, bold=True)


def _put_halves(axes: Axes, y: float) -> None:
    for n, x in enumerate((_MIDDLE - _REACH / 2, _MIDDLE + _REACH / 2)):
        paint = Paint(STRIPE, GREY, DARK)
        put_box(axes, Box(x, y, _REACH - 0.03, 0.2), paint)
        put_text(axes, x, y, f"{n + 1}", size=7)


def _put_nothing(axes: Axes, y: float) -> None:
    put_box(axes, Box(_MIDDLE, y, 2 * _REACH, 0.2), Paint(STRIPE, STRIPE, DARK))


def _put_version(old: bool, axes: Axes, y: float) -> None:
    put_version(axes, _MIDDLE, y, "v0", size=9, old=old)


def _put_update(axes: Axes, y: float) -> None:
    put_diamond(axes, _MIDDLE - 0.12, y)
    put_text(axes, _MIDDLE + 0.12, y, "v1", size=8, bold=True)


def _put_line(line: Line, axes: Axes, y: float) -> None:
    ends = (_MIDDLE - _REACH, y), (_MIDDLE + _REACH, y)
    put_arrow(axes, *ends, colour=line.colour, line=line.style)
