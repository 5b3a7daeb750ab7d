"""Which units of this worker's stages are run again, for each kind of micro-batch.

The first micro-batch of a kind is run again whole in its backward, and looked at meanwhile; from
the next one on its units follow the schedule that the planner finds for what they keep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias, final

from torch import nn

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner.rematerialisation import (
    Rematerialisation,
    Room,
    best_schedule,
    least_bytes,
)
from lightning_cyclic.runtime.partial_step.observed import Chain, Observation
from lightning_cyclic.runtime.partial_step.segments import Moments, Recorder
from lightning_cyclic.runtime.stages.cuts import Cuts

Follower: TypeAlias = Observation | Recorder

_MOST_KINDS = 256  # times stages: inputs of many sizes must not fill the memory
_MOST_UNITS = 24  # that are planned within a second or so
_MOST_STEPS = 32
_NS_PER_S = 1e9


class Chosen(NamedTuple):
    """Hold what was chosen for a stage and a kind of micro-batch."""

    chain: Chain
    plan: Rematerialisation


@final
class UnitSchedules:
    """Choose for each stage and kind, and say how its forwards are to be followed.

    Args:
        rooms: of each stage of this worker.
        say: tells the user what was chosen.
    """

    def __init__(
        self, module: nn.Module, cuts: Cuts, rooms: Mapping[int, Room], say: Callable[[str], None]
    ) -> None:
        self.chosen: dict[tuple[int, str], Chosen] = {}
        self._module = module
        self._rooms = rooms
        self._say = say
        self._forward_s = {path: ns / _NS_PER_S for path, ns in cuts.times.items()}
        self._told: set[int] = set()

    def follower(self, j: int, kind: str, moments: Moments) -> Follower:
        chosen = self.chosen.get((j, kind))
        if chosen is None:
            still = [*self._module.parameters(), *self._module.buffers()]
            return Observation(still, self._forward_s, _set_up_by_hooks(self._module))
        chain = chosen.chain
        return Recorder(chain.paths, chain.opened, chosen.plan.schedule, moments)

    def learn(self, j: int, kind: str, seen: Observation, input_bytes: int) -> None:
        """Choose a schedule by what was seen.

        Raises:
            PlanError: none keeps to the limit; with the nearest one that can be met.
        """
        room, found, least = self._rooms[j], list[Chosen](), list[int]()
        for chain in seen.chains(_MOST_UNITS):
            fixed = room.at_once * (input_bytes + chain.aside_bytes)
            steps = _MOST_STEPS * _MOST_UNITS // max(_MOST_UNITS, len(chain.units))
            how = {"at_once": room.at_once, "most_steps": steps}
            try:
                plan = best_schedule(chain.units, room.bytes - fixed, **how)
            except PlanError:
                least.append(fixed + least_bytes(chain.units, **how))
            else:
                found.append(Chosen(chain, plan._replace(peak_bytes=plan.peak_bytes + fixed)))
        seen.forget()
        if not found:
            _refuse(j, room, min(least))
        if len(self.chosen) >= _MOST_KINDS:
            del self.chosen[next(iter(self.chosen))]
        best = min(found, key=lambda x: (x.plan.again_s, x.plan.peak_bytes))
        self.chosen[j, kind] = best
        if j not in self._told:
            self._told.add(j)
            self._say(_told(j, best, room))


def _refuse(j: int, room: Room, least: int) -> None:
    needed = room.limit_for(least)
    raise PlanError(
        f"memory_limit_bytes={room.limit_bytes} leaves {max(room.bytes, 0)} bytes for the "
        f"activations of stage {j}, of which {room.at_once} micro-batches are under way at once, "
        f"and which keeps {least} at least, whichever of its units are run again; allowed: "
        f"{needed} or more; use memory_limit_bytes={needed}, smaller micro-batches, or more stages"
    )


def _told(j: int, chosen: Chosen, room: Room) -> str:
    chain, plan = chosen
    forward_s = sum(u.forward_s for u in chain.units) or 1.0
    return (
        f"stage {j}: each backward runs {plan.runs_again} of its {len(chain.units)} units again, "
        f"{plan.again_s / forward_s:.0%} of a forward; {plan.peak_bytes} bytes of activations at "
        f"most, of {room.bytes}"
    )


def _set_up_by_hooks(module: nn.Module) -> Collection[str]:
    """Return the paths of modules whose hooks make their weights, in each call anew."""
    return frozenset(path for path, m in module.named_modules() if m._forward_pre_hooks)
