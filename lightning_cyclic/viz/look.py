"""Look: how a plan is written and coloured, so that what rows have in common is said once.

Where each worker has a stage of its own, rows say the stage, and cells and colours the
micro-batch; where each has a micro-batch of its own, the other way round.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple, Self, final

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.viz.shapes import DARK, Paint

# dark enough for white letters, and told apart by most who see colours differently
_COLOURS = (
    "#2f6db3", "#c8641b", "#2e8a57", "#b03a5b", "#7457a6", "#8a6d2f", "#1f8a96", "#5b6470",
)  # fmt: skip
_TINT = 0.72  # of white in the colour of a forward


class Line(NamedTuple):
    """Hold how a message is drawn, and what the legend says of it."""

    colour: str
    style: str
    text: str


_SUM = Line(
    "#d98a00", "-", "gradients, added up from worker to worker, up to the one that updates"
)
_GRADIENTS = Line("#d98a00", "-", "gradients, to the worker that adds them up, and updates")
_WEIGHTS = Line("#2e8a57", "-", "new weights, from the worker that has made or received them")
OTHER = Line("#a0a0a0", ":", "")
LINES = {
    Payload.A: Line("#2f6db3", "-", "activations, to the worker of the next stage"),
    Payload.G: Line("#b03a5b", "-", "gradients of activations, back to the stage before"),
    Payload.S: _SUM,
    Payload.T: _SUM,
    Payload.H: _GRADIENTS,
    Payload.W: _SUM,
    Payload.P: _WEIGHTS,
    Payload.V: _WEIGHTS,
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Hold what rows have in common.

    Args:
        plan: that is shown.
        stages: of each worker, those that it runs.
        micros: of each worker, its micro-batches.
    """

    plan: Plan
    stages: tuple[frozenset[int], ...]
    micros: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Find it out from the timetable."""
        stages: defaultdict[int, set[int]] = defaultdict(set)
        micros: defaultdict[int, set[int]] = defaultdict(set)
        for _, w, a in plan.timetable:
            stages[w].add(a.j)
            micros[w].add(a.i or 0)
        workers = range(plan.num_workers)
        return cls(
            plan=plan,
            stages=tuple(frozenset(stages[w]) for w in workers),
            micros=tuple(frozenset(micros[w]) for w in workers),
        )

    @property
    def has_own_stage(self) -> bool:
        """Say whether each worker runs a single stage."""
        return all(len(found) == 1 for found in self.stages)

    @property
    def has_own_micro(self) -> bool:
        """Say whether each worker has a single micro-batch in every step."""
        return all(len(found) == 1 for found in self.micros)

    @property
    def counted(self) -> str:
        """Say what numbers and colours of cells stand for: "stage", "micro-batch" or "step".

        What rows do not say already; steps, where those have a single micro-batch each.
        """
        if self.has_own_micro and not self.has_own_stage:
            return "stage"
        return "micro-batch" if self.plan.num_micro > 1 else "step"

    @property
    def title(self) -> str:
        """Return what the picture is of."""
        plan = self.plan
        return (
            f"{plan.preset}: {_count(plan.num_workers, 'worker')}, "
            f"{_count(plan.num_stages, 'stage')}, "
            f"{_count(plan.num_micro, 'micro-batch', 'micro-batches')} per step"
        )

    def row(self, w: int) -> str:
        """Return what all cells of a row have in common."""
        parts = []
        if self.has_own_stage:
            parts += [f"stage {min(self.stages[w])}"]
        if self.has_own_micro and self.plan.num_micro > 1:
            parts += [f"micro-batch {min(self.micros[w])}"]
        return ", ".join(parts)

    def cell(self, a: Action) -> list[str]:
        """Return what is written in a cell, the largest first."""
        name = f"{a.kind}{self.number(a)}"
        is_known = self.has_own_stage or self.counted == "stage"
        return [name] if is_known else [name, f"stage {a.j}"]

    def number(self, a: Action) -> int:
        """Return the number of what cells count."""
        return {"stage": a.j, "micro-batch": a.i or 0, "step": a.t}[self.counted]

    def paint(self, a: Action) -> Paint:
        """Return the colours of a cell."""
        colour = _COLOURS[self.number(a) % len(_COLOURS)]
        if a.kind is Kind.F:
            return Paint(_tinted(colour), colour, DARK)
        return Paint(colour, colour, "white")

    def is_old(self, a: Action) -> bool:
        """Say whether an action reads older weights than it would in plain training."""
        return a.v is not None and a.v < a.t


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _tinted(colour: str) -> str:
    parts = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * _TINT):02x}" for part in parts)
