"""Notes of how tensors were made without memory, and what these say alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cyclic.runtime.unread import UnreadTensor

_SOME = 64  # elements


class Ref(NamedTuple):
    """Stand for a tensor without memory: where in which storage it lies."""

    storage: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Note(NamedTuple):
    """Hold one operation, with what it was given, as leaves of a tree."""

    func: Any
    leaves: list[Any]
    tree: Any
    outputs: list[Ref]
    state: Tensor | None  # of the generator before it, if it is random
    device: torch.device


def described(note: Note, storages: dict[int, int]) -> Iterator[bytes]:
    """Yield what an operation is, and what it was given, as on every rank that does the same."""
    yield str(note.func).encode()
    for x in note.leaves:
        if isinstance(x, Ref):
            yield repr((storages.setdefault(x.storage, len(storages)), *x[1:])).encode()
        elif isinstance(x, Tensor):
            yield repr((x.shape, x.dtype)).encode()
            yield from some_values(x)
        elif isinstance(x, int | float | str | torch.dtype):
            yield repr(x).encode()
    if note.state is not None:
        yield from _bytes(note.state)


def some_values(x: Tensor) -> Iterator[bytes]:
    """Yield some values of a tensor: nobody is to read all of them."""
    if isinstance(x, UnreadTensor):
        yield from _bytes(x.origin)
        return
    if x.layout is torch.strided and x.numel() > 0 and not x.is_meta:
        flat = x.reshape(-1) if x.is_contiguous() else x[..., :1].reshape(-1)
        yield from _bytes(flat[:_SOME])
        yield from _bytes(flat[-_SOME:])


def _bytes(x: Tensor) -> Iterator[bytes]:
    yield x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
