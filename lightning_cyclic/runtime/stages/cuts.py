"""Where the stages of a module begin: the best places, or those that the user names.

seconds    3 . 1 . 1 . 2 . 5        dots: places where a stage can begin
3 stages   3 | 1   1   2 | 5        the slowest stage sets the pace of all
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

from torch import nn

from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.stages.best_places import best_places
from lightning_cyclic.runtime.stages.demands import Demands
from lightning_cyclic.runtime.stages.evidence import Survey, Use, is_metric
from lightning_cyclic.runtime.stages.named_places import named_places
from lightning_cyclic.runtime.stages.places import Balance, CutPoints, Place, split_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Hold the stages of a module.

    Args:
        starts: paths of the modules whose first calls begin stages 1, 2, ...
        split: paths of the modules within whose calls stages begin.
        parameters: by stage of first use, in order of use; unused ones where the module around
            them is called, if no stage begins within that call, else in stage 0.
        tied: names of parameters that several stages use -> these stages.
        buffers: names of all buffers, by the stage in which their module is first called; stage
            0 has those of modules that are not called.
        changed: names of the buffers that the step changed.
        repeated: those of them that code between modules uses, which all workers run up to their
            stage.
        metrics: path of each metric -> the stage that updates it; the last if none was seen to.
        written: names of the parameters that the step itself changed, and may.
    """

    starts: tuple[str, ...]
    split: frozenset[str]
    parameters: tuple[tuple[str, ...], ...]
    tied: dict[str, tuple[int, ...]]
    buffers: tuple[tuple[str, ...], ...]
    changed: frozenset[str]
    metrics: dict[str, int]
    repeated: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()

    @property
    def num_stages(self) -> int:
        """Return how many stages there are."""
        return len(self.starts) + 1

    @property
    def changing(self) -> dict[str, int]:
        """Return name -> stage, of parameters and of the buffers that the step changed."""
        return {
            n: j
            for j in range(self.num_stages)
            for n in (*self.parameters[j], *(b for b in self.buffers[j] if b in self.changed))
        }

    def refuse_early_metrics(self) -> None:
        """Refuse metrics of stages with which workers take turns: each would see a part.

        Raises:
            PlanError: with the first of them.
        """
        early = [path for path, j in self.metrics.items() if j < self.num_stages - 1]
        if early:
            raise PlanError(
                f"the metric {early[0]!r} is updated before the last stage, with which several "
                "workers take turns under placement 'shared'; allowed: metrics of the last stage; "
                "update it behind the last module of the step, or use another placement"
            )

    def as_data(self) -> dict[str, Any]:
        """Return plain data, for a checkpoint or a message."""
        return {
            "starts": list(self.starts),
            "split": sorted(self.split),
            "parameters": [list(names) for names in self.parameters],
            "tied": {name: list(stages) for name, stages in self.tied.items()},
            "buffers": [list(names) for names in self.buffers],
            "changed": sorted(self.changed),
            "metrics": dict(self.metrics),
            "repeated": sorted(self.repeated),
            "written": sorted(self.written),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Make the cuts from what :meth:`as_data` returned."""
        return cls(
            starts=tuple(data["starts"]),
            split=frozenset(data["split"]),
            parameters=tuple(tuple(names) for names in data["parameters"]),
            tied={name: tuple(stages) for name, stages in data["tied"].items()},
            buffers=tuple(tuple(names) for names in data["buffers"]),
            changed=frozenset(data["changed"]),
            metrics=dict(data["metrics"]),
            repeated=frozenset(data.get("repeated", ())),  # older checkpoints lack these
            written=frozenset(data.get("written", chain(*data["parameters"]))),  # any may be
        )


def whole(module: nn.Module) -> Cuts:
    """Return the one stage of a module that nobody looked into: what can change, does."""
    buffers = tuple(name for name, _ in module.named_buffers())
    return Cuts(
        starts=(),
        split=frozenset(),
        parameters=(tuple(name for name, _ in module.named_parameters()),),
        tied={},
        buffers=(buffers,),
        changed=frozenset(buffers),
        metrics={path: 0 for path, m in module.named_modules() if is_metric(m)},
    )


def choose_cuts(
    survey: Survey,
    stages: int | Sequence[str],
    *,
    memory_limit_bytes: int | None = None,
    balance: Balance = "time",
    demands: Demands | None = None,
) -> Cuts:
    """Choose where stages begin.

    A number asks for the places that make the slowest stage as fast as possible, exactly, by the
    surveyed times, or the one with most activations as small as possible. Places where a module's
    calls would be shared by stages are taken only if there are not enough others. Paths say where
    stages 1, 2, ... begin.

    Args:
        survey: of the module's step.
        stages: how many, or paths of modules.
        memory_limit_bytes: most bytes of parameters and activations, of one micro-batch, that
            a stage may have. [any number]
        balance: "time", which suits workers that wait for each other, or "activations", which
            suits one device.
        demands: of a plan with as many stages: then times include messages, and the limit is
            that of all that a worker keeps. [none]

    Returns:
        The stages.

    Raises:
        PlanError: too many stages, or too few for the memory; or a path where none can begin.
    """
    points = CutPoints(survey, balance)
    if isinstance(stages, int):
        places = best_places(points, stages, memory_limit_bytes, demands)
    else:
        places = named_places(points, [stages] if isinstance(stages, str) else stages)
    return _cuts(survey, places)


def _cuts(survey: Survey, places: Sequence[Place]) -> Cuts:
    ticks = [p.tick for p in places]
    count = len(places) + 1

    def stage_of(tick: int) -> int:
        return bisect_right(ticks, tick)

    split = split_by(places)
    called = {c.path: stage_of(c.begin) for c in reversed(survey.calls)}
    parameters: list[list[str]] = [[] for _ in range(count)]
    tied = {}
    in_order = sorted(survey.parameters, key=lambda name: _first(survey.parameters[name].uses))
    for name in in_order:
        users = sorted({stage_of(u.tick) for u in survey.parameters[name].uses})
        parameters[users[0] if users else _home(name, called, split)].append(name)
        if len(users) > 1:
            tied[name] = tuple(users)
    buffers: list[list[str]] = [[] for _ in range(count)]
    for name, tick in survey.buffers.items():
        buffers[0 if tick is None else stage_of(tick)].append(name)
    skipped = {c.path for c in survey.calls if c.is_unit} - split  # by workers of later stages
    return Cuts(
        starts=tuple(p.path for p in places),
        split=split,
        parameters=tuple(map(tuple, parameters)),
        tied=tied,
        buffers=tuple(map(tuple, buffers)),
        changed=frozenset(survey.changed),
        metrics={
            path: stage_of(updates[-1]) if updates else count - 1
            for path, updates in survey.metrics.items()
        },
        repeated=frozenset(n for n in survey.changed if not _is_inside(n, skipped)),
        written=frozenset(w.name for w in survey.written),
    )


def _home(name: str, called: Mapping[str, int], split: Collection[str]) -> int:
    """Return the stage of an unused parameter: that of the module that another step may call."""
    parts = name.split(".")[:-1]
    around = (".".join(parts[:k]) for k in range(len(parts), 0, -1))
    path = next((path for path in around if path in called), "")
    return called[path] if path and path not in split else 0


def _is_inside(name: str, paths: Collection[str]) -> bool:
    """Say whether a buffer is of a module with one of the paths, or of a module inside."""
    parts = name.split(".")
    return any(".".join(parts[:k]) in paths for k in range(1, len(parts)))


def _first(uses: tuple[Use, ...]) -> float:
    return uses[0].tick if uses else float("inf")
