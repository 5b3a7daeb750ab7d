"""What graphs hold of weights that leave memory: where it lay, and not the memory itself.

What autograd would save of a weight that leaves is remembered by its place alone, and autograd
gets what it saved from where that place is, when its backward has come.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_cyclic.runtime.cast_copies import cast_of


class _Place(NamedTuple):
    """Say where in some memory a tensor lies."""

    key: Hashable
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Cast(NamedTuple):
    """Say of which tensor autocast has made a copy, and where in the copy another lies."""

    of: _Place
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@final
class SavedPlaces:
    """Know where what leaves lies.

    Args:
        find: key -> the memory that it is the name of; brings it, if it is elsewhere.
    """

    def __init__(self, find: Callable[[Any], Tensor]) -> None:
        self._find = find
        # address -> key, and the memory, which is nobody else's meanwhile
        self._known: dict[int, tuple[Hashable, Tensor]] = {}

    def note(self, data: Tensor, key: Hashable) -> None:
        self._known[_address(data)] = key, data

    def forget(self, data: Tensor) -> None:
        self._known.pop(_address(data), None)

    def remembering(self) -> AbstractContextManager[Any]:
        """Return a context whose graphs hold nothing of what is known here."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Tensor | _Place | _Cast:
        place = self._place_of(x)
        if place is not None:
            return place
        cast = cast_of(x)  # else half of the model would stay until the backward
        of = None if cast is None else self._place_of(cast.parameter)
        if of is None:
            return x
        return _Cast(of, x.dtype, int(x.storage_offset()), x.shape, x.stride())

    def _place_of(self, x: Tensor) -> _Place | None:
        at = self._known.get(_address(x)) if x.numel() else None
        if at is None:
            return None
        return _Place(at[0], x.dtype, int(x.storage_offset()), x.shape, x.stride())

    def _unpack(self, x: Tensor | _Place | _Cast) -> Tensor:
        if isinstance(x, Tensor):
            return x
        if isinstance(x, _Cast):
            return self._unpack(x.of).to(x.dtype).as_strided(x.size, x.stride, x.offset)
        storage = self._find(x.key).untyped_storage()
        found = torch.empty(0, dtype=x.dtype, device=storage.device)
        return found.set_(storage, x.offset, x.size, x.stride)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
