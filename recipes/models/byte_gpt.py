"""A GPT-2 of any size over bytes: Hugging Face's module from a configuration, no download."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import GPT2Config, GPT2LMHeadModel

from recipes.models.decay import decay_groups


def gpt2(
    *,
    vocab_size: int,
    block_size: int,
    layers: int,
    heads: int,
    width: int,
    dropout: float = 0.0,
    tied: bool = True,
) -> nn.Module:
    """Make a GPT-2 with random weights.

    Args:
        vocab_size: Number of tokens; 256 for bytes.
        block_size: Longest sequence, in tokens.
        layers: Number of transformer blocks.
        heads: Attention heads of a block.
        width: Size of the embedding, a multiple of ``heads``.
        dropout: Share that is dropped of embeddings, attention and residual branches; off by
            default, as the small runs of the recipes see every window once.
        tied: Whether input and output embeddings are one parameter.
    """
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=block_size,
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        tie_word_embeddings=tied,
    )
    return GPT2LMHeadModel(config)


@final
class ByteLanguageModel(L.LightningModule):
    """Predict the next byte; logs ``train_loss``, ``val_loss``, ``val_bits_per_byte``.

    Args:
        net: A Hugging Face causal language model.
        optimizer: Makes the optimizer from param groups.
        scheduler: Makes the learning-rate schedule from the optimizer and ``total_steps``; it
            steps with every update.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., LRScheduler],
    ) -> None:
        super().__init__()
        self.net = net
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per byte, of windows (N, block_size + 1)."""
        logits = self.net(windows[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of the batch."""
        loss = self.loss(windows)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, windows: Tensor, batch_idx: int) -> None:
        """Add the batch to the epoch's loss over all workers."""
        loss = self.loss(windows)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_bits_per_byte", loss / math.log(2), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Make the optimizer, without decay on LayerNorm and biases, and its schedule."""
        optimizer = self.make_optimizer(decay_groups(self))
        total_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = self.make_scheduler(optimizer, total_steps=total_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
