"""Names of the strategies: every preset, with the launcher variants that DDP has.

Imports neither torch nor lightning: what is registered is a small factory that imports the
strategy only when a Trainer asks for the name.
"""

from __future__ import annotations

from typing import Any

from lightning_cyclic.plan import PRESETS

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def make_strategy(**kwargs: Any) -> Any:
    """Build the strategy that a registered name stands for."""
    from lightning_cyclic.strategy import CyclicStrategy  # noqa: PLC0415  (torch only when used)

    return CyclicStrategy(**kwargs)


def register(registry: Any) -> None:
    """Register every preset and its variants; registering again changes nothing.

    Args:
        registry: Lightning's ``StrategyRegistry``.
    """
    for preset in PRESETS:
        for suffix, start_method in _START_METHODS.items():
            registry.register(
                f"{preset}{suffix}",
                make_strategy,
                description=f"lightning_cyclic preset {preset!r}, started by {start_method}",
                override=True,
                preset=preset,
                start_method=start_method,
            )
