"""Presets: the names of plans, their axis values, and what is asked of numbers.

A preset names four axis values; any of them, and any number, can be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, NamedTuple, final

from lightning_cyclic.errors import PlanError, one_of
from lightning_cyclic.plan.orders import (
    DualPipeV,
    GPipe,
    Interleaved,
    OneFOneB,
    ZeroBubbleH1,
    ZeroBubbleV,
)
from lightning_cyclic.plan.placement import (
    AbstractPlacement,
    AbstractSharding,
    FullSharding,
    NoSharding,
    OptimizerSharding,
    Pipelined,
    Replicated,
    Shared,
    Single,
)
from lightning_cyclic.plan.schedules import TWO_SLOTS, AbstractSchedule, Cyclic, Lockstep
from lightning_cyclic.plan.weights import (
    AbstractWeights,
    Delayed,
    Freshest,
    LocalSteps,
    Predicted,
    Stashed,
    Sync,
)

SCHEDULES: Final[dict[str, type[AbstractSchedule]]] = {
    "lockstep": Lockstep,
    "cyclic": Cyclic,
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "interleaved_1f1b": Interleaved,
    "zb_h1": ZeroBubbleH1,
    "zb_v": ZeroBubbleV,
    "dualpipe_v": DualPipeV,
}
PLACEMENTS: Final[dict[str, type[AbstractPlacement]]] = {
    "replicated": Replicated,
    "pipelined": Pipelined,
    "shared": Shared,
    "single": Single,
}
WEIGHTS: Final[dict[str, type[AbstractWeights]]] = {
    "sync": Sync,
    "delayed": Delayed,
    "freshest": Freshest,
    "stashed": Stashed,
    "predicted": Predicted,
    "local": LocalSteps,
}
SHARDINGS: Final[dict[str, type[AbstractSharding]]] = {
    "none": NoSharding,
    "optimizer": OptimizerSharding,
    "full": FullSharding,
}
AXES: Final[dict[str, dict[str, type[Any]]]] = {
    "schedule": SCHEDULES,
    "placement": PLACEMENTS,
    "weights": WEIGHTS,
    "sharding": SHARDINGS,
}


@final
@dataclass(frozen=True, slots=True)
class Preset:
    """Hold the four axis values that a strategy name stands for, and where they come from.

    ``round_trips`` says that predicted weights look further ahead than to their own backward: to
    the moment at which the micro-batch's round trip ends on stage 0, where all stages meet. A
    forward counts as long as a backward, and backwards predict, too. ``local`` has the numbers
    that ``weights="local"`` stands for.
    """

    schedule: str
    placement: str
    weights: str
    sharding: str
    source: str
    round_trips: bool = False
    local: LocalSteps = LocalSteps()


PRESETS: Final[dict[str, Preset]] = {
    "cyclic_dp": Preset(
        "cyclic", "replicated", "freshest", "optimizer", "CDP-v2, arXiv 2403.08837"
    ),
    # All stages have the same first reader under delayed weights, so "optimizer" would shard
    # nothing; the last worker holds every total already, and owning them saves a hop.
    "cyclic_dp_v1": Preset("cyclic", "replicated", "delayed", "none", "CDP-v1, arXiv 2403.08837"),
    "cyclic_zero": Preset(
        "cyclic", "replicated", "freshest", "full", "CDP in ZeRO-DP, arXiv 2403.08837"
    ),
    "1f1b": Preset("1f1b", "pipelined", "sync", "none", "PipeDream-Flush, arXiv 2006.09503"),
    "gpipe": Preset("gpipe", "pipelined", "sync", "none", "GPipe, arXiv 1811.06965"),
    "interleaved_1f1b": Preset(
        "interleaved_1f1b", "pipelined", "sync", "none", "interleaved 1F1B, arXiv 2104.04473"
    ),
    "zb_h1": Preset("zb_h1", "pipelined", "sync", "none", "zero bubble H1, arXiv 2401.10241"),
    "zb_v": Preset("zb_v", "pipelined", "sync", "none", "zero bubble V, arXiv 2405.15362"),
    "dualpipe_v": Preset(
        "dualpipe_v", "pipelined", "sync", "none", "V-shaped DualPipe, arXiv 2412.19437"
    ),
    "cyclic_mp": Preset(
        "cyclic", "shared", "freshest", "none", "CDP with model parallelism, arXiv 2403.08837"
    ),
    "cyclic_pipeline": Preset(
        "cyclic", "pipelined", "freshest", "none", "CDP as a pipeline, arXiv 2403.08837"
    ),
    "pipedream": Preset("cyclic", "pipelined", "stashed", "none", "PipeDream, SOSP 2019"),
    "pipedream_2bw": Preset(
        "cyclic", "pipelined", "delayed", "none", "PipeDream-2BW, arXiv 2006.09503"
    ),
    "pipeoptim": Preset("cyclic", "pipelined", "predicted", "none", "PipeOptim, arXiv 2312.00839"),
    "spectrain": Preset(
        "cyclic",
        "pipelined",
        "predicted",
        "none",
        "SpecTrain, arXiv 1809.02839",
        round_trips=True,
    ),
    "lockstep_dp": Preset(
        "lockstep", "replicated", "sync", "optimizer", "plain data parallelism, for parity"
    ),
    "diloco": Preset("lockstep", "replicated", "local", "none", "DiLoCo, arXiv 2311.08105"),
    "streaming_diloco": Preset(
        "lockstep",
        "replicated",
        "local",
        "none",
        "Streaming DiLoCo, arXiv 2501.18512",
        local=LocalSteps(in_turn=True),
    ),
}


class Axes(NamedTuple):
    """Hold the axis values of a plan as the objects that decide."""

    schedule: AbstractSchedule
    placement: AbstractPlacement
    weights: AbstractWeights
    sharding: AbstractSharding


def axes_of(preset: str) -> dict[str, Any]:
    """Return the axis values of a preset, by axis."""
    return {axis: getattr(PRESETS[preset], axis) for axis in AXES}


def nearest(axes: Mapping[str, Any], presets: Sequence[str]) -> str:
    """Choose the preset that has most of some axis values; of local steps, in turn or not."""
    rule = axes["weights"]

    def alike(name: str) -> int:
        values, local = axes_of(name), PRESETS[name].local
        if isinstance(rule, LocalSteps) and rule.in_turn is local.in_turn:
            values["weights"] = rule if WEIGHTS[values["weights"]].is_local else ""
        return sum(values[axis] == axes[axis] for axis in AXES)

    return max(presets, key=alike)


def chosen_axes(preset: Preset, given: dict[str, str | None]) -> dict[str, str]:
    """Fill in the preset's axis values, and refuse unknown ones."""
    axes = {name: value or getattr(preset, name) for name, value in given.items()}
    if given["sharding"] is None and axes["placement"] != "replicated":
        axes["sharding"] = "none"  # a stage without replicas has nothing to shard
    for name, value in axes.items():
        if value not in AXES[name]:
            hint = f'use {name}="{getattr(preset, name)}"'
            raise PlanError(one_of(value, list(AXES[name]), name, hint))
    return axes


def local_steps(preset: Preset, axes: dict[str, str]) -> LocalSteps | None:
    """Return the numbers of ``weights="local"``, where a plan has it, and nobody gives others."""
    return preset.local if WEIGHTS[axes["weights"]].is_local else None


def check_number(name: str, value: object, *, least: int = 1) -> None:
    """Refuse what is not a whole number from ``least`` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(
            f"{name}={value!r}; allowed: whole numbers from {least} on; use {name}={least} or more"
        )


def check_group_size(group_size: int, num_workers: int) -> None:
    """Refuse groups that would not have as many workers each."""
    check_number("group_size", group_size)
    if num_workers % group_size:
        allowed = [n for n in range(1, num_workers + 1) if num_workers % n == 0]
        nearest = max(n for n in allowed if n <= group_size)
        raise PlanError(
            f"group_size={group_size} with {num_workers} workers; all groups have as many "
            "workers, "
            f"so allowed: {', '.join(map(str, allowed))}; use group_size={nearest}"
        )


def schedules_of(placement: str) -> list[str]:
    """List the schedules under which a placement gives no worker two actions where one fits."""
    return [name for name, schedule in SCHEDULES.items() if placement in schedule.placements]


def presets_of(*placements: str) -> tuple[str, ...]:
    """List the presets that place stages so, the plainest first."""
    return tuple(name for name, preset in PRESETS.items() if preset.placement in placements)


def default_num_stages(schedule: str, depth: int) -> int:
    """Give the stages of a pipeline whose replicas have so many workers."""
    return max(1, depth) * SCHEDULES[schedule].stages_per_worker


def plausible_depth(schedule: str, num_stages: int) -> int:
    """Give workers of a replica that can share so many stages under a schedule: two, if they can.

    Example:
        >>> [plausible_depth(name, 8) for name in ("1f1b", "interleaved_1f1b", "zb_v")]
        [2, 2, 4]
    """
    rule = SCHEDULES[schedule]
    if rule.shape == "vee":  # of which each has as many, and no others
        return max(1, num_stages // rule.stages_per_worker)
    return 1 if num_stages % 2 else 2


def default_num_micro(axes: dict[str, str], num_stages: int, num_workers: int) -> int:
    """Give the micro-batches per update of one replica."""
    if PLACEMENTS[axes["placement"]].runs_whole_micro:
        return num_workers
    return 1 if WEIGHTS[axes["weights"]].per_micro else num_stages


def default_spacing(preset: Preset, axes: dict[str, str], num_stages: int, each: int) -> Fraction:
    """Choose the delay that keeps every worker busy: of whole micro-batches, or of stages.

    Args:
        preset: whose placement one worker alone is the reference for.
        axes: which values the axes have.
        num_stages: S.
        each: micro-batches that run one delay behind the other until the first worker is free.
    """
    # one worker alone follows the timetable of the placement that it is the reference for
    followed = preset.placement if axes["placement"] == "single" else axes["placement"]
    if PLACEMENTS[followed].runs_whole_micro:
        return Fraction(2 * num_stages, each)
    return TWO_SLOTS
