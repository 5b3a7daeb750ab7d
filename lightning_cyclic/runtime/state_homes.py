"""Where optimizer state, or activations, lie that are not in a worker's memory.

    FileHome   a file without a name, for a worker on CPUs
    HostHome   memory of the host, for one on a GPU

The file has no name, so that nothing of it is left behind a run, however that ends, and runs may
share a folder.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.buffers import span
from lightning_cyclic.runtime.state_layout import Chunk

_MOST_AT_ONCE = 1 << 30  # bytes that the system reads or writes in one call
_STATE = "for what does not stay in memory; use another one, or raise memory_limit_bytes"
ACTIVATIONS = (
    "what one forward leaves, and as much for each that waits for its backward; use another one, "
    'or activation_checkpointing="always"'
)


class AbstractHome(ABC):
    """Keep bytes."""

    name: str
    """In errors."""

    bytes: Any
    """All that is kept, as memory of the host."""

    def views(self, begin: int, chunk: Chunk) -> list[Tensor]:
        """Return the tensors of a chunk, as they lie here from a byte on."""
        views = []
        for part in chunk:  # each with a storage of its own: whole storages are saved
            size, stride, dtype, *_ = part.spec
            count = span(part.spec)
            flat = torch.frombuffer(self.bytes, dtype=dtype, count=count, offset=begin)
            views.append(flat.as_strided(size, stride))
            begin += part.num_bytes
        return views

    @abstractmethod
    def read(self, begin: int, room: Tensor) -> None:
        """Copy from here into memory, in the order of the current stream.

        Args:
            begin: first byte here.
            room: as many as are copied, uint8.

        Raises:
            OSError: it does not work.
        """

    @abstractmethod
    def write(self, begin: int, room: Tensor) -> None:
        """Copy from memory to here; see :meth:`read`."""


@final
class FileHome(AbstractHome):
    """Keep bytes in a file.

    Args:
        folder: for the file; it is made if need be.
        num_bytes: of all.
        what: they are, and what else could be done.

    Raises:
        ConfigurationError: there is no room for it.
    """

    def __init__(self, folder: Path, num_bytes: int, what: str = _STATE) -> None:
        self.name = f"the folder disk={str(folder)!r}"
        self._file = _file_of(folder, num_bytes, what)
        # not before: a lane may still be at work, and numbers of files are given again
        weakref.finalize(self, os.close, self._file)
        # the system brings what is read of it, and drops it again
        self.bytes = mmap.mmap(self._file, num_bytes) if num_bytes else b""

    @override
    def read(self, begin: int, room: Tensor) -> None:
        into, done = room.numpy().data, 0
        while done < len(into):
            part = into[done : done + _MOST_AT_ONCE]
            count = os.preadv(self._file, [part], begin + done)
            if not count:
                raise OSError("the file is shorter than it was made")
            done += count

    @override
    def write(self, begin: int, room: Tensor) -> None:
        data, done = room.numpy().data, 0
        while done < len(data):
            part = data[done : done + _MOST_AT_ONCE]
            done += os.pwrite(self._file, part, begin + done)


@final
class HostHome(AbstractHome):
    """Keep bytes in memory of the host, which a GPU reads and writes beside what it computes.

    Args:
        num_bytes: of all.
        is_pinned: whether a GPU can.
    """

    name = "the host's memory"

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        self._data = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.bytes = self._data.numpy()

    @override
    def read(self, begin: int, room: Tensor) -> None:
        room.copy_(self._data[begin : begin + len(room)], non_blocking=True)

    @override
    def write(self, begin: int, room: Tensor) -> None:
        self._data[begin : begin + len(room)].copy_(room, non_blocking=True)


def _file_of(folder: Path, num_bytes: int, what: str) -> int:
    """Make a file without a name that has all its room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            if num_bytes:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            return os.dup(file.fileno())
    except OSError as error:
        free = f", which has {shutil.disk_usage(folder).free} free" if folder.is_dir() else ""
        raise ConfigurationError(
            f"disk={str(folder)!r}{free}: {error}; allowed: a folder that can be written, with "
            f"{num_bytes} bytes free, {what}"
        ) from error
