"""Names of the strategies: those of presets, with the launcher variants that DDP has.

Imports neither torch nor lightning: what is registered is a small factory that imports the
strategy only when a Trainer asks for the name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import PRESETS

if TYPE_CHECKING:
    from lightning_cyclic.plugin.strategy import PlannedStrategy

_DEPARTED = {"weipipe": "weipipe", "xpipe": "xpipe", "cyclic_auto": "auto"}  # names -> presets:
# who asks for these is told what to do instead
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def make_strategy(preset: str = "cyclic_dp", **options: Any) -> PlannedStrategy:
    """Make the strategy that has a preset.

    Args:
        preset: its name.
        **options: of CyclicStrategy where workers run whole micro-batches, else of
            PipelineStrategy.
    """
    import lightning_cyclic  # noqa: PLC0415  (torch only when used)

    runs_whole = preset not in PRESETS or PRESETS[preset].placement == "replicated"
    door = lightning_cyclic.CyclicStrategy if runs_whole else lightning_cyclic.PipelineStrategy
    made: PlannedStrategy = door(preset, **options)
    return made


def refuse_strategy(*, preset: str, **kwargs: Any) -> NoReturn:
    """Say that the Trainer is the other package's.

    Raises:
        ConfigurationError: always.
    """
    raise _of_other_copy(f"strategy {preset!r}")


def refuse_instances(kind: Any) -> None:
    """Let the other package's check of what is a strategy say which package is meant.

    Args:
        kind: its ``Strategy``, an abstract base class, whose hook for that is free.
    """

    def refuse(cls: type, given: type) -> Any:
        if given.__module__.startswith("lightning_cyclic."):
            raise _of_other_copy(f"{given.__name__}(...)")
        return NotImplemented

    kind.__subclasshook__ = classmethod(refuse)


def _of_other_copy(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} was asked of a Trainer of `pytorch_lightning`, a second copy of Lightning with "
        "classes of its own; allowed: the Trainer of `lightning`; use "
        "`from lightning.pytorch import Trainer, LightningModule`"
    )


def register(registry: Any, make: Callable[..., Any] = make_strategy) -> None:
    """Register every preset and its variants; registering again changes nothing.

    Args:
        registry: Lightning's ``StrategyRegistry``.
        make: what a name stands for, called with ``preset`` and ``start_method``.
    """
    for name, preset in (dict(zip(PRESETS, PRESETS, strict=True)) | _DEPARTED).items():
        for suffix, start_method in _START_METHODS.items():
            registry.register(
                f"{name}{suffix}",
                make,
                description=f"lightning_cyclic preset {preset!r}, started by {start_method}",
                override=True,
                preset=preset,
                start_method=start_method,
            )
