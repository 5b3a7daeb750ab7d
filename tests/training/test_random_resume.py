"""Hooks, steps and collate functions draw behind a checkpoint what they would have drawn."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from tests.harness import processes
from tests.harness.trainers import Said, assert_same, make_trainer, weights_of

pytestmark = pytest.mark.multi
ROWS, PER_EPOCH, EPOCHS = 24, 4, 2
STAGES = {"stages": ["net.2"], "num_microbatches": 2}
PIPELINE = {"preset": "1f1b", **STAGES}
REPLICAS = {"preset": "cyclic_dp", "stages": 2}


def drawn() -> list[float]:
    """Draw from every generator; an odd number of normal ones, as they are made in pairs."""
    plain = [random.random(), random.gauss(0.0, 1.0), np.random.rand(), np.random.randn()]
    return [*plain, float(torch.rand(()))]


class Drawing(LightningModule):
    """Draws wherever it may, and notes what it draws outside of steps.

    Args:
        between: whether it draws between epochs, too; Lightning calls no such hook in a run that
            goes on behind a batch.
    """

    def __init__(self, between: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.seen: list[list[float]] = []
        self.between = between

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = 1 + 0.1 * sum(self.seen[-1]) + 0.1 * sum(drawn())
        return scale * F.mse_loss(self.net(batch[0]), batch[1])

    def on_train_start(self) -> None:
        drawn()  # which is called anew in each run

    def on_train_epoch_start(self) -> None:
        if self.between:
            self.seen.append(drawn())

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen.append(drawn())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def collate(rows: list[Any]) -> list[Tensor]:
    x, y = default_collate(rows)
    return [x + sum(drawn()), y]


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def fit(
    strategy: Any, between: bool, folder: str, goes_on_from: str | None = None
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, generator=g), torch.randn(1, generator=g)) for _ in range(ROWS)]
    module, rank = Drawing(between), processes.here().rank
    seed(100 + 3 * rank + 17 * (goes_on_from is not None))
    savers = [
        ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1),
        ModelCheckpoint(folder, "{epoch}", save_top_k=-1, every_n_epochs=1),
    ]
    trainer = make_trainer(
        strategy, max_epochs=EPOCHS, callbacks=savers, enable_checkpointing=True,
        limit_train_batches=PER_EPOCH,
    )  # fmt: skip
    loader = DataLoader(data, 2, shuffle=True, collate_fn=collate)
    path = str(Path(folder, f"{goes_on_from}.ckpt")) if goes_on_from else None
    trainer.fit(module, loader, ckpt_path=path)
    return {"weights": weights_of(module), "seen": module.seen}


def assert_goes_on(resumed: Any, expected: Any, num_left: int) -> None:
    assert expected[0]["seen"] != expected[1]["seen"]
    for rank, other in zip(resumed, expected, strict=True):
        assert rank["seen"] == other["seen"][-num_left:]
        assert_same(rank["weights"], other["weights"])


@pytest.mark.parametrize("strategy", [REPLICAS, PIPELINE], ids=lambda s: str(s["preset"]))
def test_behind_a_batch(strategy: dict[str, Any], tmp_path: Path) -> None:
    expected = processes.run(fit, 2, strategy, False, str(tmp_path))
    for stop in (PER_EPOCH + 2, PER_EPOCH):
        resumed = processes.run(fit, 2, strategy, False, str(tmp_path), f"step={stop}")
        assert_goes_on(resumed, expected, EPOCHS * PER_EPOCH - stop)


@pytest.mark.parametrize("strategy", [REPLICAS, PIPELINE], ids=lambda s: str(s["preset"]))
def test_behind_an_epoch(strategy: dict[str, Any], tmp_path: Path) -> None:
    expected = processes.run(fit, 2, strategy, True, str(tmp_path))
    resumed = processes.run(fit, 2, strategy, True, str(tmp_path), "epoch=0")
    assert_goes_on(resumed, expected, PER_EPOCH + 1)


def fit_alone(strategy: Any, folder: str, goes_on_from: str) -> list[str]:
    said = Said()
    fit(strategy, False, folder, goes_on_from)
    return [line for line in said.lines if "random states" in line]


def test_another_number_of_ranks_is_said_once(tmp_path: Path) -> None:
    processes.run(fit, 2, PIPELINE, False, str(tmp_path))
    (said,) = processes.run(fit_alone, 1, PIPELINE, str(tmp_path), "step=6")
    assert [line.partition(":")[0] for line in said] == [
        "The checkpoint has the random states of 2 ranks, and this run has 1"
    ]
