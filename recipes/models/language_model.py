"""Language modelling: a network that says the next token, judged by perplexity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.text import Perplexity

from recipes.models.decay import decay_groups


@final
class LanguageModel(L.LightningModule):
    """Predict the next token; logs ``train_loss``, ``val_loss`` and ``val_perplexity``.

    Args:
        net: A Hugging Face causal language model.
        optimizer: Makes the optimizer from param groups.
        warmup: Share of the updates in which the learning rate rises from zero; then it falls to
            zero along a line.
    """

    def __init__(
        self, net: nn.Module, *, optimizer: Callable[..., Optimizer], warmup: float
    ) -> None:
        super().__init__()
        self.net = net
        self.make_optimizer = optimizer
        self.warmup = warmup
        self.val_perplexity = Perplexity()

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (N, T) to logits (N, T, vocab_size)."""
        return self.net(tokens).logits

    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of windows (N, T + 1)."""
        logits = self(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, windows: Tensor, batch_idx: int) -> None:
        """Add the batch to the epoch's loss and perplexity over all workers."""
        logits, targets = self(windows[:, :-1]), windows[:, 1:]
        self.val_perplexity.update(logits, targets)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Make the optimizer, without decay on LayerNorm and biases, and its schedule."""
        optimizer = self.make_optimizer(decay_groups(self))
        total = int(self.trainer.estimated_stepping_batches)
        rising = max(1, round(self.warmup * total))

        def factor(step: int) -> float:
            left = (total - step) / max(1, total - rising)
            return min((step + 1) / rising, max(0.0, left))

        scheduler = {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}
