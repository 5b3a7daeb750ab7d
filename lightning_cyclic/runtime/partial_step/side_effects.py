"""What a stage changes beside its outputs: buffers, metrics, and what the module keeps.

A stage that is run again for its backward must not count its batch twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from lightning_cyclic.runtime.unseen_changes import unseen

if TYPE_CHECKING:
    from lightning_cyclic.runtime.partial_step.module_state import ModuleState
    from lightning_cyclic.runtime.stages.cuts import Cuts


@final
class SideEffects:
    """Undo them.

    Args:
        module: the whole module.
        cuts: which buffers and metrics belong to which stage.
        state: what the module keeps beside these.
    """

    def __init__(self, module: nn.Module, cuts: Cuts, state: ModuleState) -> None:
        self.state = state
        self._module = module
        self._cuts = cuts

    def buffers(self, j: int) -> list[Tensor]:
        """Return copies of the buffers of stage ``j`` that the step changes."""
        return [self._module.get_buffer(n).detach().clone() for n in self._changing(j)]

    def _changing(self, j: int) -> list[str]:
        return [n for n in self._cuts.buffers[j] if n in self._cuts.changed]

    @contextmanager
    def undone(self, j: int, found: Sequence[Tensor] = ()) -> Iterator[None]:
        """Run the body, and leave stage ``j`` as it was but for gradients.

        Args:
            j: the stage.
            found: what the body is to find in its buffers. [what they are]
        """
        names, values = self._changing(j), self.buffers(j)
        buffers = [self._module.get_buffer(n) for n in names]
        with torch.no_grad(), unseen(buffers):
            for b, value in zip(buffers, found, strict=False):
                b.copy_(value)
        metrics = [
            self._module.get_submodule(p) for p, at in self._cuts.metrics.items() if at == j
        ]
        states = [state_of(m) for m in metrics]
        try:
            yield
        finally:
            # the values are what they were: graphs that hold the buffers are not to notice
            with torch.no_grad(), unseen(buffers):
                for name, b, value in zip(names, buffers, values, strict=True):
                    _put_back(self._module, name, b, value)
            for m, state in zip(metrics, states, strict=True):
                m.__dict__.update(state)


def state_of(metric: nn.Module) -> dict[str, Any]:
    """Return a copy of a torchmetrics metric's state and of what it knows of its last batch."""
    names = [*metric.__dict__["_defaults"], *_REMEMBERED]
    return {n: _copied(getattr(metric, n)) for n in names if hasattr(metric, n)}


_REMEMBERED = ("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced")


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _put_back(module: nn.Module, name: str, buffer: Tensor, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    if getattr(owner, last) is not buffer:  # the step has put another tensor in its place
        setattr(owner, last, buffer)
    buffer.copy_(value)
