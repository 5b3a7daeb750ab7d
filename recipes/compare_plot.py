"""Draw the curves of a comparison: loss against steps and against seconds, a row per task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from recipes.compare_report import Record

Curve: TypeAlias = tuple[np.ndarray, np.ndarray]  # places and losses, of equal length
Row: TypeAlias = Mapping[str, Sequence[Record]]  # contender -> its seeds

# Okabe and Ito's colours, which colour-blind readers tell apart; grey in place of their yellow,
# which is too light for a line. Dashes tell the rest.
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#7F7F7F")
_DASHES = ("-", "--", "-.", ":")
_X_LABELS = {
    "step": "steps (batches that all contenders share)",
    "seconds": "seconds of training, without validation",
}
_POINTS = 200  # of a mean curve
_SMOOTHED_SHARE = 0.05  # of a curve's points, that each point drawn is the mean of
_WIDTH_INCHES, _ROW_INCHES = 12.0, 3.6


def plot_curves(records: Sequence[Record], path: Path) -> None:
    """Draw mean and one standard deviation of the seeds that trained.

    Args:
        records: of all runs.
        path: of the picture; its suffix chooses the format.
    """
    rows: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        row = rows.setdefault(f"{record['task']}, {record['optimizer']}", {})
        row.setdefault(record["contender"], []).append(record)
    names = list(dict.fromkeys(record["contender"] for record in records))
    size = (_WIDTH_INCHES, _ROW_INCHES * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 2, squeeze=False, sharey="row")
    for pair, (title, row) in zip(axes, rows.items(), strict=True):
        for axis, x in zip(pair, _X_LABELS, strict=True):
            _draw(axis, x, row, names)
        pair[0].set_ylabel("training loss (nats)")
        pair[0].set_title(title, loc="left")
        pair[1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
    figure.savefig(path, dpi=120)


def _draw(axis: Axes, x: str, row: Row, names: Sequence[str]) -> None:
    """Draw all contenders over steps, or over seconds."""
    for name, records in row.items():
        curves = [_curve(record, x) for record in records if record["status"] == "trained"]
        style = _style(names.index(name))
        if not curves:
            axis.plot([], [], label=_label(name, records), **style)
            continue
        places, losses = _together(curves)
        middle, deviation = losses.mean(0), losses.std(0, ddof=1 if len(losses) > 1 else 0)
        axis.plot(places, middle, label=_label(name, records), **style)
        low = np.maximum(middle - deviation, losses.min(0))  # above 0, as the axis is logarithmic
        axis.fill_between(
            places, low, middle + deviation, color=style["color"], alpha=0.15, linewidth=0
        )
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))  # plain numbers in place of powers
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    if x == "step":
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel(_X_LABELS[x])
    axis.grid(alpha=0.3)


def _style(index: int) -> dict[str, Any]:
    """Give each contender its own look, the first one, often the reference, a heavier line."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "linewidth": 2.2 if index == 0 else 1.4,
    }


def _label(name: str, records: Sequence[Record]) -> str:
    lost = sum(record["status"] != "trained" for record in records)
    return f"{name} ({lost} of {len(records)} did not train)" if lost else name


def _curve(record: Record, x: str) -> Curve:
    """Return the smoothed losses of one run, and where each stands on the axis x."""
    points = [(row[x], row["loss"]) for row in record["rows"] if "loss" in row]
    places, losses = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    width = max(1, round(len(losses) * _SMOOTHED_SHARE))
    window = np.ones(width) / width
    return np.convolve(places, window, "valid"), np.convolve(losses, window, "valid")


def _together(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Put the curves of several seeds on the same places, those that all of them reach.

    Returns:
        Places (points,) and losses (seeds, points).
    """
    begin = max(places[0] for places, _ in curves)
    end = min(places[-1] for places, _ in curves)
    grid = np.linspace(begin, max(begin, end), _POINTS)
    return grid, np.stack([np.interp(grid, places, losses) for places, losses in curves])
