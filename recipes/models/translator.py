"""Translation: a network that says the next word, trained on pairs of sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics.text import Perplexity, SacreBLEUScore

from recipes.datamodules.tokens import BEGIN, END, PAD
from recipes.models.gnmt import GNMT

Batch = tuple[Tensor, Tensor]  # source (N, S) and target (N, T), from BEGIN to END, then PAD


@final
class Translator(L.LightningModule):
    """Train on pairs of sentences; logs ``train_loss``, ``val_loss`` and ``val_perplexity``.

    Testing translates, word by word, and logs ``test_bleu``. That asks the network again for each
    word, with the last word as input, so it needs the whole network: test on one device.

    Args:
        net: Maps source and target to the logits of the next words.
        optimizer: Makes the optimizer from parameters.
        smoothing: Share of the probability that the labels spread over all words.
        max_length: Words of the longest translation.
    """

    def __init__(
        self,
        net: GNMT,
        *,
        optimizer: Callable[..., Optimizer],
        smoothing: float = 0.1,
        max_length: int = 80,
    ) -> None:
        super().__init__()
        self.net = net
        self.make_optimizer = optimizer
        self.smoothing = smoothing
        self.max_length = max_length
        self.val_perplexity = Perplexity(ignore_index=PAD)
        self.test_bleu = SacreBLEUScore()

    def loss(self, logits: Tensor, words: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the mean cross-entropy of the words (N, T), padding left out."""
        return F.cross_entropy(
            logits.flatten(0, 1), words.flatten(), ignore_index=PAD, label_smoothing=smoothing
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the batch, labels smoothed."""
        source, target = batch
        logits = self.net(source, target[:, :-1])
        loss = self.loss(logits, target[:, 1:], self.smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the batch to the epoch's loss and perplexity over all workers."""
        source, target = batch
        logits, words = self.net(source, target[:, :-1]), target[:, 1:]
        self.val_perplexity.update(logits, words)
        self.log("val_loss", self.loss(logits, words), prog_bar=True, sync_dist=True)
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Translate the batch and compare with the target."""
        source, target = batch
        decode = self.trainer.datamodule.decode
        references = [[sentence] for sentence in decode(target)]
        self.test_bleu.update(decode(self.translate(source)), references)
        self.log("test_bleu", self.test_bleu)

    def translate(self, source: Tensor) -> Tensor:
        """Map source (N, S) to translations (N, at most max_length + 1), the likeliest words."""
        memory = self.net.encode(source)
        words = torch.full_like(source[:, :1], BEGIN)
        ended = torch.zeros_like(words, dtype=torch.bool)
        while words.shape[1] <= self.max_length and not ended.all():
            next_words = self.net.decode(memory, source, words)[:, -1:].argmax(dim=-1)
            words = torch.cat([words, next_words.masked_fill(ended, PAD)], dim=1)
            ended |= next_words == END
        return words

    def configure_optimizers(self) -> dict[str, Any]:
        """Make the optimizer; the learning rate is constant."""
        return {"optimizer": self.make_optimizer(self.parameters())}
