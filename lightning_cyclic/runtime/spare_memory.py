"""Spare memory: room for buffers of many sizes, no more than were ever used at once.

    take             the smallest that is spare and fits
                     else new pages of the system, to which as many bytes of others go back
    no tensor lies in it any more      it is spare

The C library keeps what is freed, in pieces into which nothing larger fits: a process may have
twice what it uses. And pages that are new for each message take longer than what is sent in them.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import final

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 16  # smaller ones take no pages of their own
_SLACK = 8  # room may be larger than what is asked for by one part in so many
_FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_ANONYMOUS", 0)


@final
class SpareMemory:
    """Lend memory of the host, and have it back when nobody holds a tensor that lies in it."""

    def __init__(self) -> None:
        self._spare: list[mmap.mmap] = []  # those that came back first are first
        self._taking = threading.Lock()  # lanes take, too; who drops a tensor waits for nobody

    def take(self, num_bytes: int) -> Tensor:
        """Return bytes that are not initialised, uint8, 1-d."""
        if num_bytes < _LEAST_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        with self._taking:
            pages = self._find(num_bytes) or self._new(num_bytes)
        lent = memoryview(pages)[:num_bytes]  # which the tensor's storage holds
        weakref.finalize(lent, self._spare.append, pages).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Count what is spare."""
        return sum(map(len, list(self._spare)))

    def give_back(self) -> None:
        """Give all that is spare back to the system."""
        with self._taking:
            self._spare.clear()

    def _find(self, num_bytes: int) -> mmap.mmap | None:
        most = num_bytes + num_bytes // _SLACK
        fitting = [x for x in list(self._spare) if num_bytes <= len(x) <= most]
        if not fitting:
            return None
        found = min(fitting, key=len)
        self._spare.remove(found)
        return found

    def _new(self, num_bytes: int) -> mmap.mmap:
        freed = 0
        while self._spare and freed < num_bytes:
            freed += len(self._spare.pop(0))
        return mmap.mmap(-1, num_bytes, flags=_FLAGS)
