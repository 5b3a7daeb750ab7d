"""Where the stages of a module begin: the best places, or those that the user names.

seconds    3 . 1 . 1 . 2 . 5        dots: places where a stage can begin
3 stages   3 | 1   1   2 | 5        the slowest stage sets the pace of all
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

from torch import nn

from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.stages.best_places import Demands, best_places
from lightning_cyclic.runtime.stages.evidence import Survey, Use, Written, is_inside, is_metric
from lightning_cyclic.runtime.stages.places import (
    Balance,
    CutPoints,
    Place,
    named_places,
    split_by,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Hold the stages of a module.

    Args:
        starts: paths of the modules whose first calls begin stages 1, 2, ...
        split: paths of the modules within whose calls stages begin.
        parameters: by stage of first use, in order of use; those that are not used are where the
            ones beside them are.
        tied: names of parameters that several stages use -> these stages.
        buffers: names of all buffers, by the stage in which they are first used; stage 0 has
            those that are not, but those of modules with parameters are where these are.
        changed: names of the buffers that the step changed, or later ones may, as they call
            modules that it did not.
        repeated: those of them that code between modules changes by the batch alone, which all
            workers run up to their stage.
        exposed: those that code between modules uses, and that their own stage alone changes.
        stateful: paths of the modules that are units for their buffers alone (evidence.py).
        unused: names of the parameters that the step did not use -> the ones beside them.
        metrics: path of each metric -> the stage that updates it; the last if none was seen to.
        written: names of the parameters that the step itself changed, and may.
        times: paths of modules with parameters -> ns of a call of theirs, by the survey's clock.
        kept: bytes of activations of each stage, and of what it is sent, for a micro-batch.
            [nobody has counted]
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
    exposed: frozenset[str] = frozenset()
    stateful: frozenset[str] = frozenset()
    unused: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    kept: tuple[tuple[int, int], ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.starts) + 1

    @property
    def stage_of(self) -> dict[str, int]:
        """Return name -> stage, of parameters."""
        return {n: j for j, names in enumerate(self.parameters) for n in names}

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
            "exposed": sorted(self.exposed),
            "stateful": sorted(self.stateful),
            "unused": dict(self.unused),
            "times": dict(self.times),
            "kept": [list(each) for each in self.kept],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
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
            exposed=frozenset(data.get("exposed", ())),
            stateful=frozenset(data.get("stateful", ())),
            unused=dict(data.get("unused", {})),
            times=dict(data.get("times", {})),
            kept=tuple((made, sent) for made, sent in data.get("kept", ())),
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

    parameters: list[list[str]] = [[] for _ in range(count)]
    tied = {}
    in_order = sorted(survey.parameters, key=lambda name: _first(survey.parameters[name].uses))
    for name in in_order:
        users = sorted({stage_of(u.tick) for u in survey.parameters[name].uses})
        parameters[users[0] if users else stage_of(_tick_beside(survey, name))].append(name)
        if len(users) > 1:
            tied[name] = tuple(users)
    buffers: list[list[str]] = [[] for _ in range(count)]
    later = _may_change(survey)
    for name, first in survey.buffers.items():
        tick = _tick_beside(survey, name) if name in later else first or 0
        buffers[stage_of(tick)].append(name)
    split = split_by(places)
    skipped = {c.path for c in survey.calls if c.is_unit} - split  # by workers of later stages
    glue = {n: m for n, m in survey.changed.items() if not is_inside(m.within, skipped)}
    repeated = {n for n, m in glue.items() if m.units <= split and not m.by_derived}
    return Cuts(
        starts=tuple(p.path for p in places),
        split=split,
        parameters=tuple(map(tuple, parameters)),
        tied=tied,
        buffers=tuple(map(tuple, buffers)),
        changed=later | survey.changed.keys(),
        metrics={
            path: stage_of(updates[-1]) if updates else count - 1
            for path, updates in survey.metrics.items()
        },
        repeated=frozenset(repeated),
        written=frozenset(w.name for w in survey.written),
        exposed=frozenset(glue.keys() - repeated),
        stateful=survey.stateful,
        unused={n: survey.beside(n) or "" for n, h in survey.parameters.items() if not h.uses},
        times=_times(survey),
    )


def _times(survey: Survey) -> dict[str, int]:
    """Return the mean time of a unit's calls."""
    found: dict[str, list[int]] = {}
    for call in survey.calls:
        if call.is_unit:
            found.setdefault(call.path, []).append(call.end_ns - call.begin_ns)
    return {path: sum(each) // len(each) for path, each in found.items()}


def _tick_beside(survey: Survey, name: str) -> int:
    """Return when what is defined beside an unused parameter or buffer is used; 0: nothing is."""
    uses = survey.uses_beside(name)
    return uses[0].tick if uses else 0


def _may_change(survey: Survey) -> frozenset[str]:
    """Return the names of the buffers of modules with parameters that the step did not call."""
    parts = (n.split(".") for n in survey.parameters)
    having = {".".join(p[:k]) for p in parts for k in range(1, len(p))}
    uncalled = having - {c.path for c in survey.calls}
    return frozenset(
        n for n, tick in survey.buffers.items() if tick is None and is_inside(n, uncalled)
    )


def _first(uses: tuple[Use, ...]) -> float:
    return uses[0].tick if uses else float("inf")


def refuse_written(survey: Survey, *, keeps_order: bool) -> None:
    """Refuse changes that would not be those of one device, wherever stages begin.

    Args:
        survey: of the step.
        keeps_order: whether forwards meet the weights as on one device: in one version, once for
            each micro-batch.

    Raises:
        PlanError: with the parameter.
    """
    for written in survey.written:
        if not (keeps_order and _is_within_its_module(written, survey)):
            raise PlanError(
                f"training_step changes parameter {written.name!r} ({written.at.line}) in its "
                "forward, but ranks have several versions or copies of it, which the change does "
                "not reach in the order of one device; allowed: weights that the optimizer alone "
                "changes; change them in the optimizer's step(), keep what moves in a buffer, or "
                "use strategy='ddp'"
            )


def _is_within_its_module(written: Written, survey: Survey) -> bool:
    """Say whether a parameter is changed in place, and used, by a module that no stage divides.

    Autograd refuses such a change of what a backward still needs; through ``.data`` it sees none.
    """
    owner = written.name.rpartition(".")[0]

    def is_inside(call: int | None) -> bool:
        return owner != "" and owner in {c.path for c in survey.around(call)}

    uses = [written.at, *survey.parameters[written.name].uses]
    parts = [c for c in survey.calls if c.is_unit and c.path.startswith(f"{owner}.")]
    return written.itself and not parts and all(is_inside(use.call) for use in uses)
