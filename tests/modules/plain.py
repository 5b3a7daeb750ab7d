"""Ordinary LightningModules of plain torch, and their batches; none knows of a stage.

Each is deterministic, takes milliseconds per step, and logs its loss and a torchmetrics metric
in training_step. Batch k is made from k alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torchmetrics import MeanMetric, MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from tests.modules.huggingface import CLASSES, VOCABULARY, generator

Images = tuple[Tensor, Tensor]


class Logging(LightningModule):
    """Log the loss by step and by epoch, and a metric; update by AdamW.

    Args:
        metric: updated in every training step.
    """

    def __init__(self, metric: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.train_metric = metric

    def note(self, loss: Tensor, *seen: Tensor) -> Tensor:
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.train_metric(*seen)
        self.log("train_metric", self.train_metric, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.01)


def accuracy(num_classes: int = CLASSES) -> MulticlassAccuracy:
    return MulticlassAccuracy(num_classes, average="micro")


def images(k: int, size: int, side: int = 8) -> Images:
    g = generator(k)
    x = torch.randn((size, 3, side, side), generator=g)
    return x, torch.randint(0, CLASSES, (size,), generator=g)


# ---------------------------------------------------------------------- convolutions


class Block(nn.Module):
    """Add in place, as torchvision does."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module | None = None
        if stride > 1 or width_in != width:
            self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(Logging):
    """Cuts inside blocks leave a residual or a shortcut open."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(accuracy())
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(
            Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1), Block(16, 24, 2)
        )
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(x)), inplace=True))
        return self.fc(self.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1)))

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        return self.note(F.cross_entropy(logits, y), logits, y)

    def validation_step(self, batch: Images, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Images, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Images, batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (1 + t % 5) / 5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class UNet(Logging):
    """Glue code carries the skips past the bottom, and something is logged there."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(MeanSquaredError())
        self.down1 = nn.Conv2d(1, 6, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, 6)
        self.down2 = nn.Conv2d(6, 12, 3, padding=1)
        self.middle = nn.Conv2d(12, 12, 3, padding=1)
        self.dropout = nn.Dropout2d(dropout)
        self.up2 = nn.Conv2d(24, 6, 3, padding=1)
        self.up1 = nn.Conv2d(12, 6, 3, padding=1)
        self.head = nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.silu(self.norm1(self.down1(x)))
        second = F.silu(self.down2(F.max_pool2d(first, 2)))
        bottom = self.dropout(F.silu(self.middle(F.max_pool2d(second, 2))))
        self.log("bottom", bottom.detach().mean(), on_step=False, on_epoch=True)
        up = F.silu(self.up2(torch.cat([F.interpolate(bottom, scale_factor=2.0), second], 1)))
        up = F.silu(self.up1(torch.cat([F.interpolate(up, size=first.shape[-2:]), first], 1)))
        return x + self.head(up)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        clean = self(batch["noisy"])
        loss = F.mse_loss(clean, batch["clean"])
        return {"loss": self.note(loss, clean, batch["clean"])}


def noisy_images(k: int, size: int) -> dict[str, Tensor]:
    g = generator(k)
    clean = torch.rand((size, 1, 8, 8), generator=g)
    return {"clean": clean, "noisy": clean + 0.3 * torch.randn(clean.shape, generator=g)}


class Inception(Logging):
    """Call one branch after the other, as GoogLeNet does; all of them wait for the stem alone."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(accuracy())
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one = nn.Conv2d(8, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1))
        self.five = nn.Sequential(
            nn.Conv2d(8, 2, 1), nn.BatchNorm2d(2), nn.ReLU(inplace=True),
            nn.Conv2d(2, 4, 5, padding=2),
        )  # fmt: skip
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(8, 4, 1))
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(20, CLASSES)

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        x, y = batch
        x = F.relu(self.stem(x))
        parts = [branch(x) for branch in (self.one, self.three, self.five, self.pool)]
        x = F.relu(torch.cat(parts, 1)).mean((2, 3))
        logits = self.fc(self.dropout(x))
        return self.note(F.cross_entropy(logits, y), logits, y)


# ---------------------------------------------------------------------- recurrent


class LstmStack(Logging):
    """Hand (output, (h, c)) from one LSTM to the next."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(accuracy(VOCABULARY))
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.rnns = nn.ModuleList(nn.LSTM(12, 12, batch_first=True) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(12, VOCABULARY)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, state = self.embed(batch[:, :-1]), None
        for rnn in self.rnns:
            y, state = rnn(x, state)
            x = x + self.dropout(y)
        logits, labels = self.head(x).flatten(0, 1), batch[:, 1:].flatten()
        return self.note(F.cross_entropy(logits, labels), logits, labels)


def tokens(k: int, size: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (size, 9), generator=generator(k))


class PackedGru(Logging):
    """Pack, run two GRUs on the packed sequence, unpack; sizes depend on the lengths."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(accuracy())
        self.enter = nn.Linear(6, 12)
        self.first = nn.GRU(12, 12)
        self.second = nn.GRU(12, 12)
        self.dropout = nn.Dropout(dropout)
        self.mix = nn.Linear(12, 12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.dropout(torch.tanh(self.enter(x)))
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed, state = self.first(packed)
        packed, state = self.second(packed, state)
        y, lengths = pad_packed_sequence(packed, batch_first=True)
        mean = y.sum(1) / lengths.unsqueeze(1)
        return self.head(torch.tanh(self.mix(mean + state[-1])))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        x, lengths, y = batch
        logits = self(x, lengths)
        return self.note(F.cross_entropy(logits, y), logits, y)


def sequences(k: int, size: int) -> tuple[Tensor, ...]:
    g = generator(k)
    lengths = torch.randint(2, 8, (size,), generator=g)
    x = torch.randn((size, 7, 6), generator=g)
    return x, lengths, torch.randint(0, CLASSES, (size,), generator=g)


# ---------------------------------------------------------------------- calls twice, randomness


class Pair(NamedTuple):
    left: Tensor
    right: Tensor
    same: Tensor


class Siamese(Logging):
    """Call the encoder twice, log between encoder and head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(MeanMetric())
        self.encoder = nn.Sequential(
            nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 12)
        )
        self.compare = nn.Linear(24, 16)
        self.dropout = nn.Dropout(dropout)
        self.middle = nn.Linear(16, 16)
        self.out = nn.Linear(16, 1)

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        left, right = self.encoder(batch.left), self.encoder(batch.right)
        distance = (left - right).pow(2).sum(1)
        self.log_dict({"distance": distance.mean()}, on_step=False, on_epoch=True)
        x = torch.relu(self.compare(torch.cat([left * right, (left - right).abs()], 1)))
        x = self.out(torch.relu(self.middle(self.dropout(x)))).squeeze(1) - 0.1 * distance
        loss = F.binary_cross_entropy_with_logits(x, batch.same)
        return self.note(loss, ((x > 0) == batch.same.bool()).float().mean())


def vector_pairs(k: int, size: int) -> Pair:
    g = generator(k)
    left, right = torch.randn((2, size, 10), generator=g)
    return Pair(left, right, torch.randint(0, 2, (size,), generator=g).float())


class Vae(Logging):
    """Draw from the encoder's distribution in glue code."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(MeanMetric())
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Dropout(dropout))
        self.mean, self.log_variance = nn.Linear(24, 4), nn.Linear(24, 4)
        self.decoder = nn.Sequential(
            nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 16)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
        loss = F.mse_loss(self.decoder(z), x) + 0.01 * kl
        return self.note(loss, kl.detach())


def vectors(k: int, size: int) -> list[Tensor]:
    return [torch.randn((size, 16), generator=generator(k))]


# ---------------------------------------------------------------------- parameters in glue code


@dataclass
class Labelled:
    """A batch that is a dataclass; what is no tensor belongs to all of it."""

    x: Tensor
    y: Tensor
    names: list[str] = field(default_factory=list)
    scale: float = 1.0


class ClsToken(Logging):
    """Use parameters that belong to no called module: a token and positions."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(accuracy())
        self.embed = nn.Linear(12, 16)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 17, 16))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(16))  # used by glue code of the last stage
        self.head = nn.Linear(16, CLASSES)

    def training_step(self, batch: Labelled, batch_idx: int) -> Tensor:
        patches = F.unfold(batch.x, 2, stride=2).transpose(1, 2) * batch.scale
        x = self.embed(patches)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x[:, 0] * self.scale)
        return self.note(F.cross_entropy(logits, batch.y), logits, batch.y)


def labelled_images(k: int, size: int) -> Labelled:
    x, y = images(k, size)
    return Labelled(x, y, [f"{k}-{n}" for n in range(size)], 0.5)


class Frozen(Logging):
    """Train a head on a frozen trunk under no_grad, and the last layer's bias not at all."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(accuracy())
        self.trunk = nn.Sequential(
            nn.Linear(192, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 24)
        )
        self.trunk.requires_grad_(requires_grad=False)
        self.head = nn.Sequential(
            nn.Linear(24, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh(),
            nn.Linear(16, CLASSES),
        )  # fmt: skip
        self.head[-1].bias.requires_grad_(requires_grad=False)

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            features = self.trunk(x.flatten(1))
        logits = self.head(features)
        return self.note(F.cross_entropy(logits, y), logits, y)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
