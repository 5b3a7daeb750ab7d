"""Codecs of activations: what crosses between stages is coded both ways, whoever runs them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic import TopK
from tests.harness.rows import more
from tests.harness.runs import Result, trained
from tests.harness.trainers import assert_same

pytestmark = pytest.mark.multi

NUM_STEPS, NUM_MICRO, ROWS, WIDTH = 5, 4, 6, 48
TOP = TopK(density=0.25)
STAGES = ["layers.2", "layers.4", "layers.6"]


class Cut(torch.autograd.Function):
    """Is a boundary, by the rule of the documentation: the largest of each sample, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, density: float) -> Tensor:
        mask = torch.zeros_like(x)
        for row, kept in zip(x, mask, strict=True):
            most = -int(-density * row.numel() // 1)
            kept.view(-1)[row.abs().view(-1).sort(descending=True, stable=True)[1][:most]] = 1
        ctx.mask = mask
        return torch.where(mask > 0, x, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.where(ctx.mask > 0, grad, 0.0), None


class Net(LightningModule):
    """Has a tensor that crosses all boundaries, is used on both sides, and is changed behind one.

    Args:
        density: of boundaries of its own, with which it is the reference of a run in stages.
    """

    def __init__(self, density: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])
        self.drop = nn.Dropout(dropout)
        self.density = density

    def cut(self, k: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not self.density or f"layers.{k}" not in STAGES:
            return tensors
        return tuple(Cut.apply(x, self.density) for x in tensors)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        h = first.tanh()
        for k in range(1, 8):
            first, h = self.cut(k, first, h)
            y = self.layers[k](h + first) if k % 2 else self.layers[k](h) + first
            if k == 2:
                first.mul_(0.9)  # behind a boundary
            h = self.drop(y).tanh()
        return h + 0.1 * first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self(x).sub(y).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches(cut: bool = False) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, NUM_STEPS, NUM_MICRO, ROWS, WIDTH, generator=g)
    pairs = [[x[t, i], y[t, i]] for t in range(NUM_STEPS) for i in range(NUM_MICRO)]
    joined = [[x[t].flatten(0, 1), y[t].flatten(0, 1)] for t in range(NUM_STEPS)]
    return DataLoader(pairs if cut else joined, batch_size=None)  # type: ignore[arg-type]


def fit(
    preset: str, num_ranks: int, codec: Any = TOP, *, make: Any = Net, stages: Any = None,
    options: Any = None, **flags: Any,
) -> list[Result]:  # fmt: skip
    strategy = {
        "preset": preset, "num_microbatches": NUM_MICRO, "stages": stages or STAGES,
        "compress": codec and {"activations": codec},
    }  # fmt: skip
    return trained(
        make, strategy | (options or {}), num_ranks, data=flags.pop("data", batches), **flags
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_bits_are_those_of_a_module_with_boundaries_of_its_own(num_ranks: int) -> None:
    data = partial(batches, cut=True)
    make = partial(Net, TOP.density)
    (plain,) = trained(make, "auto", 1, data=data, accumulate_grad_batches=NUM_MICRO)
    preset = "1f1b" if num_ranks == 4 else "gpipe" if num_ranks == 1 else "interleaved_1f1b"
    for rank in fit(preset, num_ranks):
        assert_same(rank.weights, plain.weights)


@pytest.mark.parametrize(
    ("preset", "num_ranks", "codec", "options"),
    [
        ("zb_h1", 2, TOP, {}),
        ("cyclic_pipeline", 4, TOP, {}),
        ("pipedream_2bw", 2, "int8", {}),
        ("cyclic_mp", 2, TOP, {"stages": 2, "num_microbatches": 2}),
        ("1f1b", 2, "bf16", {}),
        ("gpipe", 4, TOP, {"activation_checkpointing": "always"}),
        more("zb_h1", 4, TOP, {}),
    ],
)
def test_processes_have_the_bits_of_one(
    preset: str, num_ranks: int, codec: Any, options: dict[str, Any]
) -> None:
    (one,) = fit(preset, 1, codec, options=options)
    for rank in fit(preset, num_ranks, codec, options=options):
        assert_same(rank.weights, one.weights)
