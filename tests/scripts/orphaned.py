"""A user's script that trains for minutes; test_ends.py kills who started it.

python -m tests.scripts.orphaned FOLDER PRESET
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_cyclic.registration import make_strategy
from tests.scripts import launched


class Slow(launched.Tiny):
    """Says in which process a step was made, and takes its time.

    Args:
        folder: for one file of each rank.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.6)  # so long that all look for words behind the end of the store
        (self.folder / str(os.getpid())).touch()
        return super().training_step(batch, batch_idx)


def main(folder: str, preset: str) -> None:
    strategy: Any = make_strategy(preset, timeout=timedelta(seconds=20))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=10_000, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Slow(Path(folder)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
