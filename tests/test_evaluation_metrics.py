"""Metrics that only evaluation updates are the same on every rank, for every dataloader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_cyclic.registration import make_strategy
from tests.harness import processes
from tests.harness.trainers import make_trainer

pytestmark = pytest.mark.multi


class Evaluated(LightningModule):
    """A classifier whose metrics are updated in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.scores = nn.ModuleList(
            MetricCollection([MulticlassAccuracy(4, average="micro"), MulticlassF1Score(4)])
            for _ in range(2)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int) -> None:
        scores = self.scores[dataloader_idx]
        scores.update(self.net(batch[0]), batch[1])
        self.log_dict(dict(scores.items()), on_epoch=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(seed: int, size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, 4, generator=generator)
    return DataLoader(TensorDataset(x, torch.arange(9) % 4), size)


def evaluated(preset: str) -> list[dict[str, float]]:
    """Return what is logged by validation within a fit, and by a test behind it."""
    module = Evaluated()
    trainer = make_trainer(
        make_strategy(preset, stages=["net.2"], num_microbatches=1), max_epochs=1
    )
    trainer.fit(module, loader(1, 3), [loader(2, 4), loader(3, 9)])
    logged = [{k: float(x) for k, x in trainer.callback_metrics.items()}]
    trainer.test(module, [loader(4, 4), loader(5, 2)], verbose=False)
    return [*logged, {k: float(x) for k, x in trainer.callback_metrics.items()}]


@pytest.mark.parametrize("preset", ["1f1b", "cyclic_pipeline"])
def test_every_rank_computes_the_same(preset: str) -> None:
    (alone,) = processes.run(evaluated, 1, preset)
    assert len(alone[0]) == len(alone[1]) == 4
    assert len({*alone[0].values(), *alone[1].values()}) > 4
    for rank in processes.run(evaluated, 2, preset):
        assert rank == alone
