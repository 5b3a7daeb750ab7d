"""Names of the strategies: those of presets, with the launcher variants that DDP has.

Imports neither torch nor lightning: what is registered is a small factory that imports the
strategy only when a Trainer asks for the name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_cyclic import compat
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


def make_for(host: str, **options: Any) -> PlannedStrategy:
    """Make the strategy that a Trainer of a host asks for by name.

    Raises:
        ConfigurationError: this process trains with the other host.
    """
    compat.use_host(host)
    return make_strategy(**options)


def refuse_instances(kind: Any, asking: str) -> None:
    """Let a host's check of what is a strategy say that ours is made for the other one.

    Args:
        kind: its ``Strategy``, an abstract base class, whose hook for that is free.
        asking: name of the host.
    """

    def refuse(cls: type, given: type) -> Any:
        if given.__module__.startswith("lightning_cyclic.") and compat.host() != asking:
            raise compat.of_other_host(f"{given.__name__}(...)", asking)
        return NotImplemented

    kind.__subclasshook__ = classmethod(refuse)


def register(registry: Any, host: str) -> None:
    """Register every preset and its variants; registering again changes nothing.

    Args:
        registry: the host's ``StrategyRegistry``.
        host: its name.
    """
    for name, preset in (dict(zip(PRESETS, PRESETS, strict=True)) | _DEPARTED).items():
        for suffix, start_method in _START_METHODS.items():
            registry.register(
                f"{name}{suffix}",
                make_for,
                description=f"lightning_cyclic preset {preset!r}, started by {start_method}",
                override=True,
                host=host,
                preset=preset,
                start_method=start_method,
            )
