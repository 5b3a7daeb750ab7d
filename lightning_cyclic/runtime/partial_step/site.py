"""The site: an unmodified module, prepared so that its step can be run one stage at a time.

While the site is open, calls of modules that have parameters pass through it, so that a run may
skip them or end at one. Nothing of the module's code or class changes, and behind the opening it
is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from lightning_cyclic.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_cyclic.runtime.partial_step.run import Run
    from lightning_cyclic.runtime.stages.cuts import Cuts

_CALL = "forward"  # inside hooks, which run whether the forward is skipped or not


@final
class Site:
    """Route a module's calls to the run that is under way.

    Args:
        module: the whole module.
        cuts: where its stages begin.
        device: of this worker.
    """

    def __init__(self, module: nn.Module, cuts: Cuts, device: torch.device) -> None:
        self.module = module
        self.cuts = cuts
        self.device = device
        self.run: Run | None = None
        self.begins = {path: j for j, path in enumerate(cuts.starts, start=1)}
        self.num_stages = len(cuts.starts) + 1
        self._stages_of_unit = _stages_of_units(module, cuts)
        self._doors = list(self._make_doors())

    @contextmanager
    def open(self) -> Iterator[None]:
        """Route calls while the body runs."""
        for owner, name, door, _ in self._doors:
            owner.__dict__[name] = door
        try:
            yield
        finally:
            for owner, name, _, before in self._doors:
                if before is None:
                    owner.__dict__.pop(name, None)
                else:
                    owner.__dict__[name] = before

    def stages_of(self, path: str) -> tuple[int, ...]:
        """Return the stages in which a unit may run: those that all its parameters belong to."""
        return self._stages_of_unit[path]

    def _make_doors(self) -> Iterator[tuple[nn.Module, str, Any, Any]]:
        for path, m in self.module.named_modules():
            has_parameters = next(m.parameters(), None) is not None
            metric = is_metric(m)
            if not path or not (has_parameters or metric or path in self.begins):
                continue
            if isinstance(m, torch.jit.ScriptModule):
                raise ConfigurationError(
                    f"{path!r} is a TorchScript module, whose calls cannot be followed; allowed: "
                    "modules of Python code; use the module that it was scripted from"
                )
            yield (
                m,
                _CALL,
                self._door(path, m.__dict__.get(_CALL, m.forward)),
                m.__dict__.get(_CALL),
            )
            for name in ("update", "compute") if metric else ():
                method = m.__dict__.get(name, getattr(m, name))
                yield m, name, self._door(f"{path}.{name}", method), m.__dict__.get(name)

    def _door(self, path: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            run = self.run
            if run is None or run.depth:
                return original(*args, **kwargs)
            return run.call(path, original, args, kwargs)

        return call


def is_metric(module: nn.Module) -> bool:
    """Say whether a module is a torchmetrics metric, without importing torchmetrics."""
    return any(
        c.__name__ == "Metric" and c.__module__.startswith("torchmetrics")
        for c in type(module).__mro__
    )


def _stages_of_units(module: nn.Module, cuts: Cuts) -> dict[str, tuple[int, ...]]:
    homes = {name: {j} for j, names in enumerate(cuts.parameters) for name in names}
    for name, stages in cuts.tied.items():
        homes[name] = set(stages)
    by_id = {id(p): homes[name] for name, p in module.named_parameters() if name in homes}
    everywhere = frozenset(range(len(cuts.starts) + 1))
    found: dict[str, tuple[int, ...]] = {}
    for path, m in module.named_modules():
        common = everywhere
        for p in m.parameters():
            common &= by_id.get(id(p), everywhere)
        found[path] = tuple(sorted(common))
    return found
