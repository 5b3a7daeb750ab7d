"""versions: write into every F and B which weight version it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lightning_cyclic.actions import Action, Kind

if TYPE_CHECKING:
    from lightning_cyclic.plan import Plan


def versions(plan: Plan, actions: Iterable[Action]) -> Iterator[Action]:
    """Give each F and B the version that the weight rule names.

    Args:
        plan: whose rule and timetable decide.
        actions: F and B without versions, in any order; one worker's, or everybody's.

    Returns:
        The same actions with ``v``, lazily.
    """
    for a in actions:
        assert a.i is not None
        reads = plan.reads if a.kind is Kind.F else plan.backward_reads
        # built anew: dataclasses.replace takes twice as long, and pictures have millions of cells
        yield Action(kind=a.kind, t=a.t, i=a.i, j=a.j, v=reads(a.t, a.i, a.j), s=a.s)
