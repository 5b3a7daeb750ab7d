"""Predictions of pipelines, which all ranks have, are written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import BasePredictionWriter

from tests.conformance import modules as m
from tests.conformance.cases import CASES
from tests.conformance.harness import evaluation_batches, loader
from tests.harness import processes
from tests.harness.trainers import make_trainer

pytestmark = pytest.mark.multi


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
    module, case, writer = m.Plain(), CASES["plain"], Writer(folder)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[writer])
    if trains:
        trainer.fit(module, loader(case, "1f1b"))
    found = trainer.predict(module, evaluation_batches(case))
    assert "write_on_batch_end" not in vars(writer)
    return len(found)


@pytest.mark.parametrize(
    ("num_ranks", "replicas", "trains"), [(2, 1, True), (2, 1, False), (4, 2, False)]
)
def test_each_prediction_is_written_once(
    tmp_path: Path, num_ranks: int, replicas: int, trains: bool
) -> None:
    assert processes.run(predict, num_ranks, tmp_path, replicas, trains) == [2] * num_ranks
    lines = (tmp_path / "predictions").read_text().split("\n")
    assert sorted(lines) == sorted(["", *["batch 0", "batch 1", "epoch"] * replicas])
