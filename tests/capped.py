"""A cap on the memory of one process, by the system: a control group of its own.

What a process takes beyond the cap ends it. Pages that it shares with the server that it was
forked from are that one's; what it writes to files may leave memory again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def _here() -> tuple[Path, str, str] | None:
    """Return this process's group, and the names of the files of its limit and its peak."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            group = _ROOT / "memory" / path.lstrip("/")
            return group, "memory.limit_in_bytes", "memory.max_usage_in_bytes"
    group = _ROOT / path.lstrip("/")
    has_memory = group.joinpath("cgroup.subtree_control").exists()
    return (group, "memory.max", "memory.peak") if has_memory else None


def is_possible() -> bool:
    """Say whether this process may cap itself: as root, mostly."""
    with suppress(OSError), capped(1 << 40):
        return True
    return False


@contextmanager
def capped(num_bytes: int) -> Iterator[Path]:
    """Run the body with a cap on what this process takes from here on.

    Yields:
        The file in which the system keeps the most that was taken.
    """
    found = _here()
    if found is None:
        raise OSError("no control group of memory")
    parent, limit, peak = found
    group = parent / f"lightning_cyclic_{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(num_bytes))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield group / peak
    finally:
        with suppress(OSError):
            (parent / "cgroup.procs").write_text(str(os.getpid()))
        with suppress(OSError):
            group.rmdir()
