"""Delay-tolerant and memory-lean parallel training of unmodified LightningModules.

Importing the package registers its strategies by name, as soon as Lightning is imported too::

    import lightning_cyclic
    Trainer(strategy="cyclic_dp", accelerator="cpu", devices=2)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_cyclic._autoload import register_when_lightning_is_imported
from lightning_cyclic.errors import (
    ActionSyntaxError,
    ConfigurationError,
    CyclicError,
    PeerError,
    PlanError,
    StepError,
    ValidationError,
    WaitTimeoutError,
)
from lightning_cyclic.plan import PRESETS, Plan, make_plan

if TYPE_CHECKING:
    from lightning_cyclic.strategy import CyclicStrategy

__all__ = [
    "PRESETS",
    "ActionSyntaxError",
    "ConfigurationError",
    "CyclicError",
    "CyclicStrategy",
    "PeerError",
    "Plan",
    "PlanError",
    "StepError",
    "ValidationError",
    "WaitTimeoutError",
    "make_plan",
]

register_when_lightning_is_imported()


def __getattr__(name: str) -> Any:
    # torch and lightning are imported only by those who ask for the strategy
    if name == "CyclicStrategy":
        from lightning_cyclic.strategy import CyclicStrategy  # noqa: PLC0415

        return CyclicStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
