"""An ordinary classifier over several networks, and its data: the same under every strategy.

Micro-batch k = t * N + i of a run is element k of one data set; the sampler of worker i gives it
exactly the micro-batches (t, i).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.harness.processes import here
from tests.modules.optimizers import Counting

Batch = tuple[Tensor, Tensor]


# ---------------------------------------------------------------------- networks


def mlp(num_layers: int = 9, dropout: float = 0.0) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(12, 12), nn.Tanh()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(12, 3))


def batchnorm_mlp(width: int = 12) -> nn.Module:
    layers: list[nn.Module] = []
    for before in (12, width, width, width):
        layers += [nn.Linear(before, width), nn.BatchNorm1d(width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def wide_mlp() -> nn.Module:
    """Has matrices that are worth a codec."""
    return batchnorm_mlp(24)


class Block(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False))
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


# ---------------------------------------------------------------------- data


class MicroBatches(Dataset[Batch]):
    """Micro-batch k, made from k alone.

    Args:
        kind: "vectors", "vector" (one of them), "images" or "tokens".
        num: how many there are.
        seed: of the whole set.
    """

    def __init__(self, kind: str, num: int, seed: int = 0) -> None:
        self.kind, self.num, self.seed = kind, num, seed

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, k: int) -> Batch:
        g = torch.Generator().manual_seed(100_000 * self.seed + k)
        if self.kind == "tokens":
            x = torch.randint(0, 50, (2, 12), generator=g)
            return x, x
        shape = {"vectors": (7, 12), "vector": (1, 12)}.get(self.kind, (4, 3, 8, 8))
        return torch.randn(shape, generator=g), torch.randint(0, 3, shape[:1], generator=g)


class Resumable(DataLoader[Batch]):
    """Knows where it is, so that a run can go on in mid epoch."""

    _next = 0

    def __iter__(self) -> Any:
        for k, batch in enumerate(super().__iter__()):
            if k >= self._next:
                self._next = (k + 1) % len(self)
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def loader(data: Dataset[Any]) -> DataLoader[Any]:
    """Give worker i of N elements i, N + i, 2 N + i, ..."""
    rank, num = here().rank, here().num_ranks
    sampler = range(rank, len(data), num) if num > 1 else None  # type: ignore[arg-type]
    return Resumable(data, batch_size=None, sampler=sampler, shuffle=False)


def one_each(data: Callable[[int], Any], num_batches: int) -> DataLoader[Any]:
    """Return the loader of so many batches per worker, where batch k is made from k."""
    rank, num = here().rank, here().num_ranks
    rows = [data(num * t + rank) for t in range(num_batches)]
    return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


def micro_batches(kind: str, num_batches: int, seed: int = 0) -> DataLoader[Any]:
    """Return the loader of so many batches per worker."""
    return loader(MicroBatches(kind, num_batches * here().num_ranks, seed))


# ---------------------------------------------------------------------- optimizers


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that differs in every step, so that an update with another step's rate is seen."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (1 + t % 7) / 7)


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "sgd": (sgd, False),
    "adamw": (adamw, True),  # with the scheduler
    "counting": (Counting, True),
}
NETS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (mlp, "vectors"),
    "batchnorm_mlp": (batchnorm_mlp, "vectors"),
    "wide_mlp": (wide_mlp, "vectors"),
    "resnet": (resnet, "images"),
    "gpt2": (gpt2, "tokens"),
}


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    if x.dtype == torch.int64:
        return net(input_ids=x, labels=y).loss
    return F.cross_entropy(net(x), y)


# ---------------------------------------------------------------------- the module


class Classifier(LightningModule):
    """An ordinary LightningModule; no line of it knows of a strategy.

    Args:
        net: name of a network.
        optimizer: name of an optimizer.
    """

    def __init__(self, net: str = "mlp", optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(0)
        make_net, self.kind = NETS[net]
        self.net = make_net()
        self.optimizer_name = optimizer
        self.losses: list[float] = []
        self.rates: list[float] = []

    def loss(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch), sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", loss_of(self.net, batch), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        make_optimizer, scheduled = OPTIMIZERS[self.optimizer_name]
        optimizer = make_optimizer(self.parameters())
        if not scheduled:
            return optimizer
        scheduler = {"scheduler": warm_up(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}
