"""Stages: which parameters and buffers belong together, and which module call begins each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
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
        glue: those, trained or frozen, that code outside their own module uses.
        buffers: names of the buffers that training changes (BatchNorm statistics) and that are
            first used here.
        buffers_final_after: stage after whose forward these buffers change no more in a step.
        frozen: names of the parameters that are first used here, but not trained, or not yet.
    """

    start: str
    parameters: tuple[str, ...]
    glue: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    buffers_final_after: int = 0
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StageMap:
    """Hold the stages of a module, in order of execution.

    Args:
        untrained: names of those parameters of stages that get no gradients.
    """

    stages: tuple[Stage, ...]
    untrained: frozenset[str] = frozenset()

    @property
    def stage_of(self) -> dict[str, int]:
        return {name: j for j, stage in enumerate(self.stages) for name in stage.parameters}

    @property
    def trained(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple(n for n in stage.parameters if n not in self.untrained) for stage in self.stages
        )

    @property
    def relayed(self) -> tuple[int, ...]:
        """Return the stages that hold buffers which training changes."""
        return tuple(j for j, stage in enumerate(self.stages) if stage.buffers)

    def training(self, names: Iterable[str]) -> Self:
        """Return the map with some parameters trained that were frozen; begins stay as they are.

        Args:
            names: of the parameters; those that are trained already change nothing.

        Raises:
            PlanError: nobody knows the stage of one.
        """
        known = self.stage_of
        asked = {n: None for n in names if n not in known}
        frozen = {n for stage in self.stages for n in stage.frozen}
        unknown = next((n for n in asked if n not in frozen), None)
        if unknown is not None:
            raise PlanError(
                f"parameter {unknown!r} is trained now, but it was no part of the module when the "
                "stages were found; allowed: parameters that were there in the first step; "
                "freeze and unfreeze them, or call fit once per phase"
            )
        return type(self)(tuple(_thawed(stage, asked) for stage in self.stages))

    def relaying(self, buffers: Iterable[tuple[str, str]]) -> Self:
        """Return the map with more buffers that travel; nobody knows where they change last.

        Args:
            buffers: path of a module, and name of a buffer of it.
        """
        known = {name for stage in self.stages for name in stage.buffers}
        homes = {name.rpartition(".")[0]: j for name, j in self.stage_of.items()}
        new = [(homes.get(path, 0), name) for path, name in buffers if name not in known]
        last, stages = len(self.stages) - 1, list(self.stages)
        for j, name in new:
            others = stages[j].buffers
            stages[j] = replace(stages[j], buffers=(*others, name), buffers_final_after=last)
        return replace(self, stages=tuple(stages))

    def holding(self, names: Iterable[str], trained: Container[str]) -> Self:
        """Return the map with all parameters in stages, of which some are trained."""
        held = dict.fromkeys(names)
        untrained = frozenset(n for n in held if n not in trained)
        return replace(self.training(held), untrained=untrained)

    def as_data(self) -> list[dict[str, Any]]:
        return [asdict(stage) for stage in self.stages]

    @classmethod
    def from_data(cls, data: Sequence[Mapping[str, Any]]) -> Self:
        return cls(
            tuple(
                Stage(
                    start=d["start"],
                    parameters=tuple(d["parameters"]),
                    glue=tuple(d["glue"]),
                    buffers=tuple(d["buffers"]),
                    buffers_final_after=d["buffers_final_after"],
                    frozen=tuple(d.get("frozen", ())),  # of older checkpoints nobody knows
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
        begins = profile.begins
        if stages > len(begins):
            raise PlanError(
                f"stages={stages} were asked for, but the module has only {len(begins)} places "
                "where a stage with trained parameters can begin; "
                f"allowed: 1 to {len(begins)}; "
                f'lower it, or leave stages="auto"'
            )
        parts = zip(begins, [*begins[1:], len(units)], strict=True)
        names = ([n for unit in units[a:b] for n in unit.parameters] for a, b in parts)
        weights = [max(1, sum(num_bytes[n] for n in part)) for part in names]
        starts = [begins[k] for k in balance(weights, stages)]
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
        frozen = [n for unit in members for n in unit.frozen]
        if j == 0:
            names += profile.unused
            frozen += profile.resting
        glue = tuple(n for unit in members for n in unit.glue)
        made.append(
            Stage(start=paths[j], parameters=tuple(names), glue=glue, frozen=tuple(frozen))
        )
    return StageMap(_with_buffers(made, profile.buffers, starts))


def _thawed(stage: Stage, names: Collection[str]) -> Stage:
    mine = tuple(n for n in stage.frozen if n in names)
    rest = tuple(n for n in stage.frozen if n not in names)
    return replace(stage, parameters=stage.parameters + mine, frozen=rest)


def _with_buffers(
    stages: Sequence[Stage], buffers: Mapping[str, tuple[int, int]], starts: Sequence[int]
) -> tuple[Stage, ...]:
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
