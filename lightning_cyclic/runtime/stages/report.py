"""The survey and its stages on paper: where time and bytes go, and where stages may begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_cyclic.runtime.stages.clocks import FLOPS_PER_BYTE, FLOPS_PER_NS
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.stages.evidence import Call, Survey
from lightning_cyclic.runtime.stages.obstacles import Obstacle
from lightning_cyclic.runtime.stages.places import CutPoints, Load, Place, paste
from lightning_cyclic.runtime.torch_functions import NO_LINE
from lightning_cyclic.simulate.units import show_bytes, show_seconds

_WIDTH = 100
_PATH_WIDTH, _START_WIDTH = 40, 34
_CLOCKS = {
    "counted": f"times are counted, at {FLOPS_PER_NS / 1e3:g} TFLOP/s and "
    f"{FLOPS_PER_NS / FLOPS_PER_BYTE:g} GB/s: the same in every run",
    "measured": "times are measured, in this run on this machine",
}


def report(survey: Survey, cuts: Cuts, *, rows: int = 120, remark: str | None = None) -> str:
    """Print what a step does, where stages can begin, what stands against others, and a choice.

    Args:
        survey: of the step.
        cuts: the stages.
        rows: most calls to list; of deep modules the inner ones are left out.
        remark: what else there is to say of the choice. [nothing]

    Returns:
        Lines of text, at most 100 columns wide.
    """
    points = CutPoints(survey)
    reasons = _reasons(points)
    console = Console(width=_WIDTH, force_terminal=False, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(
            f"{survey.title}: calls of modules with parameters, forward of one micro-batch"
        )
        console.print(_CLOCKS[survey.clock])
        console.print(_calls(points, cuts, reasons, rows))
        for obstacle, number in reasons.items():
            console.print(_footnote(obstacle, number), markup=False)
        if reasons:
            console.print()
        console.print("Stages")
        console.print(_stages(points, cuts))
        console.print(_advice(points, cuts), markup=False, soft_wrap=True)
        if remark is not None:
            console.print(remark, markup=False)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def loads(survey: Survey, cuts: Cuts) -> list[Load]:
    """Return the load of each stage, for the surveyed micro-batch."""
    return _loads(CutPoints(survey), cuts)


def _loads(points: CutPoints, cuts: Cuts) -> list[Load]:
    found = [points.at(path) for path in cuts.starts]
    places = [place for place in found if place is not None]
    assert len(places) == len(cuts.starts), "cuts of another survey"
    ticks = [0, *(p.tick for p in places), points.survey.end + 1]
    crossing = [0, *(p.crossing_bytes for p in places)]
    return [
        points.load(begin, end, bytes_)
        for (begin, end), bytes_ in zip(pairwise(ticks), crossing, strict=True)
    ]


def _reasons(points: CutPoints) -> dict[Obstacle, int]:
    """Number what stands against places, in order of appearance."""
    found = dict.fromkeys(o for p in points.places if p.has_parameters for o in p.obstacles[:1])
    return {obstacle: n for n, obstacle in enumerate(found, start=1)}


def _footnote(obstacle: Obstacle, number: int) -> str:
    where = f"\n      at {obstacle.line}" if obstacle.line != NO_LINE else ""
    return f"  [{number}] {obstacle.reason}{where}"


# ---------------------------------------------------------------------- the calls


def _calls(points: CutPoints, cuts: Cuts, reasons: Mapping[Obstacle, int], rows: int) -> Table:
    survey = points.survey
    grid = Table(box=SIMPLE_HEAD)
    grid.add_column("module", overflow="fold")
    for name in ("time", "params", "keeps", "crossing"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("a stage", no_wrap=True)
    listed, hidden = _listed(survey, cuts, rows)
    places = {p.path: p for p in points.places}
    shared = {name: p for p in points.places for name in p.names if name != p.path}
    for call in listed:
        first = call.n == 0
        place = places.get(call.path) if first else None
        verdict = "as above" if first and call.path in shared else ""
        if place is not None:
            verdict = _verdict(place, cuts, reasons)
        elif call.path in cuts.starts and first:
            verdict = _begins(call.path, cuts)
        grid.add_row(*_row(points, call, place), verdict)
    if hidden:
        grid.caption = f"{hidden} inner calls are left out"
        grid.caption_justify = "left"
    return grid


def _row(points: CutPoints, call: Call, place: Place | None) -> Iterator[str]:
    load = points.load(call.begin, call.end)
    yield _folded(call.path if call.n == 0 else f"{call.path} (call {call.n + 1})")
    yield show_seconds((call.end_ns - call.begin_ns) / 1e9)
    yield show_bytes(load.parameter_bytes)
    yield show_bytes(load.activation_bytes + load.adopted_bytes)  # what it is the first to keep
    yield show_bytes(place.crossing_bytes) if place is not None else ""


def _folded(path: str, width: int = _PATH_WIDTH) -> str:
    r"""Break a path that is too long for its column behind a dot.

    Example:
        >>> _folded("stages.0.layers.0.layer.0.shortcut.convolution.weight.original")
        'stages.0.layers.0.layer.0.shortcut.\n  convolution.weight.original'
    """
    if len(path) <= width:
        return path
    at = path.rfind(".", 0, width) + 1 or width
    return f"{path[:at]}\n  {_folded(path[at:], width)}"


def _verdict(place: Place, cuts: Cuts, reasons: Mapping[Obstacle, int]) -> str:
    begins = next((name for name in place.names if name in cuts.starts), None)
    if begins is not None:
        return _begins(begins, cuts)
    if not place.obstacles:
        return "can begin"
    note = f"[{reasons.get(place.obstacles[0], '')}]".replace("[", r"\[")
    return f"can, but {note}" if place.is_possible else f"cannot {note}"


def _begins(path: str, cuts: Cuts) -> str:
    return f"{cuts.starts.index(path) + 1} begins"


def _listed(survey: Survey, cuts: Cuts, rows: int) -> tuple[list[Call], int]:
    """Return the calls to list, none deeper than fits, and how many are left out."""
    depths = [len(survey.around(c.parent)) for c in survey.calls]
    worth = [
        (depth, c)
        for depth, c in zip(depths, survey.calls, strict=True)
        if c.is_unit and not survey.in_metric(c.path)
    ]
    deepest = max(
        (d for d in range(max(depths, default=0) + 1) if _count(worth, d) <= rows), default=0
    )
    listed = [c for depth, c in worth if depth <= deepest or c.path in cuts.starts]
    return listed, len(worth) - len(listed)


def _count(worth: Sequence[tuple[int, Call]], depth: int) -> int:
    return sum(d <= depth for d, _ in worth)


# ---------------------------------------------------------------------- the stages


def _stages(points: CutPoints, cuts: Cuts) -> Table:
    grid = Table(box=SIMPLE_HEAD)
    grid.add_column("stage", justify="right")
    grid.add_column("begins at", overflow="fold")
    for name in ("time", "share", "params", "keeps", "receives"):
        grid.add_column(name, justify="right", no_wrap=True)
    whole = max(points.survey.duration_ns, 1)
    begins = ["the step's beginning", *cuts.starts]
    for j, load in enumerate(_loads(points, cuts)):
        grid.add_row(
            str(j),
            _folded(begins[j], _START_WIDTH),
            show_seconds(load.compute_ns / 1e9),
            f"{load.compute_ns / whole:.0%}",
            show_bytes(load.parameter_bytes),
            show_bytes(load.activation_bytes),
            show_bytes(load.crossing_bytes),
        )
    return grid


def _advice(points: CutPoints, cuts: Cuts) -> str:
    lines = [("" if cuts.starts else "one stage: ") + paste(cuts.starts)]
    for name, stages in cuts.tied.items():
        lines.append(f"{name} is used in stages {', '.join(map(str, stages))}: kept alike")
    unused = [name for name, held in points.survey.parameters.items() if not held.uses]
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        lines.append(f"not used in this step: {', '.join(unused[:5])}{more}")
    return "\n".join(lines)
