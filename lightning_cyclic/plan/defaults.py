"""Defaults: what a plan has where nothing else is asked for, and which numbers and names it takes.

A preset names four axis values; any of them, and any number, can be replaced.
"""

from __future__ import annotations

from fractions import Fraction

from lightning_cyclic.errors import PlanError, one_of
from lightning_cyclic.plan.presets import AXES, PLACEMENTS, PRESETS, WEIGHTS, Preset
from lightning_cyclic.plan.schedules.base import TWO_SLOTS


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


def check_number(name: str, value: object, *, least: int = 1) -> None:
    """Refuse what is not a whole number from ``least`` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(
            f"{name}={value!r}; allowed: whole numbers from {least} on; use {name}={least} or more"
        )


def default_num_micro(preset: str, axes: dict[str, str], num_stages: int, num_workers: int) -> int:
    """Give the micro-batches per update of one replica."""
    if PLACEMENTS[axes["placement"]].runs_whole_micro:
        return num_workers
    horizons = PRESETS[preset].horizons
    if horizons is not None and horizons.once_a_step:
        return num_stages
    return 1 if WEIGHTS[axes["weights"]].per_micro else num_stages


def default_spacing(preset: Preset, placement: str, num_stages: int, num_micro: int) -> Fraction:
    """Choose the delay that keeps every worker busy: of whole micro-batches, or of stages."""
    # one worker alone follows the timetable of the placement that it is the reference for
    followed = preset.placement if placement == "single" else placement
    if PLACEMENTS[followed].runs_whole_micro:
        return Fraction(2 * num_stages, num_micro)
    return TWO_SLOTS
