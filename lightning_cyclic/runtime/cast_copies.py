"""Low-precision copies of weights: one for each version, not one for each micro-batch in flight.

Autocast casts a weight where it is used, and the graph keeps the copy until its backward. Several
micro-batches in flight would keep as many copies of the same values. So a graph is given the copy
that another one has, as long as anybody has it; which bits there are does not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_cyclic.errors import StepError

_LOW = frozenset({torch.bfloat16, torch.float16})


class Cast(NamedTuple):
    """Say what a tensor is a cast of.

    Args:
        copy: the whole cast, of which the tensor may be a view.
    """

    parameter: nn.Parameter
    copy: Tensor


def cast_of(x: Tensor) -> Cast | None:
    """Return of which parameter a tensor is a low-precision copy, or a view of one."""
    if x.dtype not in _LOW:
        return None
    copy = x._base if x._is_view() else x
    node = None if copy is None else copy.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    p = getattr(node.next_functions[0][0], "variable", None)
    if not isinstance(p, nn.Parameter) or copy is None or copy.shape != p.shape:
        return None
    return Cast(p, copy)


class View(NamedTuple):
    """Stand for a view of a copy that others have, too."""

    copy: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def value(self) -> Tensor:
        return self.copy.as_strided(self.size, self.stride, self.offset)


class _Known(NamedTuple):
    parameter: weakref.ref[nn.Parameter]
    version: int  # how often its values were changed
    copy: weakref.ref[Tensor]


@final
class CastCopies:
    """Know the copies that graphs hold."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.dtype], _Known] = {}

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let graphs that the body makes share copies with others.

        Raises:
            StepError: the body calls torch.func or torch.vmap, which refuse such hooks.
        """
        refusing = refusing_transforms(
            "under autocast", "torch.func without autocast, or torch.autograd.grad",
            "precision='bf16-true' or '32-true', or strategy='cyclic_dp'",
        )  # fmt: skip
        with refusing, saved_tensors_hooks(self.pack, _unpack):
            yield

    def forget(self) -> None:
        """Share no copy of before: parameters are about to have other values."""
        self._known.clear()

    def pack(self, x: Tensor) -> Tensor | View:
        """Return what a graph is to hold of a tensor that it saves."""
        found = cast_of(x)
        if found is None:
            return x
        copy = self._copy_of(*found)
        return View(copy, x.shape, x.stride(), int(x.storage_offset()))

    def _copy_of(self, p: nn.Parameter, copy: Tensor) -> Tensor:
        key = id(p), copy.dtype
        known = self._known.get(key)
        if known is not None and known.parameter() is p and known.version == p._version:
            other = known.copy()
            if other is not None and other.stride() == copy.stride():
                return other
        made = copy.detach()
        # entries go with their parameters: each version has some of its own
        gone = weakref.ref(p, lambda _: self._known.pop(key, None))
        self._known[key] = _Known(gone, p._version, weakref.ref(made))
        return made


def _unpack(x: Tensor | View) -> Tensor:
    return x if isinstance(x, Tensor) else x.value()


@contextmanager
def refusing_transforms(where: str, allowed: str, todo: str) -> Iterator[None]:
    """Refuse by name what lets nobody see what autograd saves.

    Raises:
        StepError: the body calls torch.func or torch.vmap.
    """
    try:
        yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise StepError(
            f"the step calls a function of torch.func or torch.vmap {where} ({error}); allowed in "
            f"pipelines: {allowed}; use {todo}"
        ) from error
