"""Steps of evaluation that go another way than training, and predictions that are written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import BasePredictionWriter

from tests import processes
from tests.conformance import modules as m
from tests.conformance.cases import CASES
from tests.conformance.harness import evaluation_batches, loader
from tests.corpus import make_trainer

pytestmark = pytest.mark.multi

PLACES = {"1f1b": {"num_micro": 2}, "pipedream_2bw": {"num_micro": 2}}


def refusal(preset: str) -> tuple[str, int]:
    """Return why a fit is refused, and how many batches were trained on before."""
    module = m.ReversedValidation()
    strategy = {"preset": preset, "stages": ["net.2"], "memory_limit_bytes": 650, **PLACES[preset]}
    trainer = make_trainer(strategy, max_epochs=1)
    try:
        trainer.fit(module, loader(CASES["plain"], preset), evaluation_batches(CASES["plain"]))
    except Exception as error:
        return f"{type(error).__name__}: {error}", trainer.global_step
    return "", -1


@pytest.mark.parametrize("preset", PLACES)
def test_a_validation_that_does_not_fit_is_refused_before_the_first_step(preset: str) -> None:
    for text, num_steps in processes.run(refusal, 2, preset):
        assert "validation_step goes another way than training_step and runs the whole" in text
        assert "memory_limit_bytes=650" in text
        assert num_steps == 0


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


def predict(folder: Path, width: int, trains: bool) -> int:
    """Predict on this rank; return the number of predictions that it is given."""
    strategy = {"preset": "1f1b", "stages": ["net.2"], "width": width, "num_micro": 2}
    module, case, writer = m.Plain(), CASES["plain"], Writer(folder)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[writer])
    if trains:
        trainer.fit(module, loader(case, "1f1b"))
    found = trainer.predict(module, evaluation_batches(case))
    assert "write_on_batch_end" not in vars(writer)
    return len(found)


@pytest.mark.parametrize(
    ("num_ranks", "width", "trains"), [(2, 1, True), (2, 1, False), (4, 2, False)]
)
def test_each_prediction_is_written_once(
    tmp_path: Path, num_ranks: int, width: int, trains: bool
) -> None:
    assert processes.run(predict, num_ranks, tmp_path, width, trains) == [2] * num_ranks
    lines = (tmp_path / "predictions").read_text().split("\n")
    assert sorted(lines) == sorted(["", *["batch 0", "batch 1", "epoch"] * width])
