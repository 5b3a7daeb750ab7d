"""Ranks end without a word behind their script, and at one step when their launcher is killed."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.commands import Command, Commands, start, until
from tests.harness.rows import more

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[2]
ENV = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("num", "is_forked"), [(3, True), more(500, False)])
def test_ranks_of_three_kinds_of_plans_end_well(num: int, is_forked: bool) -> None:
    arguments = [sys.executable, "-m", "tests.scripts.exits", str(num)]
    command = Command(arguments=arguments, is_forked=is_forked, folder=ROOT, limit_s=2900)
    with Commands({"exits": command}) as commands:
        said = commands.output("exits")
    assert f"{num} of {num} runs ended well" in said
    assert "terminate called" not in said


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # nobody may ask how it ended


FORKED = ["-m", "tests.harness.agent", "2", "0"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--module"]


@pytest.mark.parametrize("agent", [FORKED, more(TORCHRUN)], ids=["forked", "torchrun"])
def test_ranks_end_at_the_same_step_when_their_agent_is_killed(
    agent: Sequence[str], tmp_path: Path
) -> None:
    log, ranks = tmp_path / "log", tmp_path / "ranks"
    log.touch()
    ranks.mkdir()
    script = [*agent, "tests.scripts.orphaned", str(ranks), "1f1b"]
    command = Command(arguments=[sys.executable, *script], is_forked=True, env=ENV, folder=ROOT)
    launched, pids = start(command, str(log)), list[int]()
    try:
        until(
            lambda: launched.poll() is None and len(os.listdir(ranks)) == 2, 50, "two ranks train"
        )
        pids += [int(name) for name in os.listdir(ranks)]
        os.kill(launched.pid, signal.SIGKILL)
        launched.wait()
        until(lambda: not any(map(is_running, pids)), 50, "both ranks have ended")
    finally:
        for pid in filter(is_running, [launched.pid, *pids]):
            os.kill(pid, signal.SIGKILL)
    said = log.read_text()
    assert re.search(r"^Rank \d received SIGTERM: all ranks stop behind the same", said, re.M)
    assert re.search(r"^All ranks stop behind step \d+ \(SIGTERM\)$", said, re.M), said
