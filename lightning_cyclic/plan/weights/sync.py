"""sync: step t reads version t, as in plain training. Needs a flush or lockstep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from lightning_cyclic.plan.weights.base import AbstractWeights


@final
@dataclass(frozen=True, slots=True)
class Sync(AbstractWeights):
    """Read the weights that all earlier steps have updated, whether or not they exist yet.

    Where the timetable has not made them yet, the program is refused by the checker.
    """

    at_end_of_step: ClassVar[bool] = True

    def forward(self, t: int, newest: int) -> int:
        """Give the version that a forward of step t reads: t."""
        return t
