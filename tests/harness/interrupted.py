"""Runs that are interrupted in a given step, and runs that go on from the newest file.

Everything is random that may be: the order of the data, what loaders' workers add to them, and
dropout. The step, the rank and the place in the step at which a run is interrupted are drawn from
a seed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.harness import processes
from tests.harness.processes import here
from tests.harness.trainers import make_trainer, weights_of
from tests.modules.classifier import adamw, warm_up

NUM_STEPS, BATCH_SIZE = 20, 8
COMPARED = [
    "state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "epoch",
    "lightning_cyclic",
]  # fmt: skip
PLACES = ["on_train_batch_start", "on_before_zero_grad", "on_train_batch_end"]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a run trains, and what it writes.

    Args:
        strategy: arguments of CyclicStrategy.
        num_batches: of an epoch, so that steps of each epoch are interrupted.
        shared_order: whether Lightning deals one order of the data to replicas; else each loader
            shuffles by itself.
        num_steps: of the run.
        max_epochs: after which the run ends. [behind that number of steps]
        num_workers: of each loader.
    """

    strategy: dict[str, Any]
    num_batches: int = 7
    shared_order: bool = False
    num_steps: int = NUM_STEPS
    max_epochs: int | None = None
    num_workers: int = 2


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """Where a run ends early.

    Args:
        number: the signal that is sent.
        step: 0 for the first one.
        rank: to which it is sent.
        place: the hook in which it is.
    """

    number: int
    step: int
    rank: int
    place: str

    @classmethod
    def drawn(cls, number: int, step: int, num_ranks: int, seed: object) -> Interruption:
        """Draw the rank and the place."""
        draws = random.Random(f"{seed} {number} {step} {num_ranks}")
        rank, place = draws.randrange(num_ranks), draws.choice(PLACES)
        return cls(number=number, step=step, rank=rank, place=place)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Rows to which whoever reads them adds something random."""

    def __init__(self, num: int) -> None:
        g = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(num, 8, generator=g), torch.randn(num, 1, generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return self.x[k] + 0.1 * torch.randn(8), self.y[k]


class Net(LightningModule):
    """Four layers with buffers that each step changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2)]
        self.net = nn.Sequential(*layers, nn.Linear(8, 1))
        seed(1000 + here().rank)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warm_up(optimizer), "interval": "step"},
        }


def seed(value: int) -> None:
    """Seed all generators, whose states are in checkpoints."""
    random.seed(value)
    numpy.random.seed(value)
    torch.manual_seed(value)


class Interrupt(Callback):
    """Send this process a signal, if it is the one."""

    def __init__(self, at: Interruption) -> None:
        self._at: Interruption | None = at if at.rank == here().rank else None

    def _come_to(self, place: str, trainer: Any) -> None:
        at = self._at
        done = trainer.global_step - (place == "on_train_batch_end")
        if at is not None and at.place == place and done >= at.step:
            self._at = None
            if at.number == signal.SIGKILL:  # they hold the pipe by which the test sees the end
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or loaders complain, on any thread
            for worker in multiprocessing.active_children():  # a signal often reaches them, too
                os.kill(worker.pid or 0, at.number)
            os.kill(os.getpid(), at.number)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self._come_to("on_train_batch_start", trainer)

    def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:
        self._come_to("on_before_zero_grad", trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._come_to("on_train_batch_end", trainer)


class Logged(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" in metrics and step is not None:
            self.rows[step] = metrics["loss"]


@dataclass
class Outcome:
    """What a run left."""

    weights: dict[str, Tensor]
    losses: dict[int, float]
    steps: int
    stopped: bool
    file: dict[str, Any] = field(default_factory=dict)


def loader(way: Way) -> DataLoader[Any]:
    """Make this rank's loader."""
    dealt = here().num_ranks if way.shared_order else 1
    data = Noisy(way.num_batches * BATCH_SIZE * dealt)
    return DataLoader(
        data, BATCH_SIZE, shuffle=True, num_workers=way.num_workers,
        multiprocessing_context="fork" if way.num_workers else None,
    )  # fmt: skip


def fit(way: Way, folder: str, at: Interruption | None, ckpt_path: str | None) -> Outcome:
    """Train to the end, or until the run is interrupted."""
    module, logged = Net(), Logged()
    if ckpt_path is not None:
        seed(2000 + here().rank)  # a process that goes on is elsewhere
        for p in module.parameters():
            p.data.zero_()  # so that all must come from the file
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
    trainer = make_trainer(
        way.strategy, max_steps=way.num_steps if way.max_epochs is None else -1,
        max_epochs=-1 if way.max_epochs is None else way.max_epochs, enable_checkpointing=True,
        callbacks=[saver, *([Interrupt(at)] if at else [])], logger=logged, log_every_n_steps=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=way.shared_order,
    )  # fmt: skip
    stopped = False
    try:
        trainer.fit(module, loader(way), ckpt_path=ckpt_path)
    except SIGTERMException:
        stopped = True
    end = Path(folder, "end.ckpt")
    if not stopped:
        trainer.save_checkpoint(end)
    file = torch.load(end, weights_only=True) if not stopped and here().rank == 0 else {}
    return Outcome(weights_of(module), logged.rows, trainer.global_step, stopped, file)


def newest(folder: Path) -> str | None:
    """Return the newest file: there is none that is not whole."""
    found = max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if found is None else str(found)


def run_until_killed(
    way: Way, num_ranks: int, folder: Path, at: Interruption, start: str | None
) -> None:
    """Run until a rank is killed, and then all others, as whoever started them would do."""
    try:
        processes.run(fit, num_ranks, way, str(folder), at, start, after_failure_s=0.0)
    except processes.RanksFailedError as error:
        if error.errors.get(at.rank) != processes.WORDLESS:
            raise  # for another reason
    else:
        raise AssertionError("nobody was killed")


def contents(path: str | Path) -> dict[str, Any]:
    return comparable(torch.load(path, weights_only=True))


def comparable(file: dict[str, Any]) -> dict[str, Any]:
    return {k: file[k] for k in COMPARED}


def difference(a: Any, b: Any, path: str = "") -> str | None:
    """Return where two files differ first, bit by bit; None where they do not."""
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        pairs: Iterable[Any] = ((k, a[k], b[k]) for k in a)
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = ((k, x, y) for k, (x, y) in enumerate(zip(a, b, strict=True)))
    else:
        same = torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        return None if same else path
    found = (difference(x, y, f"{path}/{k}") for k, x, y in pairs)
    return next((where for where in found if where is not None), None)
