"""A user's script, which test_launchers.py starts in every way that there is.

python tests/scripts/launched.py OUT STRATEGY                        one word for the Trainer
python tests/scripts/launched.py OUT cli --trainer.strategy=...      LightningCLI
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS = 6


class Tiny(LightningModule):
    """Three layers with BatchNorm, whose weights and data depend on nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(),
            nn.Linear(8, 2),
        )  # fmt: skip

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        g = torch.Generator().manual_seed(2)
        x, y = torch.randn(8 * NUM_STEPS, 6, generator=g), torch.arange(8 * NUM_STEPS) % 2
        return DataLoader(TensorDataset(x, y), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def make_trainer(strategy: object, **place: int) -> Trainer:
    return Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **place,
    )  # fmt: skip


def fit(out: Path, strategy: object, **place: int) -> None:
    trainer, module = make_trainer(strategy, **place), Tiny()
    trainer.fit(module)
    save(out, trainer, module)


def save(out: Path, trainer: Trainer, module: LightningModule) -> None:
    if trainer.is_global_zero:
        torch.save(module.state_dict(), out)


def main(out: Path, strategy: str, *arguments: str) -> None:
    if strategy != "cli":
        fit(out, strategy, devices=2)
        return
    cli = LightningCLI(Tiny, args=list(arguments), run=False, save_config_callback=None)
    cli.trainer.fit(cli.model)
    save(out, cli.trainer, cli.model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
