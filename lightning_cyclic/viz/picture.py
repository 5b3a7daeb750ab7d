r"""Picture: the timetable of a plan as an SVG or PNG file, by matplotlib.

    slot           0     1     2     3
    worker 0     [F0 ][F1 ]     [B0 ]     a cell: what runs, on which version of the weights
                      \  \     /   <>v1   arrows: messages; diamonds: updates
    worker 1          [F0 ][B0 ][F1 ]
    legend       in plain words, of what this picture has

A slot s takes the time from s to s + 1. An update takes none and lies where its slot begins. A
message leaves behind the compute that its worker has in the slot of its SEND, if any comes before
it, and is there for the first action that reads it. Where each worker has a stage of its own, rows
say the stage, and cells and colours the micro-batch; where each has a micro-batch of its own, the
other way round. The same plan gives the same bytes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan, program_of, programs_of
from lightning_cyclic.plan.actions import COMPUTE, GO_BACK, Action, Kind, Payload
from lightning_cyclic.plan.dataflow import Item
from lightning_cyclic.viz.files import PICTURES, drawn, form_of, write
from lightning_cyclic.viz.words import CARRIED, sentence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_WORKERS = 32  # more cells than these take a minute to draw, and none can be read
MOST_SLOTS = 256

_DARK, _GREY, _STALE, _STRIPE = "#222222", "#6b6b6b", "#c00000", "#f2f2f2"
# dark enough for white letters, and told apart by most who see colours differently
_COLOURS = (
    "#2f6db3", "#c8641b", "#2e8a57", "#b03a5b", "#7457a6", "#8a6d2f", "#1f8a96", "#5b6470",
)  # fmt: skip
_TINT = 0.72  # of white in the colour of a forward
_HALF = 0.31  # of a cell's height, in rows
_SUM = "#d98a00", "gradients, added up from worker to worker, up to the one that updates"
_WEIGHTS = "#2e8a57", "new weights, from the worker that has made or received them"
_LINES = {  # payload -> the colour of its arrows, and what they mean
    Payload.A: ("#2f6db3", "activations, to the worker of the next stage"),
    Payload.G: ("#b03a5b", "gradients of activations, back to the stage before"),
    Payload.S: _SUM,
    Payload.T: _SUM,
    Payload.H: ("#d98a00", "gradients, to the worker that adds them up, and updates"),
    Payload.W: _SUM,
    Payload.P: _WEIGHTS,
    Payload.U: ("#2e8a57", "outer weights, from the worker that has made or received them"),
    Payload.V: _WEIGHTS,
}
_OTHER = "#a0a0a0"  # of messages that carry little
_COUNTED = {
    "stage": "through stage {} (some layers of the model)",
    "micro-batch": "of micro-batch {} (a part of the batch)",
    "step": "of the batch of step {}",
}
_SLOT_US = 1000.0  # a slot is shown as a millisecond


def save_picture(plan: Plan, path: str | Path, *, first_slot: int = 0) -> None:
    """Draw the timetable of a plan into a file; the same plan gives the same bytes.

    Args:
        path: ends in .svg, .png, or .json (a trace for ui.perfetto.dev, of all slots).
        first_slot: slot at which the picture begins. [0]

    Raises:
        PlanError: another ending, a file that cannot be written, no matplotlib, or a plan that is
            too large for a picture or over before ``first_slot``.
    """
    path = Path(path)
    form = form_of(path, (*PICTURES, "json"))
    if form == "json":
        data = trace_of(programs_of(plan))
    else:
        slots = _slots(plan, first_slot)

        def paint(figure: Figure) -> None:
            _paint(figure.add_axes((0, 0, 1, 1)), plan, slots)

        data = drawn((max(0.56 * len(slots), 7.5), 0.86 * plan.num_workers), paint, form)
    write(path, data)


def _slots(plan: Plan, first_slot: int) -> range:
    """Return the slots that are shown, found without making the program."""
    last = plan.num_steps - 1
    slots = range(first_slot, 1 + max(plan.end(last, j) for j in range(plan.num_stages)))
    if not slots:
        raise PlanError(
            f"nothing happens from slot {first_slot} on; allowed: slots of the {plan.num_steps} "
            "steps; begin at an earlier slot or draw more steps"
        )
    if plan.num_workers > MOST_WORKERS or len(slots) > MOST_SLOTS:
        raise PlanError(
            f"a picture of {plan.num_workers} workers over {len(slots)} slots could not be read; "
            f"allowed: up to {MOST_WORKERS} workers and {MOST_SLOTS} slots; draw fewer steps, "
            "begin at a later slot, or leave the file out for a text"
        )
    return slots


# ---------------------------------------------------------------------- what is shown


class Cell(NamedTuple):
    """Hold a forward, or a backward or half of one: from ``x`` on, ``width`` slots of a worker."""

    x: float
    width: float
    w: int
    action: Action


class Arrow(NamedTuple):
    """Hold a message, from where it leaves worker ``w`` to where it is read first."""

    x: int
    w: int
    end_x: int
    end_w: int
    action: Action  # the SEND


def cells_of(programs: Sequence[Sequence[Action]]) -> Iterator[Cell]:
    """Yield all cells; several of one slot share it in the order in which they run."""
    whole = _slots_of_whole(programs)
    for w, program in enumerate(programs):
        by_slot: defaultdict[int, list[Action]] = defaultdict(list)
        for a in program:
            if a.kind in COMPUTE:
                by_slot[a.s].append(a)
        for s, actions in sorted(by_slot.items()):
            for n, a in enumerate(actions):
                slots = whole if a.kind is Kind.B else 1
                yield Cell(s + n / len(actions), slots / len(actions), w, a)


def _slots_of_whole(programs: Sequence[Sequence[Action]]) -> int:
    """Return the slots of a backward that is not split: two where others are."""
    return 1 + any(a.kind is Kind.W for program in programs for a in program)


def arrows_of(plan: Plan) -> Iterator[Arrow]:
    """Yield all messages that somebody reads: a flush sends some that nobody does any more."""
    readers = [_first_readers(plan, w, program) for w, program in enumerate(programs_of(plan))]
    whole = _slots_of_whole(programs_of(plan))
    for w, program in enumerate(programs_of(plan)):
        computed, slots = -1, 1  # the last slot in which something was, up to here; how many
        for a in program:
            if a.kind in COMPUTE:
                computed, slots = a.s, whole if a.kind is Kind.B else 1
            if a.kind is not Kind.SEND:
                continue
            assert a.peer is not None  # as for every SEND
            reader = readers[a.peer].get((*_name(a), w))
            if reader is not None:
                # a gradient is added behind the backward that it comes from
                end_x = reader.s + (reader.kind is Kind.ADD)
                yield Arrow(a.s + slots * (computed == a.s), w, end_x, a.peer, a)


def _first_readers(
    plan: Plan, w: int, program: Sequence[Action]
) -> dict[tuple[object, ...], Action]:
    """Return message and sender -> the first action that reads it."""
    flow = program_of(plan).flow(w)
    coming: dict[Item, list[tuple[object, ...]]] = {}
    found: dict[tuple[object, ...], Action] = {}
    for a in program:
        if a.kind is Kind.RECV:
            for item in flow(a).makes:
                coming.setdefault(item, []).append((*_name(a), a.peer))
            continue
        for item in flow(a).reads:
            for message in coming.pop(item, ()):
                found[message] = a
    return found


def _name(a: Action) -> tuple[object, ...]:
    return a.payload, a.t, a.i, a.j, a.v


class Rows:
    """Know what the cells of each row have in common, and what tells them apart."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stages: defaultdict[int, set[int]] = defaultdict(set)
        self._micros: defaultdict[int, set[int]] = defaultdict(set)
        for _, w, a in plan.timetable:
            self._stages[w].add(a.j)
            self._micros[w].add(a.i or 0)
        self.splits = plan.axes.schedule.splits
        self.has_own_stage = all(len(found) == 1 for found in self._stages.values())
        self.has_own_micro = all(len(found) == 1 for found in self._micros.values())

    @property
    def counted(self) -> str:
        """Say what numbers and colours of cells stand for: "stage", "micro-batch" or "step".

        What rows do not say already; steps, where those have a single micro-batch each.
        """
        if self.has_own_micro and not self.has_own_stage:
            return "stage"
        return "micro-batch" if self._plan.num_microbatches > 1 else "step"

    def row(self, w: int) -> str:
        """Return what all cells of a row have in common."""
        parts = [f"stage {min(self._stages[w])}"] if self.has_own_stage else []
        if self.has_own_micro and self._plan.num_microbatches > 1:
            parts += [f"micro-batch {min(self._micros[w])}"]
        return ", ".join(parts)

    def cell(self, a: Action) -> list[str]:
        """Return what is written in a cell, the largest first."""
        is_known = self.has_own_stage or self.counted == "stage"
        return [f"{a.kind}{self.number(a)}", *([] if is_known else [f"stage {a.j}"])]

    def number(self, a: Action) -> int:
        return {"stage": a.j, "micro-batch": a.i or 0, "step": a.t}[self.counted]

    def colours(self, a: Action) -> tuple[str, str, str]:
        """Return the colours of a cell, of its edge, and of what is written on it."""
        colour = _COLOURS[self.number(a) % len(_COLOURS)]
        if a.kind in GO_BACK:
            return colour, colour, "white"
        parts = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
        white = _TINT if a.kind is Kind.F else _TINT / 2
        tinted = "#" + "".join(f"{round(x + (255 - x) * white):02x}" for x in parts)
        return tinted, colour, _DARK


def _is_old(a: Action) -> bool:
    """Say whether an action reads older weights than it would in plain training."""
    return a.v is not None and a.v < a.t


# ---------------------------------------------------------------------- how it is painted


def _paint(axes: Axes, plan: Plan, slots: range) -> None:
    """Paint a timetable; a unit is a slot in x and a row in y, which points down."""
    rows, end = Rows(plan), slots.stop
    cells = [cell for cell in cells_of(programs_of(plan)) if cell.action.s in slots]
    updates = [
        (w, a)
        for w, program in enumerate(programs_of(plan))
        for a in program
        if a.kind is Kind.UPDATE and slots.start <= a.s <= end
    ]
    arrows = [a for a in arrows_of(plan) if slots.start <= a.x <= a.end_x <= end]
    _paint_frame(axes, plan, rows, slots)
    for arrow in arrows:
        _paint_arrow(axes, arrow)
    begun: set[tuple[int, int]] = set()
    for cell in cells:
        _paint_cell(axes, cell, rows)
        if (at := (cell.w, cell.action.t)) not in begun:
            begun.add(at)
            _write(axes, cell.x + 0.04, cell.w + 0.41, f"step {at[1]}", 7, _GREY, ha="left", on=4)
    for w, a in updates:
        top = w - _HALF
        axes.vlines(a.s, top, w + _HALF, color=_DARK, linewidth=2, zorder=5, clip_on=False)
        axes.plot(a.s, top - 0.03, "D", markersize=6, color=_DARK, zorder=6, clip_on=False)
        _write(axes, a.s + 0.15, top - 0.07, f"v{a.v}", 7.5, weight="bold", ha="left")
    _explain(axes, plan, rows, cells, arrows, has_updates=bool(updates))


def _paint_frame(axes: Axes, plan: Plan, rows: Rows, slots: range) -> None:
    num_workers = plan.num_workers
    numbers = [
        f"{num} {what if num == 1 else what + ending}"
        for num, what, ending in (
            (num_workers, "worker", "s"),
            (plan.num_stages, "stage", "s"),
            (plan.num_microbatches, "micro-batch", "es"),
        )
    ]
    axes.set_title(
        f"{plan.preset}: {', '.join(numbers)} per step", loc="left", fontsize=14, weight="bold",
        color=_DARK, pad=30,
    )  # fmt: skip
    axes.set_xlim(slots.start, slots.stop)
    axes.set_ylim(num_workers - 0.5, -0.6)
    axes.barh(range(num_workers), len(slots), 0.68, slots.start, color=_STRIPE, zorder=0)
    names = [f"worker {w}\n{rows.row(w)}".rstrip() for w in range(num_workers)]
    axes.set_yticks(range(num_workers), names, fontsize=9)
    axes.set_xticks([s + 0.5 for s in slots], map(str, slots), fontsize=8, color=_GREY)
    axes.annotate(
        "slot", (0, 1), (-6, 6), "axes fraction", "offset points", fontsize=8, color=_GREY,
        ha="right",
    )  # fmt: skip
    axes.tick_params(length=0, top=True, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def _paint_cell(axes: Axes, cell: Cell, rows: Rows) -> None:
    from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415

    a, middle = cell.action, cell.x + cell.width / 2
    fill, edge, ink = rows.colours(a)
    axes.add_patch(
        FancyBboxPatch(
            (cell.x + 0.03, cell.w - _HALF), cell.width - 0.06, 2 * _HALF,
            boxstyle="round,pad=0,rounding_size=0.06", facecolor=fill, edgecolor=edge,
            linewidth=0.8, zorder=3,
        )
    )  # fmt: skip
    size = min(1.0, 1.2 * cell.width)  # of letters, in a slot that several cells share
    name, *more = rows.cell(a)
    _write(axes, middle, cell.w - (0.17 if more else 0.12), name, 11 * size, ink, weight="bold")
    for text in more:
        _write(axes, middle, cell.w + 0.01, text, 6 * size, ink)
    colour, weight = (_STALE, "bold") if _is_old(a) else (_DARK, "normal")
    _write(axes, middle, cell.w + 0.18, f"v{a.v}", 7.5 * size, colour, weight=weight, on=4)


def _paint_arrow(axes: Axes, arrow: Arrow) -> None:
    assert arrow.action.payload is not None  # as for every SEND
    colour, _ = _LINES.get(arrow.action.payload, (_OTHER, ""))
    way = _HALF if arrow.end_w > arrow.w else -_HALF
    style = "-" if arrow.action.payload in _LINES else ":"
    axes.annotate(
        "", (arrow.end_x + 0.1, arrow.end_w - way), (arrow.x - 0.1, arrow.w + way), zorder=2,
        arrowprops={
            "arrowstyle": "-|>,head_length=0.35,head_width=0.18", "linewidth": 1.1,
            "color": colour, "linestyle": style, "shrinkA": 0, "shrinkB": 0,
        },
        annotation_clip=False,
    )  # fmt: skip


def _write(
    axes: Axes, x: float, y: float, text: str, size: float, colour: str = _DARK, *, on: int = 0,
    **style: str,
) -> None:  # fmt: skip
    white = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    how: dict[str, Any] = {"ha": "center", "va": "center", **style}
    box: Any = white if on else None
    axes.text(
        x, y, text, fontsize=size, color=colour, zorder=on or 7, bbox=box, clip_on=False, **how
    )


# ---------------------------------------------------------------------- what signs mean


def _explain(
    axes: Axes, plan: Plan, rows: Rows, cells: Sequence[Cell], arrows: Sequence[Arrow], *,
    has_updates: bool,
) -> None:  # fmt: skip
    """Say what the signs of this picture mean, for somebody who has read nothing else."""
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    def sign(marker: str, colour: str, size: float = 12) -> Line2D:
        return Line2D([], [], linestyle="none", marker=marker, color=colour, markersize=size)

    first = next(cell.action for cell in cells if cell.action.kind is Kind.F)
    fill, edge, _ = rows.colours(first)
    which = _COUNTED[rows.counted].format(rows.number(first))
    signs: dict[str, Patch | Line2D] = {
        f"F{rows.number(first)}: forward {which}; each {rows.counted} has its colour": Patch(
            facecolor=fill, edgecolor=edge
        ),
        f"B{rows.number(first)}: its backward, which computes gradients"
        + rows.splits * ", in one": Patch(color=edge),
    }
    halves = next((cell.action for cell in cells if cell.action.kind is Kind.W), None)
    if halves is not None:
        n = rows.number(halves)
        fill, edge, _ = rows.colours(halves)
        signs[f"I{n}: the half of a backward for which the stage before waits"] = Patch(color=edge)
        signs[f"W{n}: its other half, which computes gradients of the weights"] = Patch(
            facecolor=fill, edgecolor=edge
        )
    if any(cell.width < 1 for cell in cells):
        signs["cells that share a slot: they run one after the other"] = sign("$1|2$", _GREY)
    version = "the version of the stage's weights that is used: how many updates it has had"
    if plan.axes.weights.looks_ahead:
        version += "; forwards predict newer weights from it"
    signs[version] = sign("$v0$", _DARK)
    if any(_is_old(cell.action) for cell in cells):
        signs[
            "in red: older than in plain training, where step 1 uses v1, step 2 uses v2 and so on"
        ] = sign("$v0$", _STALE)
    signs["no cell: the worker waits, or has done all steps of this picture"] = Patch(
        color=_STRIPE
    )
    if has_updates:
        signs[
            "an update: the optimizer makes this version of a stage's weights from the gradients "
            "of a step"
        ] = sign("D", _DARK, 6)
    payloads = {a.action.payload for a in arrows if a.action.payload is not None}
    for payload, (colour, text) in _LINES.items():
        if payload in payloads:
            signs[f"message: {text}"] = Line2D([], [], color=colour)
    if others := sorted({CARRIED[p] for p in payloads if p not in _LINES}):
        signs[f"message: {', '.join(others)}"] = Line2D([], [], color=_OTHER, linestyle=":")
    axes.legend(
        signs.values(), signs.keys(), loc="upper left", bbox_to_anchor=(0, 0), borderpad=0,
        frameon=False, fontsize=9, labelspacing=0.8, handlelength=2.5, title=_introduction(rows),
        title_fontsize=9, alignment="left",
    )  # fmt: skip


def _introduction(rows: Rows) -> str:
    row = "Each row is a worker"
    if rows.has_own_stage:
        row += ", which has a stage (some layers of the model) of its own"
    elif rows.has_own_micro:
        row += ", which has the whole model and a micro-batch (a part of the batch) of its own"
    else:
        row += "; cells say which stage (some layers of the model) it runs"
    slot = "half of a backward" if rows.splits else "backward"
    return f"{row}.\nTime goes from left to right; a slot is one forward or {slot} of one stage."


def trace_of(programs: Sequence[Sequence[Action]]) -> bytes:
    """Return the file of a plan for ui.perfetto.dev, with a process for each worker.

    Source: Trace Event Format (Google), the JSON array form.
    """
    return json.dumps(list(_events(programs)), indent=0).encode()


def _events(programs: Sequence[Sequence[Action]]) -> Iterator[dict[str, Any]]:
    for w in range(len(programs)):
        name = {"name": f"worker {w}"}
        yield {"name": "process_name", "ph": "M", "pid": w + 1, "args": name}
    for cell in cells_of(programs):
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
