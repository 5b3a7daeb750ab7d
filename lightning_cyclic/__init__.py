"""Delay-tolerant and memory-lean parallel training of unmodified LightningModules.

Importing the package registers its strategies by name, as soon as Lightning is imported too::

    import lightning_cyclic
    Trainer(strategy="cyclic_dp", accelerator="cpu", devices=2)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_cyclic._autoload import register_when_lightning_is_imported

if TYPE_CHECKING:
    from lightning_cyclic.cyclic_strategy import CyclicStrategy
    from lightning_cyclic.errors import (
        ActionSyntaxError,
        ConfigurationError,
        CyclicError,
        PeerError,
        PlanError,
        StepError,
        ValidationError,
        VerificationError,
        WaitTimeoutError,
    )
    from lightning_cyclic.pipeline_strategy import PipelineStrategy
    from lightning_cyclic.plan import PRESETS, LocalSteps, Plan, make_plan
    from lightning_cyclic.plugin.callbacks.early_bird import EarlyBirdPruning
    from lightning_cyclic.plugin.callbacks.gradient_norms import GradientNorms
    from lightning_cyclic.plugin.callbacks.low_rank import LowRankGradients
    from lightning_cyclic.plugin.callbacks.memory_timeline import MemoryTimeline
    from lightning_cyclic.plugin.precision.sparse_state import SparseStatePrecision
    from lightning_cyclic.runtime.codecs.base import AbstractCodec
    from lightning_cyclic.runtime.codecs.power_sgd import PowerSgd
    from lightning_cyclic.runtime.codecs.sparse import Dct, TopK

__all__ = [
    "PRESETS",
    "AbstractCodec",
    "ActionSyntaxError",
    "ConfigurationError",
    "CyclicError",
    "CyclicStrategy",
    "Dct",
    "EarlyBirdPruning",
    "GradientNorms",
    "LocalSteps",
    "LowRankGradients",
    "MemoryTimeline",
    "PeerError",
    "PipelineStrategy",
    "Plan",
    "PlanError",
    "PowerSgd",
    "SparseStatePrecision",
    "StepError",
    "TopK",
    "ValidationError",
    "VerificationError",
    "WaitTimeoutError",
    "make_plan",
]

# Torch loads this package while it is itself being imported (entry point "torch.backends"), and
# the planning floors start without torch: so every name is imported when it is first asked for.
_HOMES = {
    "PRESETS": "plan",
    "LocalSteps": "plan",
    "Plan": "plan",
    "make_plan": "plan",
    "CyclicStrategy": "cyclic_strategy",
    "PipelineStrategy": "pipeline_strategy",
    "EarlyBirdPruning": "plugin.callbacks.early_bird",
    "GradientNorms": "plugin.callbacks.gradient_norms",
    "LowRankGradients": "plugin.callbacks.low_rank",
    "MemoryTimeline": "plugin.callbacks.memory_timeline",
    "SparseStatePrecision": "plugin.precision.sparse_state",
    "AbstractCodec": "runtime.codecs.base",
    "Dct": "runtime.codecs.sparse",
    "PowerSgd": "runtime.codecs.power_sgd",
    "TopK": "runtime.codecs.sparse",
} | {name: "errors" for name in __all__ if name.endswith("Error")}

register_when_lightning_is_imported()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("lightning-cyclic")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
