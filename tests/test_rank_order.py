"""Ranks that a launcher dealt over hosts in turn are renumbered: neighbours share a host."""

from __future__ import annotations

import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_cyclic.errors import ConfigurationError, StepError
from lightning_cyclic.strategy import CyclicStrategy
from tests import dealt, launched, processes
from tests.commands import Command, Commands
from tests.corpus import assert_same, weights_of

pytestmark = pytest.mark.multi


class Dealt(launched.Tiny):
    """Notes which samples this rank trains with."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seen: list[float] = []

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(super().train_dataloader().dataset, batch_size=self.batch_size)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append(float(batch[0].sum()))
        return super().training_step(batch, batch_idx)


def fit(hosts: list[str], *orders: Any, preset: str = "cyclic_dp", **options: Any) -> list[Any]:
    """Fit once with each order, in one process; return what this rank was in each, and its end."""
    launched_as = processes.here().rank
    socket.gethostname = lambda: hosts[launched_as]  # type: ignore[assignment]
    found = []
    for order in orders:
        strategy = CyclicStrategy(preset, rank_order=order, **options)
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", devices=1, num_nodes=len(hosts), max_epochs=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        module = Dealt(4 if preset == "cyclic_dp" else 8)
        trainer.fit(module)
        ranks = {
            trainer.global_rank, strategy.cluster_environment.global_rank(), dist.get_rank(),
            rank_zero_only.rank,
        }  # fmt: skip
        assert len(ranks) == 1
        assert (trainer.local_rank, trainer.node_rank) == (0, launched_as)
        found.append({"rank": ranks.pop(), "seen": module.seen, "weights": weights_of(module)})
    return found


IN_TURN = ["a", "b", "a", "b"]


@pytest.mark.parametrize("preset", ["cyclic_dp", "1f1b"])
def test_neighbours_share_a_host_and_no_bit_changes(preset: str) -> None:
    as_launched = processes.run(partial(fit, preset=preset), 4, IN_TURN, "launch")
    renumbered = processes.run(partial(fit, preset=preset), 4, IN_TURN, "auto")
    assert [rank["rank"] for (rank,) in as_launched] == [0, 1, 2, 3]
    assert [rank["rank"] for (rank,) in renumbered] == [0, 2, 1, 3]
    for (rank,) in renumbered:
        (same,) = as_launched[rank["rank"]]
        assert rank["seen"] == same["seen"]
        assert_same(rank["weights"], same["weights"])


def test_replicas_of_a_pipeline_are_on_a_host_each() -> None:
    wide = partial(fit, preset="1f1b", width=2)
    as_launched = processes.run(wide, 4, IN_TURN, "launch")
    renumbered = processes.run(wide, 4, IN_TURN, "auto")
    assert [rank["rank"] // 2 for (rank,) in renumbered] == [0, 1, 0, 1]
    for (rank,) in renumbered:
        assert_same(rank["weights"], as_launched[rank["rank"]][0]["weights"])


def test_without_a_ring_ranks_keep_their_numbers() -> None:
    ranks = processes.run(partial(fit, preset="cyclic_zero"), 4, IN_TURN, "auto")
    assert [rank["rank"] for (rank,) in ranks] == [0, 1, 2, 3]


def test_a_list_of_hosts_is_followed_and_later_fits_of_the_process_have_its_numbers() -> None:
    ranks = processes.run(fit, 3, ["a", "b", "c"], ["c", "b", "a"], "auto", "launch")
    assert [[fit["rank"] for fit in rank] for rank in ranks] == [[0] * 3, [2] * 3, [1] * 3]


def refused(orders: list[Any]) -> str:
    try:
        fit(["a", "b"], orders[processes.here().rank])
    except (ConfigurationError, StepError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_every_rank_refuses_a_list_that_does_not_name_the_hosts() -> None:
    for text in processes.run(refused, 2, [["a", "node7"]] * 2):
        assert text.startswith(
            "ConfigurationError: rank_order=['a', 'node7'] names no rank's host with ['node7'] "
            "and leaves out ['b']; allowed: each host of this run once"
        )


def test_every_rank_refuses_orders_that_differ() -> None:
    for text in processes.run(refused, 2, ["auto", "launch"]):
        assert text.startswith("StepError: ranks differ in the arguments of CyclicStrategy: ")
        assert "rank_order='auto'" in text
        assert "rank_order='launch'" in text


def by_hand(out: Path) -> None:
    launched.fit(out, CyclicStrategy("cyclic_dp"), devices=1, num_nodes=4)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_of_torchrun_are_renumbered_also_when_they_are_started_again(
    tmp_path: Path,
) -> None:
    command = Command(
        arguments=[
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4",
            "--max-restarts=1", dealt.__file__, str(tmp_path / "out"), ",".join(IN_TURN), "3",
        ],
        env={"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    with Commands({"torchrun": command}) as running:
        output = running.output("torchrun")
    for old, new in enumerate([0, 2, 1, 3]):
        assert f"launched as {old}, rank {new}\n" in output
    assert output.count("2 of 4 hops of the ring go from host to host (4 as launched)") == 2
    processes.run(by_hand, 4, tmp_path / "expected")
    assert_same(torch.load(tmp_path / "out"), torch.load(tmp_path / "expected"))
