"""Weights that leave memory: one worker has them where there is room, and here while it uses them.

    FETCH    a stage comes; the module shows it where a forward, a backward or an update begins
    F        graphs hold nothing of it (saved_places.py)
    FREE     the module shows it where there is room: on the host, or in a file
    B        autograd gets what it saved, once it has come again

Between steps all code finds all weights. What several modules share, or code outside of its module
uses, stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from torch import Tensor
from typing_extensions import override

from lightning_cyclic.runtime.saved_places import SavedPlaces
from lightning_cyclic.runtime.state_tier import StateTier
from lightning_cyclic.runtime.whole_step.shards import Replica
from lightning_cyclic.runtime.whole_step.versions import VersionStore


def replica_of(
    stores: Sequence[VersionStore], tier: StateTier | None, bring: Callable[[int, int], None],
    goes_back: Callable[[], bool],
) -> Replica:  # fmt: skip
    """Return what shows the weights of a worker that updates all of them, or has all copies."""
    return Replica(stores) if tier is None else TieredWeights(stores, tier, bring, goes_back)


@final
class TieredWeights(Replica):
    """Show weights that come and go.

    Args:
        stores: of what stays.
        bring: (stage, version) -> has it come again, for a backward.
        goes_back: returns whether the backward of the step is under way.
    """

    comes_and_goes = True
    instead = "a higher memory_limit_bytes, with which weights stay"

    def __init__(
        self, stores: Sequence[VersionStore], tier: StateTier, bring: Callable[[int, int], None],
        goes_back: Callable[[], bool],
    ) -> None:  # fmt: skip
        super().__init__(stores)
        self._tier, self._bring, self._goes_back = tier, bring, goes_back
        self._read: dict[int, int] = {}  # stage -> version
        self._places = tier.places = SavedPlaces(self._find)
        self.resting = tier.resting

    @override
    def has(self, j: int) -> bool:
        return self._tier.is_here(j)

    @override
    def enter(self, j: int, v: int) -> None:
        super().enter(j, v)
        self._read[j] = v
        self._tier.install(j)
        self._tier.rest()  # what comes before the next use has its rooms

    @override
    def packing(self) -> AbstractContextManager[Any]:
        return self._places.remembering()

    def _find(self, key: tuple[int, int]) -> Tensor:
        j, k = key
        if not self._tier.is_here(j):
            if not self._goes_back():  # a gradient that the forward asks for
                return self._tier.copied(j, k)
            self._bring(j, self._read[j])
        return self._tier.data(j, k)

    @override
    def release(self) -> None:
        self._tier.close()
