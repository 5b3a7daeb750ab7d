"""Freed memory: given back to the system, as allocators of the host keep it for what comes next.

What is made and dropped once, parameter by parameter, would add up to the size of the module.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, final

_AT_ONCE = 32 << 20  # bytes: giving back takes milliseconds


@final
class FreedMemory:
    """Count what is freed, and give it back now and then."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def note(self, num_bytes: int) -> None:
        """Note that memory was freed."""
        self._num_bytes += num_bytes
        if self._num_bytes >= _AT_ONCE:
            self.give_back()

    def give_back(self) -> None:
        """Give all of it back, where the C library has a way (glibc)."""
        self._num_bytes = 0
        trim = _trim()
        if trim is not None:
            trim(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
