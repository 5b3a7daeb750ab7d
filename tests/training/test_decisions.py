"""Pipelines without a flush decide by what all ranks know: metrics, and whether to stop."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from lightning_cyclic.errors import CyclicError
from tests.harness import processes
from tests.harness.trainers import make_trainer, strategy_of
from tests.references.delayed import Chain, loader

pytestmark = pytest.mark.multi


class Decides(Chain):
    """Logs its loss, and lets one rank stop.

    Args:
        stops: by step and rank, where trainer.should_stop is set.
        plateau: whether the learning rate is decided by the loss of each step.
    """

    def __init__(self, stops: tuple[int, int] | None = None, *, plateau: bool = False) -> None:
        super().__init__()
        self.stops, self.plateau = stops, plateau

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx, self.global_rank) == self.stops:
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.plateau:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "loss"}]


def decide(
    kwargs: dict[str, Any], callbacks: list[Any], folder: Path, flags: dict[str, Any]
) -> tuple[str, list[str], int]:
    """Return the error of a fit, the files that were written, and the steps made."""
    strategy = strategy_of({"preset": "cyclic_pipeline", "num_microbatches": 2})
    strategy._timeout = timedelta(seconds=4 if "stops" in kwargs else 20)
    flags |= {"enable_checkpointing": any(isinstance(x, ModelCheckpoint) for x in callbacks)}
    trainer = make_trainer(strategy, max_epochs=2, callbacks=callbacks, **flags)
    text = ""
    try:
        trainer.fit(Decides(**kwargs), loader(2, 4), loader(2, 1))
    except CyclicError as error:
        text = str(error)
    return text, sorted(path.name for path in folder.iterdir()), trainer.global_step


@pytest.mark.parametrize(
    ("who", "kwargs", "callback", "flags"),
    [
        ("ModelCheckpoint", {}, ModelCheckpoint, {"every_n_train_steps": 1}),
        ("EarlyStopping", {}, EarlyStopping, {}),
        ("ReduceLROnPlateau", {"plateau": True}, None, {}),
    ],
)
def test_what_decides_within_an_epoch_by_a_metric_of_its_steps_is_refused(
    who: str, kwargs: Any, callback: Any, flags: Any, tmp_path: Path
) -> None:
    flags |= {"dirpath": tmp_path} if callback is ModelCheckpoint else {}
    callbacks = [callback(monitor="loss", **flags)] if callback else []
    often = {"val_check_interval": 2} if callback is EarlyStopping else {}
    for text, files, _ in processes.run(decide, 2, kwargs, callbacks, tmp_path, often):
        assert text.startswith(f"{who} decides within an epoch by 'loss', a metric of the steps")
        assert files == []


def test_what_decides_by_validation_or_at_the_end_of_an_epoch_decides_alike(
    tmp_path: Path,
) -> None:
    callbacks = [
        ModelCheckpoint(tmp_path, "a{step}", monitor="val_loss", every_n_train_steps=3),
        ModelCheckpoint(tmp_path, "b{step}", monitor="loss", save_on_train_epoch_end=True),
        EarlyStopping(monitor="loss", check_on_train_epoch_end=True, divergence_threshold=0.0),
    ]
    flags = {"val_check_interval": 2}
    for text, files, steps in processes.run(decide, 2, {}, callbacks, tmp_path, flags):
        assert (text, files, steps) == ("", ["astep=3.ckpt", "bstep=4.ckpt"], 4)


@pytest.mark.parametrize(
    ("stops", "words"),
    [
        (
            (1, 1),
            r"rank 1 on \S+ .*(waited 4 s for rank 0 on \S+ .*|waits itself for all ranks )to "
            "stop training as rank 1 does, whose trainer.should_stop is set",
        ),
        ((3, 0), "trainer.should_stop is set on rank 0, and not on rank 1; allowed: "),
    ],
    ids=["in an epoch", "behind its last batch"],
)
def test_a_rank_that_stops_alone_is_named_soon(
    stops: tuple[int, int], words: str, tmp_path: Path
) -> None:
    kwargs = {"stops": stops}
    for text, *_ in processes.run(decide, 2, kwargs, [], tmp_path, {}, time_limit_s=30):
        assert re.search(words, text), text
