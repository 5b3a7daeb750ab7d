"""Freed memory: given back to the system, as allocators of the host keep it for what comes next.

What is made and dropped once, parameter by parameter, would add up to the size of the module; and
what is kept in pieces between others fits nothing larger.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, final

_AT_ONCE = 32 << 20  # bytes: giving back takes milliseconds
_LARGE = 1 << 16  # bytes: each is a few pages
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


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


def keep_nothing_large() -> None:
    """Have whatever is large come from the system, and go back when it is freed (glibc).

    It costs time, as new pages do, and is for processes whose memory is scarce: once, for good.
    """
    set_option = _of_c_library("mallopt")
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE)


def _trim() -> Any:
    return _of_c_library("malloc_trim")


@cache
def _of_c_library(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
