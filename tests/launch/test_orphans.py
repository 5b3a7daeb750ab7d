"""Ranks whose launcher is killed: none trains on by itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[2]
LIMIT_S = 50.0


def wait_until(what: str, is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # nobody may ask how it ended


def test_ranks_end_at_the_same_step_when_their_agent_is_killed(tmp_path: Path) -> None:
    log, ranks = tmp_path / "log", tmp_path / "ranks"
    ranks.mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "--module", "tests.scripts.orphaned", str(ranks), "1f1b",
    ]  # fmt: skip
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        agent = subprocess.Popen(command, stdout=file, stderr=file, env=env, cwd=ROOT)
    pids: list[int] = []
    try:
        wait_until("two ranks train", lambda: agent.poll() is None and len(os.listdir(ranks)) == 2)
        pids += [int(name) for name in os.listdir(ranks)]
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        wait_until("both ranks have ended", lambda: not any(map(is_running, pids)))
    finally:
        agent.kill()
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
    said = log.read_text()
    assert re.search(r"^Rank \d received SIGTERM: all ranks stop behind the same", said, re.M)
    assert re.search(r"^All ranks stop behind step \d+ \(SIGTERM\)$", said, re.M), said
