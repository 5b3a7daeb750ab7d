"""What a run refuses, and how the errors name it: the user's line, and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.partial_step.ghosts import user_line


def refuse_begin(path: str, stage: int, region: int) -> NoReturn:
    """Refuse a stage that begins before the one ahead of it."""
    raise StepError(
        f"stage {stage} begins ({path!r}, {user_line()}) before stage {region + 1}; allowed: the "
        "order in which the stages were found; name module paths in the order of their calls, "
        "stages=[...]"
    )


def refuse_home(path: str, stages: Sequence[int], region: int, beside: str) -> NoReturn:
    """Refuse a call of a module in a stage that does not have it."""
    what = f"module {path!r}, whose parameters or buffers belong to stage {list(stages)}"
    if beside:
        near = beside.rpartition(".")[0]
        raise StepError(
            f"{what}, is called in stage {region} at {user_line()}; it was not used in the first "
            f"micro-batch, so that it went with {beside!r}, which is defined beside it; allowed: "
            f"one stage for both; begin stage {region} at {near!r} or before, "
            "stages=[...], or let __init__ define it behind a module of stage "
            f"{region}"
        )
    raise StepError(
        f"{what}, is called in stage "
        f"{region} at {user_line()}; allowed: calls in the order in which the stages were found; "
        "keep all its calls in one stage, stages=[...]"
    )


def refuse_read(region: int, target: int) -> NoReturn:
    """Refuse to read a value that another worker has."""
    raise StepError(
        f"{user_line()} reads a value of stage {region}, which the worker of stage {target} does "
        "not have; allowed: values of the last stage, and of the batch; let no stage begin behind "
        "that line, stages=[...]; `lightning-cyclic doctor` lists the places that "
        "work"
    )


def refuse_path(name: str, expected: str | None, region: int, target: int) -> NoReturn:
    """Refuse another way than the region's own worker took; None is its end."""
    there = expected or "the stage's end"
    raise StepError(
        f"the step took another way on the worker of stage {target} than on that of stage "
        f"{region}: {name} at {user_line()} where {there} was; allowed: "
        "control flow that depends on the batch and on shapes alone; keep what decides it and "
        "what follows in one stage, stages=[...]"
    )


def refuse_end(starts: Sequence[str], region: int, target: int, *, gave_nothing: bool) -> NoReturn:
    """Refuse a step that ended before the stage did."""
    if gave_nothing:
        raise StepError(
            f"the step returned None before {starts[region]!r} was called, with which stage "
            f"{region + 1} begins; allowed: steps that pass all stages, each time; to skip a "
            "batch, return 0 * loss; or begin the stage elsewhere, stages=[...]"
        )
    if region < target:
        raise StepError(
            f"stage {region + 1} never began: {starts[region]!r} was not called; allowed: steps "
            "that call the first module of every stage; begin the stage elsewhere, "
            "stages=[...]"
        )
    raise StepError(
        f"stage {target} never ended: {starts[target]!r} was not called; allowed: steps that call "
        "the first module of every stage; begin the next stage elsewhere, "
        "stages=[...]"
    )
