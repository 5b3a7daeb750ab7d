r"""Chart: a plan as an SVG or PNG picture, by matplotlib.

    title, introduction
    slot           0     1     2     3
    worker 0     [F0 ][F1 ]     [B0 ]     a cell: what runs, on which version of the weights
                      \  \     /   <>v1   arrows: messages; diamonds: updates
    worker 1          [F0 ][B0 ][F1 ]
    legend       in plain words, of what this picture has

A unit is a slot in x and a row in y, which points down. The same plan gives the same bytes.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.viz.legend import Entry, introduction, legend
from lightning_cyclic.viz.look import LINES, OTHER, Look
from lightning_cyclic.viz.scene import Arrow, Cell, Mark, Scene
from lightning_cyclic.viz.shapes import (
    DARK,
    GREY,
    STRIPE,
    Box,
    put_arrow,
    put_box,
    put_diamond,
    put_tag,
    put_text,
    put_version,
)
from lightning_cyclic.viz.words import sentence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Form = Literal["svg", "png"]

_SLOT, _ROW, _LINE = 0.56, 0.86, 0.27  # inches: of a slot, of a row, of a line of the legend
_LEFT, _RIGHT, _TOP, _MARGIN = 1.5, 0.4, 1.4, 0.3  # inches
_LEAST_WIDTH = 9.4  # inches, in which the legend fits
_HALF = 0.31  # of a cell's height, in rows
_GAP = 0.03  # between a cell and the next slot, in slots
_DPI = 144
_SETTINGS = {
    "svg.fonttype": "none",  # text that can be searched and copied
    "svg.hashsalt": "lightning_cyclic",  # the same names in every run
    "font.family": ["DejaVu Sans", "sans-serif"],  # the first comes with matplotlib
}
_NO_METADATA: dict[str, dict[str, Any]] = {  # which would name the time and the version
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "png": {"Software": None},
}


def chart(scene: Scene, form: Form) -> bytes:
    """Draw a scene.

    Args:
        scene: what is shown.
        form: of the picture.

    Returns:
        The file. An SVG says of each cell, arrow and update what it is, where a mouse points.

    Raises:
        PlanError: matplotlib is not installed.
    """
    matplotlib = _matplotlib()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings are
        matplotlib.rcParams.update(_SETTINGS)
        from matplotlib.figure import Figure  # noqa: PLC0415

        figure = Figure()
        _Painter(figure, scene, Look.of(scene.plan)).paint()
        data = io.BytesIO()
        figure.savefig(data, format=form, dpi=_DPI, metadata=_NO_METADATA[form])
    return data.getvalue() if form == "png" else _titled(data.getvalue().decode(), scene)


def _titled(svg: str, scene: Scene) -> bytes:
    """Add titles, which viewers show where a mouse points."""
    for name, text in _hovers(scene).items():
        group = f'<g id="{name}">'
        assert svg.count(group) == 1  # as matplotlib writes an element that has a name
        svg = svg.replace(group, f"{group}<title>{text}</title>")
    return svg.encode()


def _hovers(scene: Scene) -> dict[str, str]:
    """Return id of an element -> what it is, as a sentence."""
    found = [(f"cell{n}", cell.action) for n, cell in enumerate(scene.cells)]
    found += [(f"update{n}", mark.action) for n, mark in enumerate(scene.updates)]
    found += [(f"arrow{n}", arrow.action) for n, arrow in enumerate(scene.arrows)]
    return {name: sentence(a) for name, a in found}


def _matplotlib() -> ModuleType:
    try:
        import matplotlib  # noqa: PLC0415
    except ImportError as error:
        raise PlanError(
            "a picture was asked for, but matplotlib, which draws it, is not installed; allowed: "
            "a text without it; run pip install 'lightning-cyclic[viz]', or leave the file out"
        ) from error
    return matplotlib


@final
@dataclass(frozen=True, slots=True)
class _Painter:
    """Paint a scene on an empty figure."""

    figure: Figure
    scene: Scene
    look: Look

    def paint(self) -> None:
        """Paint everything, what lies behind first."""
        rows, columns = self.scene.plan.num_workers, len(self.scene.slots)
        entries = legend(self.scene, self.look)
        below = (len(entries) + 1.4) * _LINE
        width = max(_LEFT + columns * _SLOT + _RIGHT, _LEAST_WIDTH)
        self.figure.set_size_inches(width, _TOP + rows * _ROW + below)
        self._paint_words(width, entries)
        axes = self._axes(Box(_LEFT, below, columns * _SLOT, rows * _ROW))
        axes.set_xlim(self.scene.slots.start, self.scene.slots.stop)
        axes.set_ylim(rows - 0.5, -0.5)
        self._paint_rows(axes)
        for n, arrow in enumerate(self.scene.arrows):
            self._paint_arrow(axes, arrow, f"arrow{n}")
        for n, cell in enumerate(self.scene.cells):
            self._paint_cell(axes, cell, f"cell{n}")
        for begin in self.scene.begins:
            put_tag(axes, begin.x + 0.04, begin.w + _HALF + 0.1, f"step {begin.t}")
        for n, mark in enumerate(self.scene.updates):
            self._paint_update(axes, mark, f"update{n}")

    def _axes(self, place: Box) -> Axes:
        """Add empty axes at a place in inches, given by its lower left corner."""
        width, height = self.figure.get_size_inches()
        axes = self.figure.add_axes(
            (place.x / width, place.y / height, place.width / width, place.height / height)
        )
        axes.axis("off")
        return axes

    def _paint_words(self, width: float, entries: tuple[Entry, ...]) -> None:
        """Write what stands above and below the timetable; a unit is an inch."""
        height = self.figure.get_size_inches()[1]
        axes = self._axes(Box(0, 0, width, height))
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        put_text(axes, _MARGIN, 0.35, self.look.title, size=14, bold=True, align="left")
        for n, line in enumerate(introduction(self.look)):
            put_text(axes, _MARGIN, 0.65 + 0.21 * n, line, size=9, colour=GREY, align="left")
        top = height - len(entries) * _LINE - _LINE / 2
        for n, (put, text) in enumerate(entries):
            put(axes, top + n * _LINE)
            put_text(axes, 1.1, top + n * _LINE, text, size=9, align="left")

    def _paint_rows(self, axes: Axes) -> None:
        """Paint the names of rows and slots, and stripes that lead the eye."""
        slots, left = self.scene.slots, self.scene.slots.start - 0.25
        middle = (slots.start + slots.stop) / 2
        for w in range(self.scene.plan.num_workers):
            stripe = Box(middle, w, len(slots), 2 * _HALF + 0.06)
            axes.barh(stripe.y, stripe.width, stripe.height, slots.start, color=STRIPE, zorder=0)
            common = self.look.row(w)
            put_text(
                axes, left, w - (0.12 if common else 0), f"worker {w}", size=10, bold=True,
                align="right",
            )  # fmt: skip
            put_text(axes, left, w + 0.15, common, size=8, colour=GREY, align="right")
        for s in slots:
            put_text(axes, s + 0.5, -0.65, str(s), size=8, colour=GREY)
        put_text(axes, left, -0.65, "slot", size=8, colour=GREY, align="right")

    def _paint_cell(self, axes: Axes, cell: Cell, gid: str) -> None:
        a, middle = cell.action, cell.x + cell.width / 2
        paint, (name, *more) = self.look.paint(a), self.look.cell(a)
        put_box(axes, Box(middle, cell.w, cell.width - 2 * _GAP, 2 * _HALF), paint, gid)
        size = min(1.0, 1.2 * cell.width)  # of letters, in a slot that several cells share
        up = 0.17 if more else 0.12
        put_text(axes, middle, cell.w - up, name, size=11 * size, colour=paint.ink, bold=True)
        for text in more:
            put_text(axes, middle, cell.w + 0.01, text, size=6 * size, colour=paint.ink)
        version, old = f"v{a.v}", self.look.is_old(a)
        put_version(axes, middle, cell.w + 0.18, version, size=7.5 * size, old=old)

    def _paint_update(self, axes: Axes, mark: Mark, gid: str) -> None:
        top = mark.w - _HALF
        ends = top, mark.w + _HALF
        axes.vlines(mark.x, *ends, color=DARK, linewidth=2, zorder=5, clip_on=False)
        put_diamond(axes, mark.x, top - 0.03, gid)
        put_text(
            axes, mark.x + 0.15, top - 0.07, f"v{mark.action.v}", size=7.5, bold=True, align="left"
        )

    def _paint_arrow(self, axes: Axes, arrow: Arrow, gid: str) -> None:
        assert arrow.action.payload is not None  # as for every SEND
        line = LINES.get(arrow.action.payload, OTHER)
        way = _HALF if arrow.end_w > arrow.w else -_HALF
        begin, end = (arrow.x - 0.1, arrow.w + way), (arrow.end_x + 0.1, arrow.end_w - way)
        put_arrow(axes, begin, end, colour=line.colour, line=line.style, gid=gid)
