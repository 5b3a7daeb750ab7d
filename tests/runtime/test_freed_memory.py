"""Memory that is freed: what the C library keeps of it, and what goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_cyclic.runtime import freed_memory

PROGRAM = """
import runpy, sys

keep_nothing_large = runpy.run_path(sys.argv[1])["keep_nothing_large"]
if sys.argv[2] == "nothing":
    keep_nothing_large()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

before = resident()
large, small = [], []
for _ in range(400):
    large.append(bytearray(b"x" * 100_000))
    small.append(bytearray(b"x" * 1000))  # between them, and never freed
taken = resident() - before
large.clear()
print(taken, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="has another C library")
@pytest.mark.parametrize(("keeps", "least", "most"), [("pieces", 0.5, 1.1), ("nothing", 0.0, 0.1)])
def test_large_memory_goes_back_between_small_pieces(
    keeps: str, least: float, most: float
) -> None:
    file = str(Path(freed_memory.__file__))
    command = [sys.executable, "-c", PROGRAM, file, keeps]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    taken, left = map(int, done.stdout.split())
    assert taken > 35_000_000
    assert least <= left / taken <= most
