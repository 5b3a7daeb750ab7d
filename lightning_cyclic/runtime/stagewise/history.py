"""The version before the newest, where one worker runs all stages and some forwards read it.

The newest version is the module's own parameters, which the optimizer updates in place. Before it
does, their values are copied to parameters of the version before, which take their places in the
module while a forward reads that. So each graph belongs to the version that its forward read:
autograd keeps some parameters themselves for the backward, not their memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn


@final
class History:
    """Keep two versions of each stage.

    Args:
        module: the whole module.
        stages: name -> trained parameter, of each stage.
        v: the version that the parameters hold now.
    """

    def __init__(
        self, module: nn.Module, stages: Sequence[Mapping[str, nn.Parameter]], v: int
    ) -> None:
        self._stages = stages
        self._before: list[dict[str, nn.Parameter]] = [{} for _ in stages]
        self._places = _places_of(module)
        self.newest = v

    @contextmanager
    def shown(self, versions: Mapping[int, int]) -> Iterator[dict[str, nn.Parameter]]:
        """Let stages have the versions that a forward reads, while the body runs.

        Args:
            versions: stage -> version, the newest or the one before.

        Yields:
            The parameters that stand in the places of the module's own, by name.
        """
        old = [j for j, v in versions.items() if v != self.newest]
        assert all(versions[j] == self.newest - 1 for j in old)
        shown = {n: p for j in old for n, p in self._before[j].items()}
        own = {n: self._stages[j][n] for j in old for n in self._before[j]}
        self._put(own, shown)
        try:
            yield shown
        finally:
            self._put(own, own)

    @contextmanager
    def accumulating(self, shown: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Let the gradients that the body gives stand-ins go to the module's own parameters."""
        own = {n: p for stage in self._stages for n, p in stage.items() if n in shown}
        for n, p in own.items():
            shown[n].grad, p.grad = p.grad, None
        try:
            yield
        finally:
            for n, p in own.items():
                p.grad, shown[n].grad = shown[n].grad, None

    def begin_update(self) -> None:
        """Keep the newest version as the one before: the optimizer is about to change it."""
        for stage, before in zip(self._stages, self._before, strict=True):
            if not before:
                before.update({n: nn.Parameter(torch.empty_like(p)) for n, p in stage.items()})
            _copy(before.values(), stage.values())
        self.newest += 1

    def previous(self) -> dict[str, Tensor]:
        """Return the values of the version before the newest, by name; none before an update."""
        return {n: p.detach().clone() for before in self._before for n, p in before.items()}

    def put_previous(self, values: Mapping[str, Tensor]) -> None:
        """Take the values of the version before the newest, from a checkpoint."""
        for stage, before in zip(self._stages, self._before, strict=True):
            if all(n in values for n in stage):
                before.update({n: nn.Parameter(torch.empty_like(p)) for n, p in stage.items()})
                _copy(before.values(), [values[n] for n in stage])

    def _put(self, own: Mapping[str, nn.Parameter], shown: Mapping[str, nn.Parameter]) -> None:
        for n, p in own.items():
            for owner, name in self._places[id(p)]:
                if isinstance(owner, nn.RNNBase):
                    setattr(owner, name, shown[n])  # it keeps its weights in a list, too
                else:
                    owner._parameters[name] = shown[n]


def _places_of(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """List where each parameter sits: tied ones in several modules."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                places.setdefault(id(p), []).append((m, name))
    return places


def _copy(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    targets, values = list(targets), list(values)
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, values)
