"""The entry of a stage: where received tensors become the beginning of its graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_cyclic.runtime.partial_step.ghosts import Handle
from lightning_cyclic.runtime.stages.ledger import version

_ANCHOR = torch.zeros((), requires_grad=True)  # lets autograd note what is made of it


@final
class Entry:
    """Hand out received tensors, and keep the gradients that come back for them.

    What is handed out is no leaf, so that it may be changed in place, and its gradients are added
    in the order in which one graph over all stages would add them.

    Args:
        tensors: what was received, by handle.
        with_grad: handles of those whose gradients are wanted.
        copied: hand out copies, since the tensors are needed again.
    """

    def __init__(
        self, tensors: Mapping[Handle, Tensor], with_grad: frozenset[Handle], *, copied: bool
    ) -> None:
        self.handles = [h for h in tensors if h in with_grad]
        self.grads: dict[Handle, Tensor] = {}
        self.values = {h: _copy(x) if copied else _alias(x) for h, x in tensors.items()}
        if self.handles and torch.is_grad_enabled():
            made = _begin(_ANCHOR, self, [self.values[h] for h in self.handles])
            self.values.update(zip(self.handles, made, strict=True))
        self._given = () if copied else tuple(tensors.values())
        self._versions = list(map(version, self.values.values()))

    def pass_changes_on(self) -> None:
        """Let graphs that hold the received tensors, of a stage on this worker, see changes.

        Their backward then raises, as it does where one graph holds all stages.
        """
        if not self._given:
            return
        now = list(map(version, self.values.values()))
        if now != self._versions:
            for x, after, before in zip(self._given, now, self._versions, strict=True):
                if after != before:
                    increment_version(x)
        self._given = ()

    def keep(self, grads: tuple[Tensor | None, ...]) -> None:
        """Keep the gradients that a backward brought."""
        self.grads = {h: g for h, g in zip(self.handles, grads, strict=True) if g is not None}


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entry: Entry, tensors: list[Tensor]) -> Any:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.entry.keep(grads)
        return None, None, None


# what apply() does beside this is for functorch, and for functions that need no ctx in forward
_begin: Any = super(torch.autograd.Function, _Begin).apply


def _copy(x: Tensor) -> Tensor:
    """Copy a tensor, gaps in its memory included: kernels add in another order without."""
    made = x.clone()
    if made.stride() == x.stride() or 0 in x.stride():
        return made
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _alias(x: Tensor) -> Tensor:
    """Return another tensor over the same memory, which is no view in autograd's eyes."""
    if type(x) is Tensor and not x.is_inference():
        return x.data
    with torch.inference_mode(mode=False):  # changes in place are counted there too
        made = torch.empty(0, dtype=x.dtype, device=x.device)
        return made.set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride())
