"""One worker's fits: a chain of layers whose compute is real or slept, trained and timed."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.slept import Slept

WARM_UP = 8
# all workers meet at the end of the warm-up, to measure time: it takes them some steps to be as
# far from each other again as they are in the long run
STEADY_FROM = WARM_UP + 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """Hold one comparison.

    Args:
        name: what it is called in the table.
        num_workers: how many processes.
        step_s: emulated compute of a step in seconds; 0 computes for real.
        width: features of every layer of the module.
        depth: how many layers.
        batch: samples per worker and step.
        num_steps: steps per fit.
        rounds: how often every strategy trains.
        rate: token-bucket limit of every link ("1gbit", "100mbit"), or "" for loopback.
        strategies: which of them.
        close: neighbours that faster links join.
        jitter: standard deviation of the logarithm of a worker's seconds per step, drawn as the
            simulator draws them, so that all strategies meet the same slow steps.
        slow: how many times as long the second worker computes for a third of the steps.
    """

    name: str = ""
    num_workers: int
    step_s: float
    width: int
    depth: int
    batch: int
    num_steps: int
    rounds: int
    rate: str = ""
    strategies: Sequence[str] = ()
    close: int = 1
    jitter: float = 0.0
    slow: float = 1.0

    @property
    def model_bytes(self) -> int:
        """Return the bytes of all parameters."""
        return 4 * self.depth * (self.width + 1) * self.width

    def slower(self, rank: int, step: int) -> float:
        """Return how many times as long a worker computes in a step."""
        third = (self.num_steps - WARM_UP) // 3
        is_slow = rank == 1 and third <= step - WARM_UP < 2 * third
        drawn = random.Random(f"{rank}/{step}").lognormvariate(-(self.jitter**2) / 2, self.jitter)
        return drawn * (self.slow if is_slow else 1.0)


class Taken(NamedTuple):
    """Hold what a fit took.

    Args:
        step_s: seconds per step behind the warm-up, to the end of the last one everywhere.
        cpu_s: CPU seconds of this worker per step.
        steady_s: seconds between the starts of two of this worker's steps, far from both ends.
    """

    step_s: float
    cpu_s: float
    steady_s: float


class Block(nn.Module):
    """Be one layer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.linear = nn.Linear(case.width, case.width)
        self.seconds, self.slower = case.step_s / case.depth / 3, 1.0

    def forward(self, x: Tensor) -> Tensor:
        # sleep before the gradient of this layer is ready and before its weights are read
        x = self.linear(x)
        return F.relu(Slept.apply(x, self.slower * self.seconds) if self.seconds else x)


class Net(L.LightningModule):
    """Be a plain MLP, its compute real or slept."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.blocks = [Block(case) for _ in range(case.depth)]
        self.net = nn.Sequential(*self.blocks)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            block.slower = self.case.slower(self.global_rank, batch_idx)
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Clock(L.Callback):
    """Measure from the end of the warm-up to the end of the last step everywhere."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, k: int) -> None:
        if k == WARM_UP:
            dist.barrier()
            self._began_s, self._cpu_began_s = time.perf_counter(), time.process_time()
        self.starts.append(time.perf_counter())

    def on_train_end(self, trainer: Any, module: Any) -> None:
        dist.barrier()
        num_steps = len(self.starts) - WARM_UP
        steady = self.starts[min(STEADY_FROM, len(self.starts) - 2) :]
        self.taken = Taken(
            (time.perf_counter() - self._began_s) / num_steps,
            (time.process_time() - self._cpu_began_s) / num_steps,
            (steady[-1] - steady[0]) / (len(steady) - 1),
        )


def timed(
    case: Case,
    strategy: Any,
    module: L.LightningModule,
    *,
    shards: int,
    callbacks: Sequence[L.Callback] = (),
    **flags: Any,
) -> Taken:
    """Fit a module, and time its steps; the arguments are those of `fit`."""
    clock = Clock()
    fit(case, strategy, module, shards=shards, callbacks=[clock, *callbacks], **flags)
    return clock.taken


def fit(
    case: Case, strategy: Any, module: L.LightningModule, *, shards: int, **flags: Any
) -> None:
    """Fit a module.

    Args:
        case: what the data and the steps are.
        strategy: what the Trainer is given.
        module: what is trained.
        shards: how many workers take part.
        flags: more of the Trainer's.
    """
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=shards, strategy=strategy, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **flags,
    )  # fmt: skip
    trainer.fit(module, DataLoader(_Batches(case, shards), batch_size=None))


class _Batches(Dataset[tuple[Tensor, Tensor]]):
    """Give whole batches, so that no time goes into collating samples."""

    def __init__(self, case: Case, shards: int) -> None:
        self._batch = torch.randn(case.batch, case.width)
        self._count = case.num_steps * shards

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return self._batch.clone(), self._batch.clone()


def in_turn(case: Case, train: Callable[[Case, str], Taken]) -> dict[str, list[Taken]]:
    """Train with all strategies, round after round; return what each fit of each took."""
    found: dict[str, list[Taken]] = {s: [] for s in case.strategies}
    first, *others = case.strategies
    brief = replace(case, num_steps=WARM_UP + 2)
    for k in range(case.rounds + 1):
        for s in (*others, first):  # none that runs alone first: another makes the process group
            taken = train(case if k else brief, s)
            if os.environ.get("NODE_RANK") == "0":  # seen with SHOW_ERRORS=1
                print(f"round {k}, {s}: {taken.steady_s:.3f} s", file=sys.stderr, flush=True)
            if k > 0:  # the first round warms caches and the allocator
                found[s].append(taken)
    return found
