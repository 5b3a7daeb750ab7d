"""Make the pictures of README and docs, from the package's own plans and its simulator.

    python docs/make_pictures.py        writes docs/images/*.svg

What stands in a picture is asked of a plan, never drawn by hand: a picture changes where the plan
does, and `tests/house/test_docs.py` compares. The files depend on nothing but the plans.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise, product
from math import ceil, inf
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from lightning_cyclic import Plan, make_plan
from lightning_cyclic.plan import programs_of
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.simulate import Costs, Network, Result, lockstep, simulate

IMAGES = Path(__file__).parent / "images"
FONT = "font-family=\"'DejaVu Sans', Verdana, Arial, sans-serif\""
INK, FAINT, RED = "#24292f", "#8c959f", "#cf222e"
FORWARD, BACKWARD, SENDING, UPDATE = "#9ecae1", "#3182bd", "#f59e0b", "#d1495b"
# of each version of the weights: its forwards, its backwards
VERSIONS = [
    ("#cfe3f5", "#7fb2de"),
    ("#fddfb8", "#f4a647"),
    ("#cdebc7", "#74c476"),
    ("#e3d6f0", "#a98bcf"),
    ("#f9cdd3", "#e5808f"),
]
WIDTH = 770  # of every picture, in pixels: what a page shows without making it smaller
COLUMN, ROW = 30, 24  # of a timetable: the size of a slot


class Canvas:
    """Collect shapes, and write them as SVG on a white ground, for light and dark pages."""

    def __init__(self, height: float, title: str) -> None:
        self._height = height
        self._title = title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, edge: str = "none") -> None:
        """Draw a rectangle."""
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" '
            f'stroke="{edge}"/>'
        )

    def text(
        self, x: float, y: float, text: str, *, size: int = 12, fill: str = INK,
        anchor: str = "start", weight: str = "normal", font: str = FONT,
    ) -> None:  # fmt: skip
        """Write a line of text, whose foot is at y."""
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" {font} '
            f'text-anchor="{anchor}" font-weight="{weight}" xml:space="preserve">'
            f"{escape(text)}</text>"
        )

    def line(
        self, x0: float, y0: float, x1: float, y1: float, *, colour: str = FAINT,
        width: float = 1, dashes: str = "", arrow: bool = False,
    ) -> None:  # fmt: skip
        """Draw a straight line."""
        extra = f' stroke-dasharray="{dashes}"' if dashes else ""
        extra += ' marker-end="url(#arrow)"' if arrow else ""
        self._shapes.append(
            f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}" '
            f'stroke-width="{width:g}"{extra}/>'
        )

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Draw coloured squares with their meaning, in one row."""
        for fill, meaning in entries:
            self.box(x, y - 10, 14, 12, fill, FAINT)
            self.text(x + 20, y, meaning)
            x += 42 + 7.2 * len(meaning)

    def caption(self, y: float, text: str) -> None:
        """Write lines of explanation under a picture."""
        for k, line in enumerate(wrap(text, 110)):
            self.text(16, y + 17 * k, line, fill="#57606a")

    def svg(self) -> str:
        """Return the file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height:g}" '
            f'width="{WIDTH}" height="{self._height:g}" role="img">\n'
            f"<title>{escape(self._title)}</title>\n"
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="{RED}"/></marker>'
            '</defs>\n<rect width="100%" height="100%" rx="8" fill="#ffffff"/>\n'
        )
        return head + "\n".join(self._shapes) + "\n</svg>\n"


# ---------------------------------------------------------------------- timetables by the clock


SCALE, LEFT = 120.0, 96.0  # of the overview: pixels for the compute of a step, and where it begins
SHOWN = 5.25  # how much of the run, in the compute of a step


class Bar(NamedTuple):
    """Hold what a worker is busy with, in the compute of a step."""

    worker: int
    begin: float
    end: float
    fill: str
    label: str = ""


def overview() -> Canvas:
    """Draw data parallelism above cyclic data parallelism, on the same slow network."""
    num_workers, num_stages = 4, 8
    costs = Costs.even(num_stages, compute_s=1.0, model_bytes=1.0)
    network = Network(bandwidth_bytes_per_s=2.0)  # all parameters in half of a step's compute
    canvas = Canvas(484, "Data parallelism and cyclic data parallelism on a slow network")
    one = lockstep(costs, network, num_workers, bucket_bytes=inf).step_s
    canvas.text(16, 28, "Data parallelism: all compute, then all wait", size=16, weight="bold")
    _clock(canvas, 44, num_workers, _lockstep_bars(num_workers, one), one)

    plan = make_plan("cyclic_dp", num_stages=num_stages, num_workers=num_workers, num_steps=20)
    result = simulate(programs_of(plan), costs, network)
    canvas.text(
        16, 222, "cyclic_dp: one worker behind the other, messages travel while all compute",
        size=16, weight="bold",
    )  # fmt: skip
    _clock(canvas, 238, num_workers, _cyclic_bars(result), result.step_s)

    small = lockstep(costs, network, num_workers).step_s
    canvas.legend(16, 412, [(FORWARD, "forward"), (BACKWARD, "backward"), (SENDING, "sending")])
    canvas.caption(
        434,
        "Simulated: 4 workers, 8 stages, no latency, a network that needs half of a step's "
        "compute to send all parameters once. Gradients above travel as one message, as in "
        "DDP if they fit into its bucket of 25 MiB; with a bucket for each stage a step takes "
        f"{small:.2f}.",
    )
    return canvas


def _clock(canvas: Canvas, y: float, num_workers: int, bars: Iterable[Bar], step: float) -> None:
    """Draw what workers do by the clock, and how long a step takes."""
    shown = [bar._replace(begin=max(bar.begin, 0.0), end=min(bar.end, SHOWN)) for bar in bars]
    shown = [bar for bar in shown if bar.end > bar.begin + 1e-6]
    for w in range(num_workers):
        canvas.text(16, y + 34 * w + 14, f"worker {w}")
    for bar in shown:
        top, height = (18, 8) if bar.fill == SENDING else (0, 17)
        canvas.box(
            LEFT + SCALE * bar.begin, y + 34 * bar.worker + top, SCALE * (bar.end - bar.begin),
            height, bar.fill,
        )  # fmt: skip
    for bar in shown:
        if bar.end - bar.begin > 0.32:
            canvas.text(LEFT + SCALE * bar.begin + 4, y + 34 * bar.worker + 13, bar.label, size=11)
    y += 34 * num_workers + 8
    canvas.line(LEFT, y, LEFT + SCALE * step, y, colour=INK, width=1.5)
    for end in (LEFT, LEFT + SCALE * step):
        canvas.line(end, y - 5, end, y + 5, colour=INK, width=1.5)
    canvas.text(LEFT + SCALE * step + 8, y + 4, f"a step takes {step:.2f} times its compute")


def _lockstep_bars(num_workers: int, step: float) -> Iterator[Bar]:
    for w, t in product(range(num_workers), range(ceil(SHOWN / step))):
        yield Bar(w, t * step, t * step + 1 / 3, FORWARD, f"step {t}")
        yield Bar(w, t * step + 1 / 3, t * step + 1, BACKWARD)
        yield Bar(w, t * step + 1, (t + 1) * step, SENDING)


def _cyclic_bars(result: Result) -> Iterator[Bar]:
    """Yield what a steady part of the run consists of, pieces that touch as one."""
    first = 9  # a step by which the run is steady
    begin = min(
        e.start_s for e in result.events if e.action.kind is Kind.F and e.action.t == first
    )
    last: dict[tuple[int, bool], Bar] = {}
    for e in sorted(result.events, key=lambda e: e.start_s):
        fill = {Kind.F: FORWARD, Kind.B: BACKWARD, Kind.SEND: SENDING}.get(e.action.kind, "")
        if not fill or e.end_s == e.start_s:
            continue
        new = Bar(e.worker, e.start_s - begin, e.end_s - begin, fill)
        if fill == FORWARD:
            new = new._replace(label=f"step {e.action.t - first}" * (e.action.t >= first))
        lane = e.worker, fill == SENDING
        old = last.get(lane)
        if old and old.fill == fill and old.label == new.label and new.begin - old.end < 1e-6:
            new = old._replace(end=new.end)
        elif old:
            yield old
        last[lane] = new
    yield from last.values()


# ---------------------------------------------------------------------- timetables by slots

Label = Callable[[Action], str]


def _timetable(
    canvas: Canvas, plan: Plan, x: float, y: float, slots: int, label: Label,
    fill: Callable[[Action], str] | None = None,
) -> None:  # fmt: skip
    """Draw who computes what in which slot; the colour is the version of the weights."""
    for s in range(slots):
        canvas.text(x + COLUMN * (s + 0.5), y - 5, f"{s}", size=10, fill=FAINT, anchor="middle")
    for w in range(plan.num_workers):
        canvas.text(x - 8, y + ROW * w + 16, f"worker {w}", size=11, anchor="end")
        canvas.box(x, y + ROW * w, COLUMN * slots, ROW, "#f6f8fa", "#e5e8eb")
    for s, w, a in plan.timetable:
        if s < slots:
            colour = _colour(a) if fill is None else fill(a)
            canvas.box(x + COLUMN * s, y + ROW * w, COLUMN, ROW, colour, "#ffffff")
            canvas.text(
                x + COLUMN * (s + 0.5), y + ROW * w + 16, label(a), size=11, anchor="middle"
            )


def _colour(a: Action) -> str:
    return VERSIONS[(a.v or 0) % len(VERSIONS)][a.kind is Kind.B]


def _by_stage(a: Action) -> str:
    return f"{a.kind}{a.j}"


def _by_micro(a: Action) -> str:
    return f"{a.kind}{a.i}"


def _versions(num: int) -> list[tuple[str, str]]:
    names = ["first weights", "after 1 update", "after 2", "after 3", "after 4"]
    return [(VERSIONS[v][1], names[v]) for v in range(num)]


def data_parallel() -> Canvas:
    """Draw the timetables of plain and of cyclic data parallelism."""
    slots = 22
    canvas = Canvas(390, "Timetables of lockstep_dp and cyclic_dp")
    x, numbers = 88.0, {"num_stages": 4, "num_workers": 4}
    canvas.text(16, 26, "lockstep_dp: all at once, new weights for all", size=15, weight="bold")
    _timetable(canvas, make_plan("lockstep_dp", num_steps=3, **numbers), x, 54, slots, _by_stage)
    for t, text in ((1, "all gradients are exchanged here"), (2, "and here")):
        at = x + COLUMN * 8 * t
        canvas.line(at, 40, at, 54 + 4 * ROW + 6, colour=RED, width=2)
        canvas.text(at + 4, 54 + 4 * ROW + 18, text, fill=RED)
    canvas.text(
        16, 206,
        "cyclic_dp: each worker two slots behind the one before, new weights as they come",
        size=15, weight="bold",
    )  # fmt: skip
    _timetable(canvas, make_plan("cyclic_dp", num_steps=3, **numbers), x, 234, slots, _by_stage)
    canvas.legend(16, 358, _versions(3))
    canvas.caption(
        380,
        "F2: forward of stage 2, B2: its backward. A slot is the time of one of them.",
    )
    return canvas


def ring() -> Canvas:
    """Draw how the gradients of one stage become new weights, on their way around the workers."""
    slots, stage = 20, 2
    canvas = Canvas(248, "The way of one stage's gradients under cyclic_dp")
    plan = make_plan("cyclic_dp", num_stages=4, num_workers=4, num_steps=3)
    x, y = 88.0, 60.0

    def shown(a: Action) -> bool:
        first = a.kind is Kind.B and a.t == 0
        return a.j == stage and (first or (a.kind is Kind.F and a.v == 1))

    canvas.text(16, 26, f"The way of stage {stage}'s gradients", size=15, weight="bold")
    _timetable(
        canvas, plan, x, y, slots,
        lambda a: _by_stage(a) if shown(a) else "",
        lambda a: _colour(a) if shown(a) else "#eaeef2",
    )  # fmt: skip
    backwards = {w: s for s, w, a in plan.timetable if shown(a) and a.kind is Kind.B}
    readers: dict[int, int] = {}
    for s, w, a in plan.timetable:
        if shown(a) and a.kind is Kind.F:
            readers.setdefault(w, s)
    sums = [(s, w) for w, s in sorted(backwards.items())]
    versions = [(readers[w], w) for w in plan.chain(stage)]
    for (s0, w0), (s1, w1) in pairwise([*sums, *versions]):
        to_sum = (s1, w1) in sums
        canvas.line(
            x + COLUMN * (s0 + 1), y + ROW * (w0 + 0.5),
            x + COLUMN * (s1 + (0.5 if to_sum else 0.12)),
            y + ROW * (w1 + (0.15 if to_sum else 0.5)),
            colour=RED, width=1.8, arrow=True,
        )  # fmt: skip
    owner = plan.owner(stage)
    for k, line in enumerate(
        (
            "Each worker adds its gradient to the sum that comes from the worker before, and "
            "hands it on: the order never changes.",
            f"The whole sum goes to worker {owner}, which needs the new weights first. It applies "
            "the update, and uses them at once.",
            "The new weights travel on, and reach each worker before it reads them. Nobody waits "
            "for all.",
        )
    ):
        canvas.text(16, 186 + 22 * k, f"{k + 1}. {line}")
    return canvas


def pipelines() -> Canvas:
    """Draw the timetables of three pipelines."""
    slots = 22
    canvas = Canvas(560, "Timetables of gpipe, 1f1b and cyclic_pipeline")
    titles = {
        "gpipe": "gpipe: all forwards, then all backwards, then the pipeline is empty",
        "1f1b": "1f1b: backwards as early as they can, the same result, fewer activations at once",
        "cyclic_pipeline": "cyclic_pipeline: no flush, the next step begins while this one ends",
    }
    for k, (preset, title) in enumerate(titles.items()):
        plan = make_plan(preset, num_stages=4, num_workers=4, num_microbatches=4, num_steps=4)
        canvas.text(16, 26 + 164 * k, title, size=15, weight="bold")
        _timetable(canvas, plan, 88, 54 + 164 * k, slots, _by_micro)
    canvas.legend(16, 518, _versions(3))
    canvas.caption(
        544,
        "Worker j has stage j of the model. F2: forward of micro-batch 2, B2: its "
        "backward. Grey slots are idle.",
    )
    return canvas


# ---------------------------------------------------------------------- what follows from plans


def staleness() -> Canvas:
    """Draw how many updates old the weights are that each forward reads."""
    canvas = Canvas(337, "By how many updates the weights are old that forwards read")
    replicated = {"num_stages": 4, "num_workers": 4}
    pipelined = replicated | {"num_microbatches": 4}
    given = [
        ("lockstep_dp", make_plan("lockstep_dp", **replicated), "worker"),
        ("cyclic_dp", make_plan("cyclic_dp", **replicated), "worker"),
        ("cyclic_dp, slack=4", make_plan("cyclic_dp", slack=4, **replicated), "worker"),
        ("cyclic_dp_v1", make_plan("cyclic_dp_v1", **replicated), "worker"),
        ("gpipe, 1f1b", make_plan("1f1b", **pipelined), "micro-batch"),
        ("cyclic_pipeline", make_plan("cyclic_pipeline", **pipelined), "micro-batch"),
        ("pipedream_2bw", make_plan("pipedream_2bw", **pipelined), "micro-batch"),
        ("pipedream", make_plan("pipedream", num_microbatches=1, **replicated), "micro-batch"),
    ]
    for k, (name, plan, what) in enumerate(given):
        _lags(canvas, plan, 88 + 192 * (k % 4), 44 + 140 * (k // 4), name, what)
    canvas.caption(
        308,
        "0: the newest weights, 1: those of one update before, and so on. pipedream "
        "updates after every micro-batch, so its updates are smaller.",
    )
    return canvas


def _lags(canvas: Canvas, plan: Plan, x: float, y: float, name: str, what: str) -> None:
    shades = ["#f6f8fa", "#fddfb8", "#f4a647", "#d9822b"]
    canvas.text(x, y - 18, name, size=13, weight="bold")
    for j in range(plan.num_stages):
        canvas.text(x + 24 * j + 12, y - 4, f"{j}", size=10, fill=FAINT, anchor="middle")
    canvas.text(x - 4, y - 4, "stage", size=10, fill=FAINT, anchor="end")
    for i in range(plan.num_microbatches):
        canvas.text(x - 6, y + 20 * i + 14, f"{what} {i}", size=10, fill=FAINT, anchor="end")
        for j in range(plan.num_stages):
            lag = plan.lag(plan.late_step, i, j)
            canvas.box(x + 24 * j, y + 20 * i, 24, 20, shades[lag], "#d0d7de")
            canvas.text(x + 24 * j + 12, y + 20 * i + 14, f"{lag}", size=11, anchor="middle")


def activations() -> Canvas:
    """Draw how many activations all workers keep at once."""
    canvas = Canvas(250, "Activations that all workers keep together, slot by slot")
    plans = ("lockstep_dp", "all at once"), ("cyclic_dp", "one behind the other")
    for k, (preset, what) in enumerate(plans):
        plan = make_plan(preset, num_stages=4, num_workers=4, num_steps=6)
        alive = _alive(plan)[16:32]
        x, y = 60 + 385 * k, 190
        canvas.text(x - 44, 26, f"{preset}: {what}", size=15, weight="bold")
        for s, n in enumerate(alive):
            canvas.box(x + 19 * s, y - 8 * n, 17, 8 * n, BACKWARD if n == max(alive) else FORWARD)
        canvas.line(x - 4, y - 8 * max(alive), x + 19 * 16, y - 8 * max(alive), dashes="4 3")
        canvas.text(x - 8, y - 8 * max(alive) + 4, f"{max(alive)}", anchor="end")
        canvas.text(x - 8, y + 4, "0", anchor="end")
        canvas.text(x, y + 18, "slots of two steps", size=11, fill=FAINT)
    canvas.caption(
        236,
        "4 workers, 4 stages: 4 x 4 stage-activations at the peak; or 4 x 5 / 2, always.",
    )
    return canvas


def _alive(plan: Plan) -> list[int]:
    """Count the stage-activations of all workers in each slot."""
    spans: dict[tuple[int, int | None, int], list[int]] = {}
    for s, _, a in plan.timetable:
        spans.setdefault((a.t, a.i, a.j), []).append(s)
    ends = max(end for _, end in spans.values())
    return [sum(begin <= s <= end for begin, end in spans.values()) for s in range(ends + 1)]


def stage_of_a_step() -> Canvas:
    """Draw what the three workers of a pipeline do with the lines of one training_step."""
    lines = [
        ("x = self.embed(batch.tokens)", 0),
        ("mask = batch.tokens != 0", None),  # of the batch alone
        ("x = x * scale", 0),
        ("x = self.middle(x, mask)", 1),
        ("loss = self.head(x, batch.y)", 2),
        ("return loss", 2),
    ]
    canvas = Canvas(270, "One training_step, run by three workers, a stage each")
    canvas.text(16, 28, "your training_step", size=14, weight="bold")
    mono = "font-family=\"'DejaVu Sans Mono', Menlo, Consolas, monospace\""
    for w in range(3):
        canvas.text(256 + 168 * w, 28, f"worker of stage {w}", size=14, weight="bold")
    for k, (code, stage) in enumerate(lines):
        y = 44 + 30 * k
        canvas.text(16, y + 19, code, size=13, font=mono)
        for w in range(3):
            what, fill = _does(stage, w)
            canvas.box(256 + 168 * w, y, 160, 26, fill, "#ffffff")
            canvas.text(264 + 168 * w, y + 17, what)
    canvas.caption(
        252,
        "Every worker runs the same Python from its first line to the end of its stage, "
        "once for each micro-batch.",
    )
    return canvas


def _does(stage: int | None, w: int) -> tuple[str, str]:
    if stage is None:
        return "computed: batch only", "#cdebc7"
    if stage == w:
        return "computed", VERSIONS[0][1]
    if stage < w:
        return "skipped, a placeholder", "#eaeef2"
    return "not reached", "#ffffff"


PICTURES: dict[str, Callable[[], Canvas]] = {
    "overview": overview,
    "data_parallel": data_parallel,
    "ring": ring,
    "pipelines": pipelines,
    "staleness": staleness,
    "activations": activations,
    "stage_of_a_step": stage_of_a_step,
}


def main(folder: Path = IMAGES) -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
