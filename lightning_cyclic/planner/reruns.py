"""What the stages of a plan run again where their workers keep a limit, and what that costs.

As ``activation_checkpointing="optimal"`` does it in a run: stages are cut by time alone, what a
limit leaves beside weights, gradients and optimizer state is shared among micro-batches that are
under way, and each stage runs those of its units again that its share has no room for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan
from lightning_cyclic.planner.profile import UnitProfile
from lightning_cyclic.planner.rematerialisation import (
    Rematerialisation,
    Room,
    Unit,
    best_schedule,
    least_bytes,
    rooms,
)
from lightning_cyclic.simulate.costs import Costs
from lightning_cyclic.simulate.memory import Memory, memory

_MOST_UNITS, _MOST_STEPS = 24, 32  # of a stage that is planned in a second or so, as in a run


class Reruns(NamedTuple):
    """Hold what stages run again.

    Args:
        limit_bytes: of the strategy, as its ``memory_limit_bytes``.
        again_s: seconds of each stage's units that run again, of one micro-batch.
        memory: of each worker.
    """

    limit_bytes: int
    again_s: tuple[float, ...]
    memory: tuple[Memory, ...]


def units_of(profiles: Sequence[UnitProfile], behind: UnitProfile | None) -> list[Unit]:
    """Return what a stage may run again.

    Args:
        profiles: of its units.
        behind: with which the next stage begins.
    """
    following = [*profiles[1:], behind]
    return [
        Unit(unit.forward_s, int(unit.activation_bytes), int(x.crossing_bytes if x else 0.0))
        for unit, x in zip(profiles, following, strict=True)
    ]


def reruns(
    plan: Plan,
    units: Sequence[Sequence[Unit]],
    costs: Costs,
    limit_bytes: float,
    *,
    state_per_param: float,
) -> Reruns | None:
    """Choose what each stage runs again.

    Args:
        plan: of enough steps to reach its steady state.
        units: of each stage.
        costs: of each stage, of which bytes of parameters and inputs count.
        limit_bytes: of all that each worker keeps.
        state_per_param: bytes of optimizer state per byte of parameters.

    Returns:
        What runs again; None where nothing keeps to the limit.
    """
    beside = _beside(plan, costs, state_per_param)
    limit = int(limit_bytes - max(m.returns for m in beside))  # of which a run counts nothing
    again_s, kept = [0.0] * plan.num_stages, [0.0] * len(beside)
    for w, j, room in _rooms(plan, costs, limit, state_per_param):
        inputs = room.at_once * int(costs.cut_bytes[j])
        try:
            found = _best(tuple(units[j]), room.bytes - inputs, room.at_once)
        except PlanError:
            return None
        again_s[j] = max(again_s[j], found.again_s)
        kept[w] += found.peak_bytes
    each = (replace(m, activations=size) for m, size in zip(beside, kept, strict=True))
    return Reruns(limit, tuple(again_s), tuple(each))


def least_limit(
    plan: Plan, units: Sequence[Sequence[Unit]], costs: Costs, *, state_per_param: float
) -> int:
    """Return the least limit that some choice keeps to; see :func:`reruns`."""
    needed = 0
    for _, j, room in _rooms(plan, costs, 0, state_per_param):
        least = least_bytes(units[j], at_once=room.at_once, most_steps=_steps(len(units[j])))
        needed = max(needed, room.limit_for(room.at_once * int(costs.cut_bytes[j]) + least))
    beside = _beside(plan, costs, state_per_param)
    return -int(-(needed + max(m.returns for m in beside)) // 1)


def _beside(plan: Plan, costs: Costs, state_per_param: float) -> tuple[Memory, ...]:
    """Return what workers keep beside activations."""
    nothing = replace(costs, activation_bytes=(0.0,) * plan.num_stages)
    return memory(plan, nothing, remat=True, state_per_param=state_per_param)


def _rooms(
    plan: Plan, costs: Costs, limit: int, state_per_param: float
) -> Iterator[tuple[int, int, Room]]:
    for w, found in enumerate(rooms(plan, costs.param_bytes, limit, state_per_param)):
        for j, room in found.items():
            yield w, j, room


@cache
def _best(units: tuple[Unit, ...], limit: int, at_once: int) -> Rematerialisation:
    return best_schedule(units, limit, at_once=at_once, most_steps=_steps(len(units)))


def _steps(num_units: int) -> int:
    return _MOST_STEPS * _MOST_UNITS // max(_MOST_UNITS, num_units)
