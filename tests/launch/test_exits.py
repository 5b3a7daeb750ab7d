"""Ranks end without a word, behind the end of the script that they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multi


def exits(num: int, limit_s: float) -> None:
    command = [sys.executable, "-m", "tests.scripts.exits", str(num)]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
        timeout=limit_s,
    )  # fmt: skip
    said = ended.stdout + ended.stderr
    assert f"{num} of {num} runs ended well" in said, said
    assert ended.returncode == 0
    assert "terminate called" not in said


def test_ranks_of_three_kinds_of_plans_end_well() -> None:
    exits(3, 110)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
def test_every_one_of_five_hundred_runs_ends_well() -> None:
    exits(500, 2900)
