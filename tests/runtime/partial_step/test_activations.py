"""How many micro-batches' activations a stage keeps, seen by weak references to its tensors.

Each layer makes a tensor that the backward alone needs, and notes when it dies. Nothing here
looks at what the executor counts.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic import PipelineStrategy
from tests.harness import processes
from tests.harness.rows import in_turn
from tests.harness.trainers import make_trainer

NUM_STEPS, ROWS = 3, 2
PRESETS = pytest.mark.parametrize("preset", ["gpipe", "1f1b"])


class Squared(torch.autograd.Function):
    """Square a copy of x, which autograd saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: set[int], number: int) -> Tensor:
        kept = x.clone()
        alive.add(number)
        weakref.finalize(kept, alive.discard, number)
        ctx.save_for_backward(kept)
        return kept * kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return 2 * kept * grad, None, None


class Watched(nn.Module):
    """A linear layer that counts the activations that it has alive whenever it has made one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.alive: set[int] = set()  # numbers of the tensors that are alive
        self.outputs: set[int] = set()  # the same of what it has returned
        self.counts: list[int] = []
        self.made = 0

    def forward(self, x: Tensor) -> Tensor:
        self.made += 1
        y = Squared.apply(torch.tanh(self.linear(x)), self.alive, self.made)
        self.outputs.add(self.made)
        weakref.finalize(y, self.outputs.discard, self.made)
        if self.training and torch.is_grad_enabled():
            self.counts.append(len(self.alive))
        return y


class Row(LightningModule):
    """Layers one after the other."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Watched() for _ in range(num_layers))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    def on_train_batch_end(self, *args: Any) -> None:
        watched = [m for m in self.modules() if isinstance(m, Watched)]
        assert not any(m.alive for m in watched), "activations outlive their step"
        assert not any(m.outputs for m in watched), "outputs outlive their step"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Talkative(Row):
    """Let much else hold tensors: skips by glue, logs with a graph of their own, returned ones."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = Watched()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        skips = []
        x = batch[0]
        for layer in self.layers:
            x = layer(x) + sum(skips)
            skips.append(0.1 * x)
        self.log("aside", self.aside(x).mean())
        self.log("loss", x.mean(), prog_bar=True)
        self.kept_by_user = x.detach()
        return {"loss": x.mean(), "x": x}


def most_alive(
    preset: str, num_stages: int, num_microbatches: int, remat: str, make: type[Row] = Row
) -> list[int]:
    """Return for each layer how many micro-batches' activations were alive at most."""
    gc.disable()  # what only the garbage collector frees is not free
    module = make()
    starts = [f"layers.{j * 4 // num_stages}" for j in range(1, num_stages)]
    strategy = PipelineStrategy(
        preset,
        stages=starts,
        num_microbatches=num_microbatches,
        activation_checkpointing=remat,
        verify=False,
    )  # which is run on top
    trainer = make_trainer(strategy, max_epochs=1)
    data = torch.randn(
        NUM_STEPS, num_microbatches * ROWS, 6, generator=torch.Generator().manual_seed(1)
    )
    trainer.fit(module, DataLoader([[x] for x in data], batch_size=None))
    assert trainer.global_step == NUM_STEPS
    if isinstance(module, Talkative) and module.aside.counts:
        assert max(module.aside.counts) <= bound(
            preset, num_stages, num_microbatches, num_stages - 1
        )
    return [max(layer.counts, default=0) for layer in module.layers]


def of_stages(counts: list[int], num_stages: int) -> list[int]:
    """Return the largest count of each stage's layers."""
    size = len(counts) // num_stages
    return [max(counts[j * size : (j + 1) * size]) for j in range(num_stages)]


def bound(preset: str, num_stages: int, num_microbatches: int, j: int) -> int:
    return num_microbatches if preset == "gpipe" else min(num_microbatches, num_stages - j)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("num_microbatches", "num_ranks", "preset"),
    in_turn([(2, 2), (6, 4), (2, 4), (6, 2)], ["gpipe", "1f1b"]),
)
def test_a_worker_keeps_no_more_than_its_schedule_says(
    num_ranks: int, num_microbatches: int, preset: str
) -> None:
    ends = processes.run(most_alive, num_ranks, preset, num_ranks, num_microbatches, "never")
    for rank, counts in enumerate(ends):
        j = num_ranks - 1 - rank
        mine = of_stages(counts, num_ranks)
        assert mine[j] == bound(preset, num_ranks, num_microbatches, j), (j, ends)
        assert not any(mine[:j] + mine[j + 1 :]), "layers of other stages have run"


@PRESETS
@pytest.mark.multi
@pytest.mark.parametrize("num_stages", [2, 4])
def test_one_process_keeps_no_more_than_its_schedule_says(num_stages: int, preset: str) -> None:
    (counts,) = processes.run(most_alive, 1, preset, num_stages, 6, "never")
    expected = [bound(preset, num_stages, 6, j) for j in range(num_stages)]
    assert of_stages(counts, num_stages) == expected


@pytest.mark.multi
@pytest.mark.parametrize(("num_ranks", "preset"), in_turn([1, 2, 4], ["gpipe", "1f1b"]))
def test_what_is_logged_returned_or_skips_stages_keeps_nothing_more(
    num_ranks: int, preset: str
) -> None:
    num_stages = max(num_ranks, 2)
    ends = processes.run(most_alive, num_ranks, preset, num_stages, 6, "never", Talkative)
    most = [max(counts) for counts in zip(*ends, strict=True)]
    assert of_stages(most, num_stages) == [
        bound(preset, num_stages, 6, j) for j in range(num_stages)
    ]


@pytest.mark.multi
@pytest.mark.parametrize(("num_ranks", "preset"), in_turn([1, 2, 4], ["1f1b", "gpipe"]))
def test_with_remat_one_micro_batch_is_kept_at_a_time(num_ranks: int, preset: str) -> None:
    num_stages = max(num_ranks, 2)
    ends = processes.run(most_alive, num_ranks, preset, num_stages, 6, "always")
    for rank, counts in enumerate(ends):
        mine = of_stages(counts, num_stages)
        if num_ranks == 1:
            assert mine == [1] * num_stages
        else:
            assert mine[num_ranks - 1 - rank] == 1, ends
            assert sum(mine) == 1


def test_the_count_sees_what_stays_alive() -> None:
    layer = Watched()
    kept = [layer(torch.ones(2, 6)) for _ in range(3)]
    assert layer.counts == [1, 2, 3]
    del kept
    assert not layer.alive
