"""Shapes that a chart and its legend are made of; by matplotlib, which is imported when needed.

Sizes are in the units of the axes, of fonts and lines in points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DARK, GREY, STALE, STRIPE = "#222222", "#6b6b6b", "#c00000", "#f2f2f2"


class Box(NamedTuple):
    """Hold a place: its middle, and how wide and high it is."""

    x: float
    y: float
    width: float
    height: float


class Paint(NamedTuple):
    """Hold the colours of a box and of what is written on it."""

    fill: str
    edge: str
    ink: str


def put_box(axes: Axes, box: Box, paint: Paint, gid: str | None = None) -> None:
    """Paint a box with round corners."""
    from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415

    corner = box.x - box.width / 2, box.y - box.height / 2
    style = f"round,pad=0,rounding_size={box.height / 10}"
    axes.add_patch(
        FancyBboxPatch(
            corner,
            box.width,
            box.height,
            boxstyle=style,
            facecolor=paint.fill,
            edgecolor=paint.edge,
            linewidth=0.8,
            zorder=3,
            gid=gid,
        )  # fmt: skip
    )


def put_text(
    axes: Axes, x: float, y: float, text: str, *, size: float, colour: str = DARK,
    bold: bool = False, align: str = "center",
) -> None:  # fmt: skip
    """Write a text, in the middle of its place or on a side of it."""
    weight = "bold" if bold else "normal"
    axes.text(
        x, y, text, fontsize=size, color=colour, weight=weight, ha=align, va="center", zorder=7
    )


def put_tag(axes: Axes, x: float, y: float, text: str) -> None:
    """Write a small text in front of any arrow."""
    axes.text(
        x, y, text, fontsize=7, color=GREY, ha="left", va="center", zorder=4, clip_on=False,
        bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none"},
    )  # fmt: skip


def put_version(
    axes: Axes, x: float, y: float, text: str, *, size: float = 7.5, old: bool = False
) -> None:
    """Write a version on white, in red where it is an old one."""
    axes.text(
        x, y, text, fontsize=size, ha="center", va="center", zorder=4,
        color=STALE if old else DARK, weight="bold" if old else "normal",
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
    )  # fmt: skip


def put_diamond(axes: Axes, x: float, y: float, gid: str | None = None) -> None:
    """Paint what stands for an update."""
    axes.plot([x], [y], marker="D", markersize=6, color=DARK, zorder=6, clip_on=False, gid=gid)


def put_arrow(
    axes: Axes, begin: tuple[float, float], end: tuple[float, float], *, colour: str, line: str,
    gid: str | None = None,
) -> None:  # fmt: skip
    """Paint a message."""
    from matplotlib.patches import FancyArrowPatch  # noqa: PLC0415

    axes.add_patch(
        FancyArrowPatch(
            begin,
            end,
            arrowstyle="-|>,head_length=3.5,head_width=1.8",
            linewidth=1.1,
            color=colour,
            linestyle=line,
            shrinkA=0,
            shrinkB=0,
            zorder=2,
            gid=gid,
            clip_on=False,
        )  # fmt: skip
    )
