"""A trial: one small fit of one preset on this process's worker, and what came out of it.

The module has all that a transport can get wrong: parameters and buffers of several stages, a
weight that the first and the last stage share, an optimizer with state, validation and a
checkpoint between steps, and a second epoch. Nothing in it is random and nothing is downloaded.
Micro-batch k is the same in every trial, whoever trains it.
"""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cyclic.compat import LightningEnvironment, LightningModule, ModelCheckpoint, Trainer
from lightning_cyclic.plan import PRESETS
from lightning_cyclic.plan.placement import Shared
from lightning_cyclic.plan.presets import PLACEMENTS, WEIGHTS, default_num_stages
from lightning_cyclic.plugin.strategy import PlannedStrategy
from lightning_cyclic.registration import make_strategy
from lightning_cyclic.runtime.transport.choice import Route

_WIDTH, _ROWS, _CLASSES = 16, 4, 3
_STEPS, _EPOCHS = 4, 2
_LEAST_MICRO = 4
_STEP_BY_STEP = ("pipedream", "pipeoptim", "spectrain")  # which update behind each micro-batch

Batch = tuple[Tensor, Tensor]

_PRELOAD = [
    "torch",
    "lightning.pytorch",
    "lightning_cyclic.cyclic_strategy",
    "lightning_cyclic.cli.trial",
]
_AFTER_FAILURE_S = 5.0  # for the others to say more
_TOLD_BY_OTHERS = ("PeerError", "WaitTimeoutError")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Say what is trained, and where.

    Args:
        preset: "" for Lightning alone, which accumulates.
        size: how many workers the plan is made for; one process runs the plans of several, too.
        is_cut: whether workers run stages, and see whole batches.
        accelerator: "cpu" or "gpu".
        backend: of the process group. [Lightning's choice]
        precision: of all trials that are compared, whose bits are the same for any number of
            workers.
        num_stages: of the module, also where Lightning trains it. [as many as the preset has]
    """

    preset: str
    num_workers: int
    size: int
    is_cut: bool
    accelerator: str = "cpu"
    devices: Sequence[int] = ()
    backend: str | None = None
    route: Route = "auto"
    precision: Literal["32-true", "bf16-true", "bf16-mixed", "16-mixed"] = "32-true"
    num_stages: int = 0

    def __post_init__(self) -> None:
        if not self.num_stages:
            object.__setattr__(self, "num_stages", self._stages_of_preset())

    @property
    def num_microbatches(self) -> int:
        if not self.is_cut:
            return self.size
        return 1 if self.preset in _STEP_BY_STEP else max(_LEAST_MICRO, self.size)

    @property
    def has_tie(self) -> bool:
        """Return whether the module shares a weight, which some presets refuse."""
        preset = PRESETS.get(self.preset)
        return preset is None or not (
            PLACEMENTS[preset.placement].takes_turns or WEIGHTS[preset.weights].looks_ahead
        )

    def _stages_of_preset(self) -> int:
        if self.preset not in PRESETS:
            return self.size
        preset = PRESETS[self.preset]
        if preset.placement == "shared":
            return Shared.fewest_stages(self.size)
        return default_num_stages(preset.schedule, self.size)


class Came(NamedTuple):
    weights: dict[str, str]
    route: str
    steps: int


def train(trial: Trial, rank: int, folder: str) -> Came:
    """Run this process's part of a trial."""
    torch.set_num_threads(1)  # kernels choose their order of summation by it
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    module = _Module(trial.num_stages, has_tie=trial.has_tie)
    trainer = _trainer(trial, rank, folder)
    trainer.fit(module, _loader(trial, rank, _STEPS), _loader(trial, rank, 1, first=_STEPS))
    route = getattr(trainer.strategy, "route", "")
    return Came(digests(module.state_dict()), route, trainer.global_step)


def digests(state: dict[str, Tensor]) -> dict[str, str]:
    whole = {name: x.detach().cpu().contiguous() for name, x in state.items()}
    return {
        name: hashlib.blake2b(
            x.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=8
        ).hexdigest()
        for name, x in whole.items()
    }


@final
class _Module(LightningModule):
    def __init__(self, num_blocks: int, *, has_tie: bool) -> None:
        super().__init__()
        width = _WIDTH
        blocks = [
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())
            for _ in range(num_blocks)
        ]
        self.first = nn.Linear(width, width, bias=False)
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Linear(width, width, bias=False)
        if has_tie:
            self.last.weight = self.first.weight
        self.head = nn.Linear(width, _CLASSES)

    def _loss(self, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.last(self.blocks(self.first(x)))), y)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _trainer(trial: Trial, rank: int, folder: str) -> Trainer:
    alone = not trial.preset
    each = trial.devices[rank : rank + 1]
    strategy = "auto" if alone else _strategy(trial)
    return Trainer(
        # as on nodes with a device each, so that several workers may share one
        accelerator=trial.accelerator, devices=list(each) or 1, num_nodes=trial.num_workers,
        strategy=strategy, precision=trial.precision,
        accumulate_grad_batches=trial.num_microbatches if alone else 1,
        max_epochs=_EPOCHS, val_check_interval=trial.num_microbatches * 2 if alone else 2,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=1)],
        num_sanity_val_steps=0, use_distributed_sampler=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        plugins=[LightningEnvironment()],  # also where a cluster's variables are set
    )  # fmt: skip


def _strategy(trial: Trial) -> PlannedStrategy:
    gathers = trial.is_cut or trial.num_workers == 1
    return make_strategy(
        trial.preset,
        stages=[f"blocks.{j}" for j in range(1, trial.num_stages)],
        num_microbatches=trial.num_microbatches if gathers else None,
        transport=trial.route,
        process_group_backend=trial.backend,
    )


def _loader(trial: Trial, rank: int, steps: int, first: int = 0) -> DataLoader[Any]:
    """Return a worker's batches: micro-batches, or those of a step together."""
    m = trial.num_microbatches
    each = range(first * m, (first + steps) * m)
    micro = [_micro_batch(k) for k in each]
    if not trial.preset:
        batches = micro
    elif trial.is_cut or trial.num_workers == 1:
        rows = [micro[k : k + m] for k in range(0, len(micro), m)]
        batches = [(torch.cat([x for x, _ in r]), torch.cat([y for _, y in r])) for r in rows]
    else:
        batches = micro[rank :: trial.num_workers]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a data set


def _micro_batch(k: int) -> Batch:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(_ROWS, _WIDTH, generator=generator)
    return x, torch.randint(_CLASSES, (_ROWS,), generator=generator)


class Ended(NamedTuple):
    """Hold how a trial ended.

    Args:
        came: of each worker, if all have ended well.
        error: else the first line of the one that tells most.
    """

    came: Sequence[Came]
    error: str
    seconds: float


def run(trial: Trial, folder: Path, limit_s: float) -> Ended:
    """Run a trial; behind it none of its processes is left.

    Args:
        limit_s: when it has passed all are killed, in seconds.
    """
    processes, ends, port = [], [], _free_port()
    try:
        for rank in range(trial.num_workers):
            end, child_end = _context().Pipe(duplex=False)
            args = (child_end, trial, rank, port, str(folder), limit_s)
            processes.append(_context().Process(target=_work, args=args, daemon=True))
            processes[-1].start()
            child_end.close()
            ends.append(end)
        began = time.monotonic()  # the first process has waited for what all of them import
        told = _collect(ends, began + limit_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    seconds = time.monotonic() - began
    errors = [error for _, error in told.values() if error]
    if errors:
        errors.sort(key=lambda error: error.startswith(_TOLD_BY_OTHERS))
        return Ended([], errors[0], seconds)
    if len(told) < len(ends):
        return Ended([], f"did not end within {limit_s:g} s", seconds)
    return Ended([told[rank][0] for rank in range(len(ends))], "", seconds)


@cache
def _context() -> multiprocessing.context.ForkServerContext:
    """Return what forks processes that have imported everything, and started no GPU."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _collect(ends: Sequence[Connection], until: float) -> dict[int, tuple[Any, str]]:
    """Return rank -> what came, or the first line of an error, of those that ended in time."""
    told: dict[int, tuple[Any, str]] = {}
    while len(told) < len(ends):
        left = [end for rank, end in enumerate(ends) if rank not in told]
        ready = wait(left, max(0.0, until - time.monotonic()))
        if not ready:
            break
        for rank in [ends.index(end) for end in ready]:
            told[rank] = _received(ends[rank])
            if told[rank][1]:
                until = min(until, time.monotonic() + _AFTER_FAILURE_S)
    return told


def _received(end: Connection) -> tuple[Any, str]:
    try:
        received: tuple[Any, str] = end.recv()
    except EOFError:
        return None, "a worker died without a word"
    return received


def _free_port() -> int:
    with closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _work(
    end: Connection, trial: Trial, rank: int, port: int, folder: str, limit_s: float
) -> None:
    """Be the process of one worker; what it writes goes into a file of its own."""
    log = open(f"{folder}/worker{rank}.log", "w")  # noqa: SIM115  (open to the end)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log.fileno(), stream.fileno())
    faulthandler.dump_traceback_later(0.9 * limit_s, file=log)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(_place(trial, rank, port))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        end.send((train(trial, rank, folder), ""))
    except BaseException as error:  # handed to the table
        traceback.print_exc()
        log.flush()
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        end.send((None, line))
    end.close()
    os._exit(0)  # no clean-up of process groups: peers may be gone


def _place(trial: Trial, rank: int, port: int) -> dict[str, str]:
    """Return the variables from which Lightning reads where a worker is."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(trial.num_workers),
        "NODE_RANK": str(rank),
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without which torch knows no deterministic matmul
    }


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
