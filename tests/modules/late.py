"""Modules on the meta device, of which each rank makes its own stages, and what it then has."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_cyclic.runtime.absent import is_absent, num_bytes_of
from tests.conformance.modules import CLASSES, SIZE, Plain


class Layer(nn.Linear):
    """Notes which part of the bytes of its module is here when it is called."""

    root: LightningModule
    sizes: dict[str, int]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        here = {n for n, p in Layer.root.named_parameters() if not is_absent(p)}
        HERE.append(sum(Layer.sizes[n] for n in here) / sum(Layer.sizes.values()))
        return y


HERE: list[float] = []


class Late(Plain):
    """Makes its layers on the meta device; those of two places are tied."""

    def make_net(self) -> Any:
        return None

    def configure_model(self) -> None:
        if self.net is None:
            Layer.root = self
            with torch.device("meta"):
                layers = [Layer(SIZE, SIZE), nn.BatchNorm1d(SIZE), Layer(SIZE, SIZE), nn.Tanh()]
                self.net = nn.Sequential(*layers, nn.Dropout(0.3), Layer(SIZE, CLASSES))
            Layer.sizes = {n: num_bytes_of(p) for n, p in self.named_parameters()}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


class Tied(Late):
    """Uses the weight of its first layer once more, in its last stage."""

    def configure_model(self) -> None:
        super().configure_model()
        if len(self.net) == 6:
            with torch.device("meta"):
                self.net.insert(5, nn.Linear(SIZE, SIZE))
            self.net[5].weight = self.net[0].weight
            Layer.sizes = {n: num_bytes_of(p) for n, p in self.named_parameters()}


TOTAL = 4 * (2 * SIZE * (SIZE + 1) + 2 * SIZE + CLASSES * (SIZE + 1))  # bytes
LEAN = {"memory_limit_bytes": TOTAL - 4, "save_distributed_checkpoint": True}
STAGED = {"stages": ["net.2"], "num_microbatches": 2}
FINE = ["net.1", "net.2", "net.5"]  # a rank has its own stages, and the one that it uses


def here_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of what this rank has of a module."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {n: x.detach().clone() for n, x in named if not is_absent(x)}
