"""A trial: one small fit of one preset on this process's worker, and what came out of it.

The module has all that a transport can get wrong: parameters and buffers of several stages, an
optimizer with state, validation and a checkpoint between steps, and a second epoch. Nothing in it
is random and nothing is downloaded. Micro-batch k is the same in every trial, whoever trains it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cyclic.compat import LightningEnvironment, LightningModule, ModelCheckpoint, Trainer
from lightning_cyclic.plan import PRESETS
from lightning_cyclic.plan.placement import Shared
from lightning_cyclic.runtime.transport.choice import Route
from lightning_cyclic.strategy import CyclicStrategy

_WIDTH, _ROWS, _CLASSES = 16, 4, 3
_STEPS, _EPOCHS = 4, 2
_LEAST_MICRO = 4
_STEP_BY_STEP = ("pipedream", "pipeoptim", "spectrain")  # which update behind each micro-batch

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Say what is trained, and where.

    Args:
        preset: "" for Lightning alone, which accumulates.
        num_workers: processes.
        size: how many workers the plan is made for; one process runs the plans of several, too.
        is_cut: whether workers run stages, and see whole batches.
        accelerator: "cpu" or "gpu".
        devices: the GPU of each worker.
        backend: of the process group. [Lightning's choice]
        route: how messages travel.
        precision: of all trials that are compared, whose bits are the same for any number of
            workers.
    """

    preset: str
    num_workers: int
    size: int
    is_cut: bool
    accelerator: str = "cpu"
    devices: Sequence[int] = ()
    backend: str | None = None
    route: Route = "auto"
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"

    @property
    def num_microbatches(self) -> int:
        """Return the micro-batches of an update."""
        if not self.is_cut:
            return self.size
        return 1 if self.preset in _STEP_BY_STEP else max(_LEAST_MICRO, self.size)

    @property
    def num_stages(self) -> int:
        """Return the stages of the module, whose blocks are as many."""
        shared = self.preset in PRESETS and PRESETS[self.preset].placement == "shared"
        return Shared.fewest_stages(self.size) if shared else self.size


class Came(NamedTuple):
    """Hold what came out of a trial on one worker.

    Args:
        weights: name -> digest of its bytes.
        route: how messages travelled.
        steps: updates.
    """

    weights: dict[str, str]
    route: str
    steps: int


def train(trial: Trial, rank: int, folder: str) -> Came:
    """Run this process's part of a trial.

    Args:
        trial: what is trained.
        rank: of this process.
        folder: for checkpoints, the same for all.
    """
    torch.set_num_threads(1)  # kernels choose their order of summation by it
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    module = _Module(trial.num_stages)
    trainer = _trainer(trial, rank, folder)
    trainer.fit(module, _loader(trial, rank, _STEPS), _loader(trial, rank, 1, first=_STEPS))
    route = getattr(trainer.strategy, "route", "")
    return Came(digests(module.state_dict()), route, trainer.global_step)


def digests(state: dict[str, Tensor]) -> dict[str, str]:
    """Return a digest of the bytes of each tensor."""
    whole = {name: x.detach().cpu().contiguous() for name, x in state.items()}
    return {
        name: hashlib.blake2b(
            x.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=8
        ).hexdigest()
        for name, x in whole.items()
    }


@final
class _Module(LightningModule):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        width = _WIDTH
        blocks = [
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())
            for _ in range(num_blocks)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, _CLASSES)

    def _loss(self, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.blocks(x)), y)

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


def _strategy(trial: Trial) -> CyclicStrategy:
    gathers = trial.is_cut or trial.num_workers == 1
    return CyclicStrategy(
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
