"""What evaluation computes is the same on every rank, and what is predicted is written once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.conformance.cases import CASES
from tests.conformance.harness import evaluation_batches
from tests.conformance.harness import loader as plain_batches
from tests.conformance.modules import Plain
from tests.harness import processes
from tests.harness.rows import more
from tests.harness.runs import trained
from tests.harness.trainers import make_trainer

pytestmark = pytest.mark.multi

# ---------------------------------------------------------------------- metrics


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


def loaders(*given: tuple[int, int]) -> list[DataLoader[Any]]:
    return [loader(*each) for each in given]


def of_test(trainer: Any, module: Evaluated) -> dict[str, float]:
    """Return what is logged by a test behind the fit."""
    trainer.test(module, loaders((4, 4), (5, 2)), verbose=False)
    return {k: float(x) for k, x in trainer.callback_metrics.items()}


@pytest.mark.parametrize("preset", ["1f1b", more("cyclic_pipeline")])
def test_metrics_of_every_dataloader_are_the_same_on_every_rank(preset: str) -> None:
    strategy = {"preset": preset, "stages": ["net.2"], "num_microbatches": 1}
    data = {"data": partial(loader, 1, 3), "valid": partial(loaders, (2, 4), (3, 9))}
    alone, *ranks = [
        end for n in (1, 2) for end in trained(Evaluated, strategy, n, look=of_test, **data)
    ]
    assert len(alone.found) == 4
    assert len(set(alone.found.values())) > 1
    for rank in ranks:
        assert rank.found == alone.found
        assert rank.metrics == alone.metrics


# ---------------------------------------------------------------------- predictions


class Writer(BasePredictionWriter):
    """Appends a line for each prediction."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.file = folder / "predictions"

    def write_on_batch_end(self, trainer: Any, *args: Any) -> None:
        with self.file.open("a") as file:
            file.write(f"batch {args[4]}\n")

    def write_on_epoch_end(self, trainer: Any, *args: Any) -> None:
        with self.file.open("a") as file:
            file.write("epoch\n")


def predict(folder: Path, replicas: int, trains: bool) -> int:
    """Predict on this rank; return the number of predictions that it is given."""
    strategy = {"preset": "1f1b", "stages": ["net.2"], "replicas": replicas, "num_microbatches": 2}
    module, case, writer = Plain(), CASES["plain"], Writer(folder)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[writer])
    if trains:
        trainer.fit(module, plain_batches(case, "1f1b"))
    found = trainer.predict(module, evaluation_batches(case))
    assert "write_on_batch_end" not in vars(writer)
    return len(found)


@pytest.mark.parametrize(
    ("num_ranks", "replicas", "trains"), [(2, 1, True), more(2, 1, False), (4, 2, False)]
)
def test_each_prediction_is_written_once(
    tmp_path: Path, num_ranks: int, replicas: int, trains: bool
) -> None:
    assert processes.run(predict, num_ranks, tmp_path, replicas, trains) == [2] * num_ranks
    lines = (tmp_path / "predictions").read_text().split("\n")
    assert sorted(lines) == sorted(["", *["batch 0", "batch 1", "epoch"] * replicas])
