"""Whichever way two processes are launched, training ends with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_cyclic.strategy import CyclicStrategy
from tests import launched, processes
from tests.corpus import assert_same

pytestmark = [pytest.mark.multi, pytest.mark.slow]

SCRIPT = [sys.executable, launched.__file__]
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
    launched.__file__,
]  # fmt: skip
FLAGS = [
    "cli", "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_epochs=1",
    "--trainer.logger=false", "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false", "--seed_everything=false",
]  # fmt: skip
BY_CLASS = """
trainer:
  strategy:
    class_path: lightning_cyclic.CyclicStrategy
    init_args:
      preset: cyclic_dp
      slack: {slack}
      stages: {stages}
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What two ranks that are started by hand end with."""
    return by_hand(tmp_path_factory.mktemp("by_hand") / "out", CyclicStrategy("cyclic_dp"))


def by_hand(out: Path, strategy: CyclicStrategy) -> dict[str, Tensor]:
    processes.run(one_node, 2, out, strategy)
    return torch.load(out)


def one_node(out: Path, strategy: CyclicStrategy) -> None:
    launched.fit(out, strategy, devices=1, num_nodes=2)


def launch(out: Path, command: list[str], *arguments: str) -> dict[str, Tensor]:
    """Run a command with a time limit, and no process of it left behind."""
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE")}
    env["GLOO_SOCKET_IFNAME"] = "lo"
    process = subprocess.Popen(
        [*command, str(out), *arguments], env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return torch.load(out)


@pytest.mark.parametrize(
    ("command", "strategy"),
    [
        (SCRIPT, "cyclic_dp"),
        (SCRIPT, "cyclic_dp_spawn"),
        (SCRIPT, "cyclic_dp_fork"),
        (TORCHRUN, "cyclic_dp"),
    ],
    ids=["popen", "spawn", "fork", "torchrun"],
)
def test_every_launcher_ends_with_the_same_bits(
    command: list[str], strategy: str, expected: dict[str, Tensor], tmp_path: Path
) -> None:
    assert_same(launch(tmp_path / "out", command, strategy), expected)


def test_lightning_cli_takes_a_name(expected: dict[str, Tensor], tmp_path: Path) -> None:
    given = launch(tmp_path / "out", SCRIPT, *FLAGS, "--trainer.strategy=cyclic_dp")
    assert_same(given, expected)


def test_lightning_cli_takes_a_class_with_arguments(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(BY_CLASS.format(slack=2, stages="[net.3, net.5]"))
    given = launch(tmp_path / "out", SCRIPT, *FLAGS, f"--config={config}")
    strategy = CyclicStrategy("cyclic_dp", slack=2, stages=["net.3", "net.5"])
    assert_same(given, by_hand(tmp_path / "by_hand", strategy))
