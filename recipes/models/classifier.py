"""Classification: any network that maps images or texts to logits, trained on cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import MulticlassAccuracy

from recipes.models.decay import decay_groups

Batch = tuple[Tensor, Tensor]  # inputs (N, ...), labels (N,)


@final
class Classifier(L.LightningModule):
    """Train a network on labelled inputs; logs ``train_loss``, ``val_loss``, ``val_accuracy``.

    Args:
        net: Maps inputs (N, ...), say images (N, C, H, W), to logits (N, num_classes).
        num_classes: Number of classes.
        optimizer: Makes the optimizer from param groups.
        scheduler: Makes the learning-rate schedule from the optimizer; it steps every epoch.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        num_classes: int,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler],
    ) -> None:
        super().__init__()
        self.net = net
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, ...) to logits (N, num_classes)."""
        return self.net(inputs)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        inputs, labels = batch
        loss = F.cross_entropy(self(inputs), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the batch to the epoch's loss and accuracy over all workers."""
        inputs, labels = batch
        logits = self(inputs)
        self.val_accuracy.update(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Make the optimizer, without decay on BatchNorm and biases, and its schedule."""
        optimizer = self.make_optimizer(decay_groups(self))
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}
