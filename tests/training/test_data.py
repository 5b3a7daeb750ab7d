"""Which data a step has, and what is shown of it: as on one device, in the same order."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness.runs import run
from tests.harness.trainers import assert_same
from tests.modules.chains import Chain


class Ones(LightningModule):
    """Two layers that give back what they take, so that losses can be told by head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for layer in self.layers:
            nn.init.ones_(layer.weight)

    def training_step(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def three_rows() -> DataLoader[Any]:
    return DataLoader([torch.tensor([[3.0], [5.0], [10.0]])], batch_size=None)  # type: ignore[arg-type]


@pytest.mark.multi
@pytest.mark.parametrize("preset", ["1f1b", "cyclic_pipeline"])
def test_the_loss_shown_is_the_mean_over_samples_not_over_micro_batches(preset: str) -> None:
    options = {"preset": preset, "stages": ["layers.1"], "num_microbatches": 2}
    results = run(Ones, options, 2, data=three_rows)
    assert [error for result in results for error in (result.error, result.text) if error] == []
    assert results[0].losses == [6.0]  # the mean of 3 and 5 is 4, and of that and 10 it is 7


def shuffled(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(24, 6, generator=generator)
    order = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(rows)
    return DataLoader(data, batch_size, shuffle=True, generator=order)


@pytest.mark.multi
def test_a_pipeline_has_the_batches_that_the_shuffling_loader_of_one_device_gives() -> None:
    flags = {"use_distributed_sampler": True, "max_epochs": 2}  # as a Trainer has it by default
    options = {"preset": "1f1b", "stages": ["layers.2"], "num_microbatches": 2}
    staged = run(Chain, options, 2, data=partial(shuffled, 8), **flags)
    alone = run(Chain, "auto", 1, data=partial(shuffled, 4), accumulate_grad_batches=2, **flags)
    for result in staged:
        assert_same(result.weights, alone[0].weights)


class CountsVisits(Chain):
    """Adds, to micro-batches of five rows alone, how often the step was run with these, by three.

    The plain step is run first, and where both differ a third time behind two stages: alike.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        visits.update([float(batch[0][0, 0])])
        self.visit = visits[float(batch[0][0, 0])] % 3 if len(batch[0]) == 5 else 0
        return super().training_step(batch, batch_idx)

    def between(self, j: int, x: Tensor) -> Tensor:
        return x + self.visit if j == 0 else x


visits: Counter[float] = Counter()


def sizes_that_change() -> DataLoader[Any]:
    batches = [[torch.randn(size, 6)] for size in (8, 8, 10, 8)]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.multi
def test_on_one_device_a_batch_of_a_new_shape_is_compared_as_the_first_is() -> None:
    options = {"preset": "1f1b", "stages": ["layers.2"], "num_microbatches": 2}
    (result,) = run(CountsVisits, options, 1, data=sizes_that_change)
    assert result.error == "VerificationError"
    assert result.text.startswith("step 2: input 0 of layers.1()")
