"""Which addresses are those of files: the system brings what is read there, and drops it again.

Of a private mapping what is written becomes memory, and shared memory has been that from the
beginning. Only Linux tells (``man 5 proc_pid_maps``); elsewhere nothing is known to be a file's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self, final

_MAPS = Path("/proc/self/maps")
_SHARED, _IS_MEMORY = "s", ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV", "/anon_hugepage")


@final
class MappedFiles:
    """Know what this process had mapped of files.

    Args:
        maps: lines as Linux writes them.
    """

    def __init__(self, maps: Iterable[str]) -> None:
        self._ranges = sorted(_ranges(maps))

    @classmethod
    def now(cls) -> Self:
        return cls(_MAPS.read_text(encoding="utf-8").splitlines() if _MAPS.exists() else ())

    def have(self, address: int) -> bool:
        k = bisect_right(self._ranges, (address, float("inf"))) - 1
        return k >= 0 and address < self._ranges[k][1]


def _ranges(maps: Iterable[str]) -> Iterator[tuple[int, float]]:
    """Yield beginnings and ends.

    Example:
        >>> list(_ranges(["10-20 rw-s 0 00:01 7 /d/a (deleted)", "20-30 rw-p 0 00:00 0 [heap]"]))
        [(16, 32)]
    """
    for line in maps:
        addresses, access, _, _, inode, *path = line.split(maxsplit=5)
        if access[-1] == _SHARED and inode != "0" and not "".join(path).startswith(_IS_MEMORY):
            begin, end = addresses.split("-")
            yield int(begin, 16), int(end, 16)
