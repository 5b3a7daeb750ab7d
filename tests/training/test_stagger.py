"""The stagger is real: workers follow one another, and no batch makes them meet."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.harness.processes import here, run

pytestmark = pytest.mark.multi

NUM_STEPS = 10
SLEPT_S = 0.02  # of one block's forward; its backward sleeps twice as long
COLLECTIVES = ("allreduce", "broadcast", "barrier", "allgather", "reduce", "gather", "scatter",
               "reduce_scatter", "alltoall", "_allgather_base")  # fmt: skip


class Slept(torch.autograd.Function):
    """Sleep as long as compute would take, so that workers need no core of their own."""

    for_s = SLEPT_S

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(Slept.for_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2 * Slept.for_s)
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Slept.apply(self.linear(x))  # type: ignore[no-any-return, no-untyped-call]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Timeline(Callback):
    """Note when each batch starts (the system's clock, the same for all processes)."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.collectives: list[int] = []
        self.counted: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, k: int) -> None:
        self.starts.append(time.monotonic())
        self.collectives.append(sum(self.counted.values()))


def count_collectives(counted: Counter[str]) -> None:
    """Count every collective that this process asks any process group for, from Python."""
    for name in COLLECTIVES:
        original = getattr(torch.distributed.ProcessGroup, name)

        def counting(*args: Any, _name: str = name, _call: Any = original, **kwargs: Any) -> Any:
            counted[_name] += 1
            return _call(*args, **kwargs)

        setattr(torch.distributed.ProcessGroup, name, counting)


def train(strategy: str, sleeps_s: float = SLEPT_S) -> tuple[list[float], list[int]]:
    timeline = Timeline()
    count_collectives(timeline.counted)
    trainer = Trainer(
        accelerator="cpu", devices=1, num_nodes=here().num_ranks, strategy=strategy, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[timeline],
    )  # fmt: skip
    data = TensorDataset(torch.randn(2 * NUM_STEPS * here().num_ranks, 8))
    Slept.for_s = sleeps_s
    trainer.fit(Net(), DataLoader(data, 2))
    return timeline.starts, timeline.collectives


@pytest.fixture(scope="module")
def cyclic() -> list[tuple[list[float], list[int]]]:
    return run(train, 3, "cyclic_dp")


def test_every_worker_runs_behind_the_one_before_it(cyclic: Any) -> None:
    # workers are paced by the clock when they start: a machine that is busy then gets two more
    # chances, and without the pacing none of them comes to it
    for attempt in range(3):
        found = cyclic if attempt == 0 else run(train, 3, "cyclic_dp")
        step_s, leads = staggered([each[0] for each in found])
        if all(0 < lead < step_s for lead in leads):
            return
    raise AssertionError(f"leads of {leads} s in steps of {step_s} s")


def staggered(starts: list[list[float]]) -> tuple[float, list[float]]:
    """Return the time of a step, and by how much each worker is behind the one before."""
    step_s = statistics.median(b - a for a, b in zip(starts[0][4:], starts[0][5:], strict=False))
    pairs = zip(starts, starts[1:], strict=False)
    return step_s, [
        statistics.median(b - a for a, b in zip(before[4:], behind[4:], strict=True))
        for before, behind in pairs
    ]


def test_no_batch_makes_a_collective(cyclic: Any) -> None:
    for _, collectives in cyclic:
        per_batch = [b - a for a, b in zip(collectives[1:], collectives[2:], strict=False)]
        assert per_batch == [0] * (NUM_STEPS - 2)  # the first batch agrees on the stages


def test_the_counter_sees_the_collective_that_lightning_makes_in_every_batch() -> None:
    for _, collectives in run(train, 2, "ddp", 0.0):
        per_batch = [b - a for a, b in zip(collectives[1:], collectives[2:], strict=False)]
        assert min(per_batch) >= 1
