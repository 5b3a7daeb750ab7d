"""Train the modules of tests.modules.cases: under any preset, and plainly, one micro-batch each.

Micro-batch i of step t is batch k = t * num_microbatches + i of its case. The plain run's loader
yields them one by one and accumulates num_microbatches of them; a pipeline's yields those of a
step joined (with replicas > 1: every replicas-th of them, for the replica's number). Of workers
that run whole micro-batches, as many as there are of these, each gets its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_cyclic import PRESETS
from tests.harness import processes
from tests.harness.processes import here
from tests.harness.trainers import assert_same, make_trainer, weights_of
from tests.modules.cases import CASES
from tests.modules.classifier import Resumable

Outcome = dict[str, Any]
CLOSE = 1e-6  # of means that are summed in another order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Say what is trained on.

    Args:
        case: name of the module.
        num_microbatches: micro-batches per update, of all replicas together.
        size: rows of a micro-batch.
        num_steps: batches of a pipeline per epoch.
        num_epochs: how often they are trained on.
        dropout: of the module.
        seed: set when the module has been made.
        module: made in place of the case's.
        flags: more of the Trainer's flags, as pairs.
        plugins: make what the Trainer is plugged with, on each rank.
    """

    case: str
    num_microbatches: int = 4
    size: int = 3
    num_steps: int = 4
    num_epochs: int = 2
    dropout: float = 0.0
    seed: int = 5
    module: Callable[..., LightningModule] | None = None
    flags: tuple[tuple[str, Any], ...] = ()
    plugins: tuple[Callable[[], Any], ...] = ()

    def make(self) -> LightningModule:
        return (self.module or CASES[self.case].make)(dropout=self.dropout)

    def batch(self, k: int) -> Any:
        return CASES[self.case].batch(k, self.size)

    def groups(self, replicas: int | None = None, replica: int = 0) -> list[list[int]]:
        """Return which micro-batches each batch joins; without a replicas there is one in each."""
        m = self.num_microbatches
        if replicas is None:
            return [[k] for k in range(m * self.num_steps)]
        return [[t * m + i for i in range(replica, m, replicas)] for t in range(self.num_steps)]


# ---------------------------------------------------------------------- data


def joined(batches: Sequence[Any]) -> Any:
    """Join trees along dim 0; of what is neither tensor nor container, the first."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if hasattr(first, "keys"):  # a dict or BatchEncoding
        return type(first)({name: joined([b[name] for b in batches]) for name in first})
    if dataclasses.is_dataclass(first):
        return type(first)(**joined([vars(b) for b in batches]))
    if isinstance(first, list) and isinstance(first[0], str):
        return [text for texts in batches for text in texts]
    if isinstance(first, list | tuple):
        fields = map(joined, zip(*batches, strict=True))
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    return first


class Joined(Dataset[Any]):
    """Batches of a job, each of a group of micro-batches."""

    def __init__(self, job: Job, groups: list[list[int]]) -> None:
        self._job, self._groups = job, groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, t: int) -> Any:
        return joined([self._job.batch(k) for k in self._groups[t]])


def loader(job: Job, replicas: int | None = None) -> DataLoader[Any]:
    """Return this rank's batches: of its replica, or without a replicas one micro-batch each."""
    replica = 0 if replicas is None else here().rank // (here().num_ranks // replicas)
    return Resumable(Joined(job, job.groups(replicas, replica)), batch_size=None)


# ---------------------------------------------------------------------- runs


class StepLosses(Callback):
    """Read the rate before each batch; behind it what was logged and returned, and the scale."""

    def __init__(self) -> None:
        self.logged: list[float] = []
        self.returned: list[float] = []
        self.scales: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.logged.append(float(trainer.callback_metrics["train_loss_step"]))
        self.returned.append(float(outputs["loss"]))
        if scaler := getattr(trainer.precision_plugin, "scaler", None):
            self.scales.append(scaler.get_scale())


@dataclasses.dataclass(frozen=True)
class Run:
    """Hold what one rank trains with."""

    trainer: Trainer
    module: LightningModule
    batches: DataLoader[Any]
    seen: StepLosses

    def outcome(self) -> Outcome:
        """Return what tests compare."""
        plan = getattr(self.trainer.strategy, "plan", None)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        state = scaler.state_dict() if scaler else {}
        return {
            "weights": weights_of(self.module),
            "metrics": {name: float(x) for name, x in self.trainer.callback_metrics.items()},
            "logged": list(self.seen.logged),
            "returned": list(self.seen.returned),
            "global_step": self.trainer.global_step,
            "epoch": self.trainer.current_epoch,
            "num_stages": plan and plan.num_stages,
            "plan": plan,
            "stage_of": dict(getattr(self.trainer.strategy, "stage_of", {})),
            "rates": list(self.seen.rates),
            "scales": list(self.seen.scales),
            "scaler": (state.get("scale"), state.get("_growth_tracker")),
        }


def prepare(
    job: Job, strategy: dict[str, Any] | None, callbacks: Sequence[Callback] = (), **more: Any
) -> Run:
    """Make module, Trainer and batches of this rank: by a strategy, or plain without one."""
    seen, flags, replicas = StepLosses(), dict(job.flags) | more, None
    if strategy is None:
        flags["accumulate_grad_batches"] = job.num_microbatches * flags.get(
            "accumulate_grad_batches", 1
        )
    elif here().num_ranks > 1 and PRESETS[strategy["preset"]].placement == "replicated":
        replicas = job.num_microbatches
        assert replicas == here().num_ranks
    else:
        replicas = strategy.get("replicas", 1)
        strategy = {"num_microbatches": job.num_microbatches // replicas} | strategy
    if job.plugins:
        flags["plugins"] = [make() for make in job.plugins]
    callbacks = [seen, *callbacks, *flags.pop("callbacks", ())]
    flags = {"max_epochs": job.num_epochs} | flags
    trainer = make_trainer(strategy or "auto", callbacks=callbacks, **flags)
    module = job.make()
    seed_everything(job.seed, verbose=False)
    return Run(trainer, module, loader(job, replicas), seen)


def fit(
    job: Job, strategy: dict[str, Any] | None, file: Path | None = None, **flags: Any
) -> Outcome:
    """Train on this rank, from a file if one is given; return what tests compare."""
    run = prepare(job, strategy, **flags)
    validates = "val_check_interval" in dict(job.flags) | flags
    run.trainer.fit(run.module, run.batches, loader(job, 1) if validates else None, ckpt_path=file)
    return run.outcome()


def fit_validating(job: Job, strategy: dict[str, Any] | None) -> Outcome:
    """Train on this rank, with validation in the middle of epochs."""
    return fit(job, strategy, val_check_interval=2, limit_val_batches=2)


def save(job: Job, strategy: dict[str, Any] | None, folder: Path, step: int) -> None:
    """Train on this rank until behind a step, of which a checkpoint is written: step=N.ckpt."""
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=step, save_top_k=-1)
    flags = {"max_steps": step + 2, "enable_checkpointing": True}
    fit(job, strategy, callbacks=[saver], **flags)


def fit_in_two(job: Job, strategy: dict[str, Any] | None, folder: Path, step: int) -> Outcome:
    """Train until behind a step, and from there on in a new Trainer."""
    save(job, strategy, folder, step)
    return fit(job, strategy, folder / f"step={step}.ckpt")


@cache
def plainly(function: Callable[..., Any], job: Job, *args: Any) -> Any:
    """Return what a function returns in one process without a strategy, run once per session."""
    return processes.run(function, 1, job, None, *args)[0]


def reference(job: Job) -> Outcome:
    """Return the plain run of a job."""
    return plainly(fit, job)


def pipelines(
    job: Job, num_ranks: int, *args: Any, function: Callable[..., Any] = fit, **strategy: Any
) -> list[Outcome]:
    """Return what the function returns on ranks; 2 or 4 stages begin where the case says."""
    if strategy.get("stages") in (2, 4):
        strategy["stages"] = CASES[job.case].cuts(strategy["stages"])
    return processes.run(function, num_ranks, job, strategy, *args, time_limit_s=90.0)


# ---------------------------------------------------------------------- comparisons


def assert_equals_plain(ranks: list[Outcome], job: Job, exact_metrics: bool = True) -> None:
    """Compare every rank with the plain run: weights bit by bit, what was logged, steps."""
    plain = reference(job)
    for r, rank in enumerate(ranks):
        assert rank["global_step"] == plain["global_step"] >= 8
        assert_same(rank["weights"], plain["weights"], f"{job.case} rank {r}")
        _compare_losses(rank, plain, job.num_microbatches)
        _compare_metrics(rank["metrics"], plain["metrics"], exact_metrics)


def _compare_losses(rank: Outcome, plain: Outcome, m: int) -> None:
    for what, share in (("logged", 1 / m), ("returned", 1.0)):  # returned are divided by m
        each = torch.tensor(plain[what], dtype=torch.float64).reshape(-1, m)
        given = torch.tensor(rank[what], dtype=torch.float64)
        torch.testing.assert_close(given, each.sum(1) * share, rtol=CLOSE, atol=CLOSE)


def _compare_metrics(given: dict[str, float], expected: dict[str, float], exact: bool) -> None:
    assert given.keys() == expected.keys()
    for name in expected.keys() - {"train_loss_step"}:  # which is the last micro-batch's there
        difference = abs(given[name] - expected[name])
        assert difference <= CLOSE * max(1.0, abs(expected[name])), name
        if exact and name == "train_metric":
            assert difference == 0.0, name


def assert_equal_runs(given: list[Outcome], expected: Outcome) -> None:
    """Compare runs of one plan in different places: everything but rounding of means."""
    for r, rank in enumerate(given):
        assert_same(rank["weights"], expected["weights"], f"rank {r}")
        assert rank["logged"] == expected["logged"]
        _compare_metrics(rank["metrics"], expected["metrics"], exact=True)
