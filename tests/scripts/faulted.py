"""A user's script under torchrun, which tests/scripts/faults.py disturbs.

python -m tests.scripts.faulted FOLDER PRESET NODES DEVICES STEPS LIMIT_S

FOLDER/ranks/R      process number of rank R, as soon as it trains
FOLDER/step         steps that rank 0 has made
FOLDER/checkpoints  a file of each step
FOLDER/done         the last weights
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cyclic.registration import make_strategy
from tests.harness.interrupted import Noisy

STEP_S = 0.05
_ROOM = 1 << 24  # elements: so large that the system is asked each time, which may refuse them


class Net(LightningModule):
    """Layers with buffers that each step changes, and dropout; a step takes memory and time."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2)]
        self.net = nn.Sequential(*layers, nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        torch.empty(_ROOM)
        time.sleep(STEP_S)
        return F.mse_loss(self.net(batch[0]), batch[1])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            Noisy(7 * 8 * 4), batch_size=8, shuffle=True, drop_last=True, num_workers=1,
            multiprocessing_context="fork",
        )  # fmt: skip

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Progress(Callback):
    """Say who trains, and how far it has come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        _write(self.folder / "ranks" / str(trainer.global_rank), str(os.getpid()))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            _write(self.folder / "step", str(trainer.global_step))


def main(
    folder: Path, preset: str, num_nodes: int, devices: int, num_steps: int, limit_s: float
) -> None:
    seed_everything(7, workers=True, verbose=False)
    saver = ModelCheckpoint(
        folder / "checkpoints", "{step}", every_n_train_steps=1, save_top_k=-1,
        save_last=True, enable_version_counter=False,
    )  # fmt: skip
    strategy: Any = make_strategy(preset, timeout=timedelta(seconds=limit_s))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", num_nodes=num_nodes, devices=devices,
        max_steps=num_steps, max_epochs=-1, callbacks=[Progress(folder), saver], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Net()
    trainer.fit(module, ckpt_path="last")
    if trainer.is_global_zero:
        part = folder / "part"
        torch.save(module.state_dict(), part)
        part.replace(folder / "done")


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = sys.argv[1:]
    main(Path(given[0]), given[1], *map(int, given[2:5]), float(given[5]))  # type: ignore[call-arg]
