"""LightningModules after well-known examples; no line of them knows of a strategy.

Noise and masks come with the batch, so that a plain Trainer draws the same.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.conformance.modules import CLASSES, ROWS, SIZE, Plain, SharedStep, vectors

PIXELS, SAMPLES, WORDS = 8, 160, 32


def _random(k: int) -> torch.Generator:
    return torch.Generator().manual_seed(k)


def images(k: int) -> tuple[Tensor, Tensor]:
    """Return grey images and their classes."""
    g = _random(k)
    return torch.rand(ROWS, 1, PIXELS, PIXELS, generator=g), torch.arange(ROWS) % CLASSES


def noisy_images(k: int) -> dict[str, Tensor]:
    """Return images, noise to be found in them, and at which time of its diffusion."""
    g = _random(k)
    x, _ = images(k)
    return {
        "x": x, "noise": torch.randn(x.shape, generator=g),
        "time": torch.randint(0, 10, (ROWS,), generator=g),
    }  # fmt: skip


def sounds(k: int) -> dict[str, Tensor]:
    """Return waves and their classes."""
    waves = torch.randn(2, SAMPLES, generator=_random(k))
    return {"input_values": waves, "labels": torch.arange(2) % CLASSES}


def tagged_words(k: int) -> dict[str, Tensor]:
    """Return texts of several lengths, and a class for each word."""
    words = torch.randint(1, WORDS, (2, 6), generator=_random(k))
    mask = torch.arange(6)[None] < torch.tensor([[6], [3 + k % 3]])
    return {
        "input_ids": words * mask, "attention_mask": mask.long(),
        "labels": torch.where(mask, words % CLASSES, -100),
    }  # fmt: skip


def two_views(k: int) -> dict[str, Any]:
    """Return what two loaders give that are read together."""
    return {"left": vectors(k), "right": vectors(k + 1000)}


class Autoencoder(LightningModule):
    """Encodes and decodes images in its step, and encodes alone in forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        size = PIXELS * PIXELS
        self.encoder = nn.Sequential(nn.Linear(size, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, size))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x.flatten(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_norm", self(batch[0]).norm())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Template(LightningModule):
    """Is made from parts that are given, and keeps its best metric over epochs (Hydra template).

    Args:
        net: classifies images.
        optimizer: makes one of parameters.
        scheduler: makes one of an optimizer.
    """

    def __init__(self, net: nn.Module, optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"], logger=False)
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc, self.val_acc = MulticlassAccuracy(CLASSES), MulticlassAccuracy(CLASSES)
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, guesses, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(guesses, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, guesses, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(guesses, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams["optimizer"](params=self.trainer.model.parameters())
        scheduler = self.hparams["scheduler"](optimizer=optimizer)
        watched = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": watched}


def template() -> Template:
    """Return the template's module with a net of dense layers."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(PIXELS * PIXELS, 16), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES),
    )  # fmt: skip
    reduce = torch.optim.lr_scheduler.ReduceLROnPlateau
    return Template(
        net,
        partial(torch.optim.Adam, lr=1e-2, weight_decay=1e-3),
        partial(reduce, mode="min", factor=0.1, patience=0),
    )


class Denoiser(LightningModule):
    """Finds the noise in images, told at which time of their diffusion they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
        self.enter = nn.Conv2d(1, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.leave = nn.Conv2d(16, 1, 3, padding=1)
        self.register_buffer("kept", torch.linspace(0.99, 0.5, 10).cumprod(0))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(-math.log(100) * torch.arange(4) / 4)
        told = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        high = self.enter(x) + told
        low = self.down(high)
        low = low + self.middle(low + told)
        return self.leave(torch.cat([high, self.up(low)], 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = self.kept[batch["time"]][:, None, None, None]
        noisy = kept.sqrt() * batch["x"] + (1 - kept).sqrt() * batch["noise"]
        loss = F.mse_loss(self(noisy, batch["time"]), batch["noise"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch["noise"]
        for time in (9, 5, 0):  # draws a picture in three steps
            x = x - 0.1 * self(x, torch.full((len(x),), time))
        self.log("val_drawn", x.mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Contrasted(Plain):
    """Tells two views of the same from those of others, with all others of its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        left = F.normalize(self(batch["left"][0]))
        right = F.normalize(self(batch["right"][0]))
        return F.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_near", (self(batch["left"][0]) - self(batch["right"][0])).norm())


class Measured(SharedStep):
    """Says how much it computes, for those who measure."""

    @property
    def flops_per_batch(self) -> int:
        return 6 * ROWS * sum(p.numel() for p in self.parameters())


class HeadOnly(LightningModule):
    """Trains a Hugging Face model for a task on the loss that it computes."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def audio_classifier() -> HeadOnly:
    """Return a wav2vec 2.0 that classifies sounds, without what is random in it."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, classifier_proj_size=8, num_labels=CLASSES,
        hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0, apply_spec_augment=False,
    )  # fmt: skip
    return HeadOnly(partial(Wav2Vec2ForSequenceClassification, config))


def tagger() -> HeadOnly:
    """Return a DistilBERT that classifies words."""
    from transformers import DistilBertConfig, DistilBertForTokenClassification

    config = DistilBertConfig(
        vocab_size=WORDS, max_position_embeddings=8, dim=SIZE, n_layers=2, n_heads=2,
        hidden_dim=16, num_labels=CLASSES, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return HeadOnly(partial(DistilBertForTokenClassification, config))
