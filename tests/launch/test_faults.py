"""Jobs under torchrun to which something happens, and that finish with the same weights."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.data_parallel.hosts import Hosts
from tests.harness import processes
from tests.harness.commands import Command, Commands, until
from tests.scripts import faulted
from tests.scripts.faults import (
    ON_HOSTS,
    ON_ONE_HOST,
    ROOT,
    WAIT_S,
    Fault,
    Job,
    assert_as_unbroken,
    drawn,
    names,
    step_of,
)

pytestmark = pytest.mark.multi
on_hosts = pytest.mark.skipif(not Hosts.is_possible(), reason="needs root and iproute2, on Linux")


def survives(
    preset: str, faults: Sequence[Fault], num_steps: int, folder: Path, hosts: bool = False,
    num_ranks: int = 4,
) -> None:  # fmt: skip
    unbroken = folder / "unbroken"
    (unbroken / "ranks").mkdir(parents=True)
    nodes_of_one = (num_ranks, 1, num_steps, WAIT_S)
    processes.run(faulted.main, num_ranks, unbroken, preset, *nodes_of_one, time_limit_s=110)
    network = Hosts(num_ranks, name="ftst") if hosts else None
    job = Job(folder / "disturbed", preset, num_steps, network, num_ranks)
    job.run(faults)
    assert_as_unbroken(job.folder, unbroken)


def test_a_rank_is_killed(tmp_path: Path) -> None:
    """Kill one under an agent whose ranks are forked, and so are soon there again."""
    folders = [tmp_path / name for name in ("unbroken", "disturbed")]
    for folder in folders:
        (folder / "ranks").mkdir(parents=True)
    unbroken, disturbed = folders
    numbers = 1, 2, 8, WAIT_S
    processes.run(faulted.main, 2, unbroken, "cyclic_dp", 2, 1, *numbers[2:])
    script = ["-m", "tests.harness.agent", "2", "3", "tests.scripts.faulted"]
    command = Command(
        arguments=[sys.executable, *script, str(disturbed), "cyclic_dp", *map(str, numbers)],
        is_forked=True, env={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}, folder=ROOT,
    )  # fmt: skip
    with Commands({"job": command}) as commands:
        until(lambda: step_of(disturbed) >= 3, 60, "three steps")
        os.kill(int((disturbed / "ranks" / "1").read_text()), signal.SIGKILL)
        said = commands.output("job")
    assert names(said, Fault("kill", 1, 3, 0.0))
    assert_as_unbroken(disturbed, unbroken)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_rank_is_killed_under_torchrun(tmp_path: Path) -> None:
    survives("cyclic_dp", [Fault("kill", 1, 3, 0.02)], 8, tmp_path, num_ranks=2)


@on_hosts
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_link_is_cut_for_a_moment(tmp_path: Path) -> None:
    survives("1f1b", [Fault("cut", 1, 3, 0.02)], 8, tmp_path, hosts=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("preset", ["cyclic_dp", "1f1b", "pipedream_2bw"])
def test_anything_happens(preset: str, tmp_path: Path) -> None:
    survives(preset, drawn(ON_ONE_HOST, 6, preset), 30, tmp_path)


@on_hosts
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("preset", ["cyclic_dp", "1f1b"])
def test_anything_happens_to_hosts(preset: str, tmp_path: Path) -> None:
    survives(preset, drawn(ON_HOSTS, 5, preset), 30, tmp_path, hosts=True)
