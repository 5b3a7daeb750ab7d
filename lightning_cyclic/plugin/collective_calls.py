"""Calls of torch.distributed in the user's code: refused where not all ranks come to them.

A collective in training_step would wait for ever where ranks run steps one behind the other, or
only some of their stages. It is seen in what all functions of torch.distributed ask first, by
whatever name the user's code knows them; messages of the package go by another way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.runtime.partial_step.ghosts import user_line

_ASKED_FIRST = (
    (c10d, "_rank_not_in_group"),  # by collectives
    (c10d, "_new_group_with_tag"),  # by new_group
    (functional, "_resolve_group"),
    (functional, "_resolve_group_name"),  # the same, in older versions of torch
)


_OURS = "lightning_cyclic.runtime"
_SEEN_THROUGH = (  # torch, and what is shown the functions that the user's code calls
    "torch.",
    *(f"{_OURS}.partial_step.{name}" for name in ("run", "watch", "plain_step", "ghosts")),
    *(f"{_OURS}.{name}" for name in ("whole_step.draws", "whole_step.engine", "absent")),
    *(f"{_OURS}.stages.{name}" for name in ("survey", "stage_map", "ledger")),
)


@contextmanager
def refusing_collectives(reductions: HeldReductions) -> Iterator[None]:
    """Refuse collectives, while the body runs, in code of the user's that keeps ranks apart."""
    usual = [(m, name, getattr(m, name)) for m, name in _ASKED_FIRST if hasattr(m, name)]
    for module, name, function in usual:
        setattr(module, name, _Asked(reductions, function))
    try:
        yield
    finally:
        for module, name, function in usual:
            setattr(module, name, function)


@final
class _Asked:
    """Be what a function of torch.distributed asks first."""

    def __init__(self, reductions: HeldReductions, usual: Any) -> None:
        self._reductions = reductions
        self._usual = usual

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._reductions.keeps_apart:
            name = sys._getframe(1).f_code.co_name
            if not name.startswith("get_") and not _is_ours(sys._getframe(1)):
                self._reductions.check_meeting(f"torch.distributed.{name} ({user_line()})")
        return self._usual(*args, **kwargs)


def _is_ours(frame: FrameType | None) -> bool:
    """Say whether it is the package that calls torch.distributed: what it agrees on, it may."""
    while frame is not None and _name_of(frame).startswith(_SEEN_THROUGH):
        frame = frame.f_back
    return frame is not None and _name_of(frame).startswith("lightning_cyclic.")


def _name_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
