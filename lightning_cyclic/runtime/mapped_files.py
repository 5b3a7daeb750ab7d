"""Mapped files: which tensors lie in files that are read where they are touched (safetensors)."""

from __future__ import annotations

import os
from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple, final

from torch import Tensor

from lightning_cyclic.errors import ConfigurationError

_MAPS = Path("/proc/self/maps")


class _Part(NamedTuple):
    """A part of this process's memory that is a part of a file, in bytes."""

    begin: int
    end: int
    offset: int
    inode: int
    path: str


@final
class MappedFiles:
    """Know the parts of this process's memory that are files, as they are now.

    Where the system does not tell (other than Linux) there are none.
    """

    def __init__(self) -> None:
        text = _MAPS.read_text() if _MAPS.exists() else ""
        lines = [line.split(maxsplit=5) for line in text.splitlines()]
        self._parts = sorted(_part(*line) for line in lines if line[4] != "0")

    def hold(self, x: Tensor) -> bool:
        """Say whether a tensor lies in a file."""
        return self._part_of(x) is not None

    def check(self, x: Tensor, name: str) -> None:
        """Refuse to read what its file has no more, for which the system would end this process.

        Args:
            x: lies in a file, or not.
            name: under which the user knows it.

        Raises:
            ConfigurationError: the file has been made shorter.
        """
        part = self._part_of(x)
        if part is None:
            return
        try:
            there = os.stat(part.path)
        except OSError:  # removed, or never to be seen: what is mapped stays
            return
        needed = part.offset + x.data_ptr() - part.begin + x.nbytes
        if there.st_ino == part.inode and there.st_size < needed:
            raise ConfigurationError(
                f"the file {part.path} has {there.st_size} bytes, and {name}, which is read from "
                f"it only now, ends at byte {needed}: it was made shorter since it was opened; "
                "allowed: files that stay as they are until each rank has read the parameters of "
                "its stages, in the first step; restore it, and begin again"
            )

    def _part_of(self, x: Tensor) -> _Part | None:
        if not x.is_cpu or x.numel() == 0:
            return None
        address = x.data_ptr()
        k = bisect_right(self._parts, address, key=lambda part: part.begin) - 1
        return self._parts[k] if k >= 0 and address < self._parts[k].end else None


def _part(where: str, _: str, offset: str, __: str, inode: str, path: str = "") -> _Part:
    begin, end = (int(x, 16) for x in where.split("-"))
    return _Part(begin, end, int(offset, 16), int(inode), path)
