"""Stages: which parameters and buffers belong together, and which module call begins each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner.partition import balance
from lightning_cyclic.runtime.stages.profile import Profile, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Hold one stage.

    Args:
        start: path of the module whose first call begins the stage; "" for the step's beginning.
        parameters: names, in order of first use.
        glue: those that code outside their own module uses.
        buffers: names of the buffers that training changes (BatchNorm statistics) and that are
            first used here.
        buffers_final_after: stage after whose forward these buffers change no more in a step.
    """

    start: str
    parameters: tuple[str, ...]
    glue: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    buffers_final_after: int = 0


@dataclass(frozen=True, slots=True)
class StageMap:
    """Hold the stages of a module, in order of execution."""

    stages: tuple[Stage, ...]

    @property
    def stage_of(self) -> dict[str, int]:
        """Return parameter name -> stage."""
        return {name: j for j, stage in enumerate(self.stages) for name in stage.parameters}

    @property
    def relayed(self) -> tuple[int, ...]:
        """Return the stages that hold buffers which training changes."""
        return tuple(j for j, stage in enumerate(self.stages) if stage.buffers)

    def as_data(self) -> list[dict[str, Any]]:
        """Return plain data, for a checkpoint or a message."""
        return [asdict(stage) for stage in self.stages]

    @classmethod
    def from_data(cls, data: Sequence[Mapping[str, Any]]) -> Self:
        """Make the map from what :meth:`as_data` returned."""
        return cls(
            tuple(
                Stage(
                    start=d["start"],
                    parameters=tuple(d["parameters"]),
                    glue=tuple(d["glue"]),
                    buffers=tuple(d["buffers"]),
                    buffers_final_after=d["buffers_final_after"],
                )
                for d in data
            )
        )


def make_stages(
    profile: Profile, num_bytes: Mapping[str, int], stages: int | Sequence[str]
) -> StageMap:
    """Group the units of a profile into stages.

    A number asks for the contiguous grouping whose largest stage has the fewest bytes (exact);
    a list of module paths says where stages 1, 2, ... begin.

    Args:
        profile: what the first step showed.
        num_bytes: bytes of each parameter, by name.
        stages: how many, or the paths that begin stages 1, 2, ...

    Returns:
        The map; parameters that the profile did not see used go to stage 0, which is always read
        before a step begins.

    Raises:
        PlanError: more stages than places to begin one, or a path where none can begin.
    """
    units = profile.units
    if isinstance(stages, int):
        if stages > len(units):
            raise PlanError(
                f"stages={stages} were asked for, but the module has only {len(units)} places "
                f"where a stage can begin; allowed: 1 to {len(units)}; "
                f'lower it, or leave stages="auto"'
            )
        weights = [max(1, sum(num_bytes[n] for n in unit.parameters)) for unit in units]
        starts = balance(weights, stages)
        paths = ["", *(units[k].starts[0] for k in starts[1:])]
    else:
        starts = [0, *(_unit_at(units, path) for path in stages)]
        paths = ["", *stages]
        if sorted(set(starts)) != starts:
            raise PlanError(
                f"stages={list(stages)} do not begin one after the other; "
                f"allowed: {_places(units)}, in this order; reorder them"
            )
    return _group(profile, starts, paths)


def _unit_at(units: Sequence[Unit], path: str) -> int:
    for k, unit in enumerate(units):
        if path in unit.starts:
            return k
    raise PlanError(
        f"stages names {path!r}, where no stage can begin; allowed: {_places(units)}; "
        "name some of these, or give a number"
    )


def _places(units: Sequence[Unit]) -> str:
    return ", ".join("|".join(u.starts) for u in units[1:]) or "none: the module is one unit"


def _group(profile: Profile, starts: Sequence[int], paths: Sequence[str]) -> StageMap:
    units, made = profile.units, []
    for j, (a, b) in enumerate(zip(starts, [*starts[1:], len(units)], strict=True)):
        members = units[a:b]
        names = [n for unit in members for n in unit.parameters]
        if j == 0:
            names += profile.unused
        glue = tuple(n for unit in members for n in unit.glue)
        made.append(Stage(start=paths[j], parameters=tuple(names), glue=glue))
    return StageMap(_with_buffers(made, profile.buffers, starts))


def _with_buffers(
    stages: Sequence[Stage], buffers: Mapping[str, tuple[int, int]], starts: Sequence[int]
) -> tuple[Stage, ...]:
    """Give each buffer to the stage in which its module is first called."""
    spans = {
        n: (bisect_right(starts, a) - 1, bisect_right(starts, b) - 1)
        for n, (a, b) in buffers.items()
    }
    made = []
    for j, stage in enumerate(stages):
        mine = tuple(name for name, (first, _) in spans.items() if first == j)
        final_after = max((spans[name][1] for name in mine), default=j)
        made.append(replace(stage, buffers=mine, buffers_final_after=final_after))
    return tuple(made)
