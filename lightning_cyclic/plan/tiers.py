"""Tiers: what is in memory only while it is used, and lies where there is room at other times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Say how much of each stage comes when it is used, and goes behind it.

    Args:
        moved: bytes of its optimizer state that come for an update; 0 where all of it stays.
        kept: bytes of it that stay.
        weights: bytes in memory of its weights that come for each forward, backward and update.
            [all stay]
        away: bytes of these weights alone, without what chunks have besides. [as many]
        ahead: how many forwards, backwards and updates before its use what moves begins to come,
            and how many behind it until it has gone, so that the worker goes on meanwhile.
        early: whether stages are updated right behind their backwards, so that the gradients of
            one are gone when those of the next come; else behind all of the step. One worker
            alone may.
    """

    moved: tuple[int, ...]
    kept: tuple[int, ...]
    weights: tuple[int, ...] = ()
    away: tuple[int, ...] = ()
    ahead: int = 1
    early: bool = False

    def __post_init__(self) -> None:
        if not self.away:
            object.__setattr__(self, "away", self.weights)

    def moves_weights(self, j: int) -> bool:
        """Say whether weights of a stage come and go."""
        return bool(self.weights) and self.weights[j] > 0
