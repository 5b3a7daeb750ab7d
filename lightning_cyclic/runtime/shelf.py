"""A shelf: tensors that lie in a file, of which memory holds what it has room for."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

New = Callable[[Sequence[int], torch.dtype], Tensor]
"""(shape, dtype) -> a tensor of the host without values."""


def in_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of the host's memory without values."""
    return torch.empty(tuple(shape), dtype=dtype)


@final
class Shelf:
    """Make tensors that lie in one temporary file, which goes when the last of them does.

    Args:
        folder: on a disk with room for them all; not in memory, as /tmp may be.
    """

    def __init__(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file, path = tempfile.mkstemp(dir=folder, prefix="lightning_cyclic_")
        os.unlink(path)  # it has no name any more, and lives as long as it is used
        weakref.finalize(self, os.close, self._file)
        self._end = 0

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose values lie in the file."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes == 0:
            return in_memory(shape, dtype)
        begin, page = self._end, mmap.ALLOCATIONGRANULARITY
        self._end += -(-num_bytes // page) * page
        os.ftruncate(self._file, self._end)
        room = mmap.mmap(self._file, num_bytes, offset=begin)
        return torch.frombuffer(room, dtype=dtype).view(tuple(shape))
