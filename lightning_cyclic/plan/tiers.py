"""Tiers: what is in memory only while it is used, and lies where there is room at other times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Say how much optimizer state of each stage comes for an update, and goes behind it.

    Args:
        moved: bytes of each stage that come and go; 0 where all of it stays.
        kept: bytes of each stage that stay.
        ahead: how many forwards, backwards and updates before an update its state begins to come,
            and how many behind it until it has gone, so that the worker goes on meanwhile.
        early: whether stages are updated right behind their backwards, so that the gradients of
            one are gone when those of the next come; else behind all of the step. One worker
            alone may.
    """

    moved: tuple[int, ...]
    kept: tuple[int, ...]
    ahead: int = 1
    early: bool = False
