"""Ranks on hosts of their own train, bear a link that is cut for a moment, and miss a host."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from benchmarks.data_parallel.hosts import Hosts
from lightning_cyclic.errors import CyclicError
from tests.harness import processes
from tests.harness.processes import here
from tests.harness.trainers import assert_same, make_trainer, train_data, weights_of
from tests.modules.classifier import Classifier

pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(not Hosts.is_possible(), reason="needs root and iproute2, on Linux"),
]
NUM_BATCHES, CUT_AT, LIMIT_S = 8, 3, 3.0
MEETING_S = 5.0  # so that no step before it is late
NAME = "lcn" + os.environ.get("PYTEST_XDIST_WORKER", "")  # two of them may have a row each
_NETWORK = 0x40000000  # CLONE_NEWNET of Linux


def move_to_host(k: int) -> None:
    """Let this thread, and those that it starts, have the network of a host."""
    with Path(f"/run/netns/{NAME}{k}").open() as host:
        assert ctypes.CDLL(None, use_errno=True).setns(host.fileno(), _NETWORK) == 0
    port = int(os.environ["MASTER_PORT"]) + 1  # there is a store already at the one it is given
    os.environ |= {
        "MASTER_ADDR": Hosts.address(0), "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "eth0"
    }  # fmt: skip


class Slow(Classifier):
    """Takes its time, and says how far it is."""

    def __init__(self, reached: Path) -> None:
        super().__init__("mlp", "adamw")
        self.reached = reached

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.05)
        if batch_idx == CUT_AT:
            self.reached.touch()
        return super().training_step(batch, batch_idx)


def fit(preset: str, folder: Path, apart: bool) -> dict[str, Tensor]:
    if apart:
        move_to_host(here().rank)
    module = Slow(folder / "reached")
    strategy = {"preset": preset, "stages": 4, "timeout": timedelta(seconds=LIMIT_S)}
    make_trainer(strategy, max_epochs=1).fit(module, train_data(module, NUM_BATCHES))
    return weights_of(module)


def fit_in_vain(preset: str, folder: Path) -> tuple[str, float]:
    """Return with what a rank ends, and when, on the clock of all."""
    with pytest.raises(CyclicError) as caught:
        fit(preset, folder, apart=True)
    return str(caught.value), time.monotonic()


def meet_in_vain(k: int, folder: Path) -> tuple[str, float]:
    """Return with what a rank ends at a meeting, to which all have come before the cut."""
    move_to_host(here().rank)
    module = Slow(folder / "never")
    # of which nothing is under way between steps
    strategy = {"preset": "1f1b", "stages": 4, "timeout": timedelta(seconds=MEETING_S)}
    trainer = make_trainer(strategy, max_epochs=1)

    def on_train_epoch_end() -> None:
        with trainer.strategy.assembly.waiting("to dine"):
            come = dist.distributed_c10d._get_default_store().add("come", 1)
            if come == here().num_ranks:
                (folder / "reached").touch()
            if here().rank == k:
                wait_for(folder / "cut")
            dist.barrier()

    module.on_train_epoch_end = on_train_epoch_end  # type: ignore[method-assign]
    with pytest.raises(CyclicError) as caught:
        trainer.fit(module, train_data(module, 2))
    return str(caught.value), time.monotonic()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts(4, name=NAME)
    hosts.up()
    yield hosts
    hosts.down()


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


@contextmanager
def cutting(hosts: Hosts, k: int, reached: Path, for_s: float | None) -> Iterator[list[float]]:
    """Cut a host off while the body runs, when training is in its middle; say when."""
    at: list[float] = []

    def cut() -> None:
        wait_for(reached)
        hosts.cut(k)
        at.append(time.monotonic())
        reached.with_name("cut").touch()
        if for_s is not None:
            time.sleep(for_s)
            hosts.restore(k)

    thread = threading.Thread(target=cut)
    thread.start()
    yield at
    thread.join()


def test_a_link_that_is_cut_for_a_moment_is_borne(hosts: Hosts, tmp_path: Path) -> None:
    expected = processes.run(fit, 4, "cyclic_dp", tmp_path, False)
    (tmp_path / "reached").unlink()
    with cutting(hosts, 1, tmp_path / "reached", for_s=0.5) as cut:
        ends = processes.run(fit, 4, "cyclic_dp", tmp_path, True)
    assert cut
    for weights in ends:
        assert_same(weights, expected[0])


@pytest.mark.parametrize(("preset", "k"), [("1f1b", 0)])
def test_where_a_host_is_cut_off_all_end_soon_and_say_for_whom_they_waited(
    preset: str, k: int, hosts: Hosts, tmp_path: Path
) -> None:
    with cutting(hosts, k, tmp_path / "reached", for_s=None) as cut:
        ends = processes.run(fit_in_vain, 4, preset, tmp_path)
    assert all(ended_at < cut[0] + LIMIT_S + 5 for _, ended_at in ends)
    said = [text for rank, (text, _) in enumerate(ends) if rank != k]
    assert all(re.search(r"rank \d on \S+ .*(waited|ended)", text) for text in said), said
    assert any(f"rank {k} on " in text for text in said), said  # as one saw it that waited for it


@pytest.mark.parametrize("k", [2])
def test_where_all_have_met_the_host_that_is_cut_off_is_named(
    k: int, hosts: Hosts, tmp_path: Path
) -> None:
    with cutting(hosts, k, tmp_path / "reached", for_s=None) as cut:
        ends = processes.run(meet_in_vain, 4, k, tmp_path)
    assert all(ended_at < cut[0] + MEETING_S + 5 for _, ended_at in ends)
    for rank, (text, _) in enumerate(ends):
        if rank == k == 0:
            expected = r"rank 1 on \S+ .*and rank 2 on \S+ .*and rank 3 on \S+ .*did not answer"
        elif k in (0, rank):
            expected = (
                rf"rank 0 on \S+( .*)?, through which .* cannot be reached from rank {rank} on"
            )
        else:
            expected = (
                rf"waited {MEETING_S:g} s for rank {k} on .* to dine, .*; "
                rf"rank {k} on .* did not answer"
            )
        assert re.search(expected, text.splitlines()[0]), (rank, text)
