"""versions: write into every F and B which weight version it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from lightning_cyclic.plan.actions import Action, Kind

if TYPE_CHECKING:
    from lightning_cyclic.plan import Plan


class Cell(NamedTuple):
    """Hold one cell of a timetable, before anybody has asked which weights it reads."""

    kind: Kind
    t: int
    i: int
    j: int
    s: int


def versions(plan: Plan, cells: Iterable[Cell]) -> Iterator[Action]:
    """Make an action of each F and B, with the version that the weight rule names.

    Args:
        plan: whose rule and timetable decide.
        cells: F and B in any order; one worker's, or everybody's.

    Returns:
        The actions, in the order of the cells, lazily: pictures have millions of them.
    """
    for kind, t, i, j, s in cells:
        v = plan.reads(t, i, j) if kind is Kind.F else plan.backward_reads(t, i, j)
        yield Action(kind=kind, t=t, i=i, j=j, v=v, s=s)
