"""A classifier of blocks that has a bit of everything, and asks for a value in each step."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy


class Blocks(LightningModule):
    """BatchNorm, dropout, a metric, values that are logged, a returned tensor, and Adam."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1))
            for _ in range(4)
        ]
        self.net = nn.Sequential(*blocks, nn.Linear(6, 3))
        self.unused = nn.Linear(1, 1)  # whose gradients are missing
        self.accuracy = MulticlassAccuracy(num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        scores = self.net(x)
        loss = F.cross_entropy(scores, y)
        self.accuracy(scores.detach(), y)
        self.log("accuracy", self.accuracy)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("rows", float(len(x)))
        self.seen = loss.item()  # the user's own question
        return {"loss": loss, "scores": scores.detach()}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches(num: int) -> DataLoader[Any]:
    """Return the loader of so many batches."""
    g = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g))
        for _ in range(num)
    ]
    return DataLoader(made, batch_size=None)  # type: ignore[arg-type]
