"""Mapped files: which tensors lie in files that are read where they are touched (safetensors)."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import final

from torch import Tensor

_MAPS = Path("/proc/self/maps")


@final
class MappedFiles:
    """Know the parts of this process's memory that are files, as they are now.

    Where the system does not tell (other than Linux) there are none.
    """

    def __init__(self) -> None:
        text = _MAPS.read_text() if _MAPS.exists() else ""
        parts = [line.split(maxsplit=5) for line in text.splitlines()]
        self._parts = sorted(
            tuple(int(x, 16) for x in part[0].split("-")) for part in parts if part[4] != "0"
        )

    def hold(self, x: Tensor) -> bool:
        """Say whether a tensor lies in a file."""
        if not x.is_cpu or x.numel() == 0:
            return False
        address = x.data_ptr()
        k = bisect_right(self._parts, (address, 1 << 64)) - 1
        return k >= 0 and address < self._parts[k][1]
