"""Memory over time, in text and as a picture: what bytes are for, stacked.

    slot      0     1     2     3       bytes in each slot, of all kinds together
    w0     20 B  30 B  30 B  20 B
    w0: 30 B at most: 10 B of ...       its fullest slot

Whoever counts the bytes, a plan or a watch, gives rows of them; what is above a dashed line is
more than was planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_cyclic.errors import PlanError
from lightning_cyclic.viz.files import drawn, form_of, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 16  # of a picture that can be read

_DARK, _GREY, _LINE = "#222222", "#6b6b6b", "#c00000"
_COLOURS = {  # told apart by most who see colours differently; what lasts is below, and darker
    "parameters": "#2f6db3", "versions": "#7fb2de", "index": "#1f8a96", "buffers": "#5b6470",
    "optimizer": "#7457a6", "gradients": "#c8641b", "in_flight": "#d98a00", "messages": "#d98a00",
    "inputs": "#b9c2cc", "returns": "#b03a5b", "activations": "#2e8a57",
    "temporaries": "#d8c48a", "other": "#dddddd",
}  # fmt: skip
_PREFIXES = ("", "k", "M", "G", "T")


class Row(NamedTuple):
    """Hold bytes over time of one worker, or of one step.

    Args:
        name: what it is of.
        by_kind: kind -> bytes at each moment; as many for each kind.
        planned: bytes of a line to draw, and what it says. [none]
    """

    name: str
    by_kind: Mapping[str, Sequence[float]]
    planned: tuple[float, str] | None = None

    @property
    def totals(self) -> list[float]:
        return [sum(each) for each in zip(*self.by_kind.values(), strict=True)]


def show_short(num_bytes: float) -> str:
    """Print bytes in at most four digits, for columns.

    Example:
        >>> show_short(0), show_short(1234), show_short(99_960_000)
        ('0', '1.23k', '100M')
    """
    power = 0
    while num_bytes >= 999.5 and power + 1 < len(_PREFIXES):
        num_bytes, power = num_bytes / 1000, power + 1
    return f"{num_bytes:.3g}{_PREFIXES[power]}"


def draw_memory(rows: Sequence[Row], *, width: int | None = None, first: int = 0) -> str:
    """Write bytes over time, a line for each row, and what the most of each consists of.

    Args:
        rows: of as many moments each.
        width: most characters of a line of moments; later ones are left out. [None: all]
        first: moment at which to begin.

    Raises:
        PlanError: all is over before the first moment.

    Example:
        >>> row = Row("w0", {"parameters": [8, 8], "activations": [0, 1500]})
        >>> print(draw_memory([row]))
        slot  0      1
        w0    8  1.51k
        <BLANKLINE>
        w0: 1.51 kB at most, in slot 1: activations 1.5 kB, parameters 8 B
    """
    moments = _moments(rows, first)
    texts = [("slot", [str(n) for n in moments])]
    texts += [(row.name, [show_short(row.totals[n]) for n in moments]) for row in rows]
    widths = [max(len(cells[k]) for _, cells in texts) for k in range(len(moments))]
    names = max(len(name) for name, _ in texts)
    shown = _fitting(names, widths, width)
    more = " ..." if shown < len(moments) else ""
    lines = []
    for n, (name, cells) in enumerate(texts):
        padded = (f"  {cell:>{w}}" for cell, w in zip(cells[:shown], widths, strict=False))
        lines.append(f"{name:<{names}}{''.join(padded)}{more if n == 0 else ''}")
    return "\n".join([*lines, "", *map(_most, rows)])


def _moments(rows: Sequence[Row], first: int) -> range:
    count = len(rows[0].totals)
    if first >= count:
        raise PlanError(
            f"nothing happens from slot {first} on; allowed: slots below {count}; begin at an "
            "earlier slot or draw more steps"
        )
    return range(first, count)


def _fitting(names: int, widths: Sequence[int], width: int | None) -> int:
    """Return how many columns fit, at least one."""
    if width is None or names + sum(w + 2 for w in widths) <= width:
        return len(widths)
    room, shown = width - names - len(" ..."), 0
    while shown < len(widths) and room >= widths[shown] + 2:
        room -= widths[shown] + 2
        shown += 1
    return max(shown, 1)


def _most(row: Row) -> str:
    n = max(range(len(row.totals)), key=row.totals.__getitem__)
    parts = {kind: series[n] for kind, series in row.by_kind.items() if series[n]}
    in_order = sorted(parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{_named(kind)} {_bytes(size)}" for kind, size in in_order)
    return f"{row.name}: {_bytes(row.totals[n])} at most, in slot {n}: {listed}"


def _bytes(num_bytes: float) -> str:
    short = show_short(num_bytes)
    digits = short.rstrip("".join(_PREFIXES))
    return f"{digits} {short[len(digits) :]}B"


def _named(kind: str) -> str:
    return kind.replace("_", " ")


def save_memory(
    path: str | Path, title: str, rows: Sequence[Row], *, first: int = 0, axis: str = "slot"
) -> None:
    """Draw bytes over time into a file, stacked by kind, a panel for each row.

    Args:
        path: ends in .svg or .png.
        title: above all.
        rows: of the panels, from above.
        first: moment at which the picture begins.
        axis: what passes from left to right.

    Raises:
        PlanError: another ending, a file that cannot be written, no matplotlib, or more rows
            than can be read.
    """
    path = Path(path)
    form = form_of(path)
    if len(rows) > MOST_ROWS:
        raise PlanError(
            f"a picture of the memory of {len(rows)} workers could not be read; allowed: up to "
            f"{MOST_ROWS}; draw fewer, or leave the file out for a text"
        )

    moments = _moments(rows, first)

    def paint(figure: Figure) -> None:
        _paint(figure, title, rows, axis)
        figure.axes[0].set_xlim(moments.start, moments.stop)  # and of those that share it

    write(path, drawn((8.5, 0.6 + 2.1 * len(rows)), paint, form))


def _paint(figure: Figure, title: str, rows: Sequence[Row], axis: str) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    figure.subplots_adjust(hspace=0.28)
    panels[0].set_title(
        title, loc="left", fontsize=13, weight="bold", color=_DARK, pad=12 + 10 * (len(rows) > 1)
    )
    used = [kind for kind in _COLOURS if any(any(row.by_kind.get(kind, ())) for row in rows)]
    limit = max(max(*row.totals, (row.planned or (0.0,))[0]) for row in rows)
    for axes, row in zip(panels, rows, strict=True):
        _paint_row(axes, row, used, limit, is_named=len(rows) > 1)
    panels[-1].set_xlabel(axis, fontsize=9, color=_GREY)
    signs: dict[str, Patch | Line2D] = {
        _named(kind): Patch(color=_COLOURS[kind]) for kind in reversed(used)
    }
    lines = [row.planned[1] for row in rows if row.planned is not None]
    signs |= {text: Line2D([], [], color=_LINE, linestyle="--") for text in dict.fromkeys(lines)}
    panels[0].legend(
        signs.values(), signs.keys(), loc="upper left", bbox_to_anchor=(1.01, 1.02),
        frameon=False, fontsize=9, labelspacing=0.6, borderpad=0,
    )  # fmt: skip


def _paint_row(
    axes: Axes, row: Row, used: Sequence[str], limit: float, *, is_named: bool
) -> None:  # fmt: skip
    """Paint one panel; what is there at a moment lasts until the next."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator  # noqa: PLC0415

    count = len(row.totals)
    series = [[*row.by_kind.get(kind, [0.0] * count)] for kind in used]
    axes.stackplot(
        range(count + 1), [[*each, each[-1]] for each in series], step="post", linewidth=0,
        colors=[_COLOURS[kind] for kind in used],
    )  # fmt: skip
    if row.planned is not None:
        axes.axhline(row.planned[0], color=_LINE, linestyle="--", linewidth=1.2)
    if is_named:
        axes.annotate(
            row.name, (0, 1), (0, 4), "axes fraction", "offset points", fontsize=9, color=_DARK
        )
    axes.set_ylim(0, 1.08 * limit or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _bytes(y)))
    axes.tick_params(labelsize=8, colors=_GREY)
    axes.spines[["top", "right"]].set_visible(False)
