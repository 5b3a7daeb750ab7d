"""Processes: which ranks have ended, by the word of the kernel that runs them.

A closed connection does not say whose end is gone: whoever stops because of another rank closes
its own ones. What a process is known by says where its number counts, and when it began, as
numbers are given again:

    boot of the machine, namespaces / number / beginning, in ticks of the clock since that boot
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from lightning_cyclic.runtime.transport.bounded import within

_KEY: Final = "lightning_cyclic/ended"
_EXITING: Final = 0x4  # PF_EXITING of Linux: it closes connections, and is no zombie yet


class _Stat(NamedTuple):
    """Hold what the kernel says of a process."""

    state: str
    flags: int
    began: str


@final
class Processes:
    """Know which ranks have ended: of this host by its kernel, of others by their ranks' word.

    Args:
        store: of the default process group.
        known_by: what :func:`own` returned on each rank.
    """

    def __init__(self, store: Any, known_by: Sequence[str]) -> None:
        self._store = store
        self._known_by = known_by
        here = _kernel()
        self._here = [r for r, x in enumerate(known_by) if here and x.startswith(f"{here}/")]
        self._told: set[int] = set()

    def ended(self) -> list[int]:
        """Return the ranks that have ended."""
        others = [r for r in range(len(self._known_by)) if r not in self._here]
        mine, nobody = self._ended_here(), list[int]()
        return sorted(mine + (within(lambda: self._look(others), nobody) if others else nobody))

    def live(self) -> list[int]:
        """Return the ranks of this host that have not ended."""
        gone = self._ended_here()
        return [r for r in self._here if r not in gone]

    def stopped(self) -> list[int]:
        """Return the ranks of this host that a signal has stopped: they do nothing."""
        return [r for r in self._here if _is_stopped(self._known_by[r])]

    def tell(self) -> None:
        """Tell the ranks of other hosts which of this one have ended."""
        for rank in self._ended_here():
            if rank not in self._told and len(self._here) < len(self._known_by):
                self._told.add(rank)
                self._store.set(self._key_of(rank), "")

    def _ended_here(self) -> list[int]:
        return [r for r in self._here if has_ended(self._known_by[r])]

    def _look(self, ranks: Sequence[int]) -> list[int]:
        return [r for r in ranks if self._known_by[r] and self._store.check([self._key_of(r)])]

    def _key_of(self, rank: int) -> str:
        return f"{_KEY}/{self._known_by[rank]}"


def own() -> str:
    """Return what this process is known by; "" where the kernel is not asked so."""
    kernel, pid = _kernel(), os.getpid()
    stat = _stat_of(pid)
    return f"{kernel}/{pid}/{stat.began}" if kernel and stat is not None else ""


def has_ended(known_by: str) -> bool:
    """Say whether a process of this host has ended, or does so.

    Args:
        known_by: what :func:`own` returned there.
    """
    _, pid, began = known_by.rsplit("/", 2)
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's: it is there
        pass
    stat = _stat_of(int(pid))
    if stat is None:  # it cannot be seen
        return False
    return stat.state in "ZX" or bool(stat.flags & _EXITING) or stat.began != began


def _is_stopped(known_by: str) -> bool:
    _, pid, began = known_by.rsplit("/", 2)
    stat = _stat_of(int(pid))
    return stat is not None and stat.state in "Tt" and stat.began == began


def _kernel() -> str:
    """Say where numbers and beginnings of processes are the same; "" for nowhere."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # of another namespace
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # no Linux, or an old one
        return ""


def _stat_of(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # behind the program's name, which may be anything
    return _Stat(fields[0], int(fields[6]), fields[19])
