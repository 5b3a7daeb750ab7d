"""Checks: what a Trainer, module or optimizer must be like to be trained so; errors by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_cyclic.compat import (
    GradientAccumulationScheduler,
    LightningModule,
    ModelPruning,
    MPSAccelerator,
    StochasticWeightAveraging,
    Trainer,
    TransformerEnginePrecision,
    is_overridden,
)
from lightning_cyclic.errors import ConfigurationError, PlanError, one_of
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.hosts import WeightAveraging
from lightning_cyclic.runtime.absent import is_absent, num_bytes_of
from lightning_cyclic.runtime.compiled import is_compiled
from lightning_cyclic.runtime.weight_forms import WeightForms

RUNNABLE = (
    "cyclic_dp", "cyclic_dp_v1", "lockstep_dp", "cyclic_pipeline", "gpipe", "1f1b", "pipedream",
    "pipedream_2bw", "pipeoptim", "spectrain", "cyclic_mp", "cyclic_zero",
)  # fmt: skip
REMAT = ("never", "always", "except_last")


def check_plan(plan: Plan) -> None:
    """Refuse plans that can be made, drawn and simulated, but not yet run.

    Raises:
        PlanError: a placement, weight rule or sharding without a runtime.
    """
    if is_stagewise(plan):
        _check_stagewise(plan)
        return
    if plan.placement != "replicated":
        raise _not_run(plan, f"placement {plan.placement!r}")
    allowed = ["optimizer", "none"] if plan.weights == "delayed" else ["optimizer"]
    if plan.schedule == "cyclic":
        allowed.append("full")
    if plan.num_workers > 1 and plan.sharding not in allowed:
        raise PlanError(
            f"sharding {plan.sharding!r} (preset {plan.preset!r}) has no runtime yet with "
            f"{plan.weights!r} weights; allowed: {', '.join(map(repr, allowed))}; "
            f'use strategy="cyclic_dp", or CyclicStrategy(sharding={allowed[0]!r})'
        )


def check_hosts_of_groups(plan: Plan, hosts: Sequence[str]) -> None:
    """Refuse groups whose workers are on several hosts, between which messages take longer.

    Args:
        plan: whose workers are ranks.
        hosts: of each rank.

    Raises:
        ConfigurationError: with the ranks of a group, and where they are.
    """
    for first in range(0, plan.num_workers if plan.group_size > 1 else 0, plan.group_size):
        ranks = plan.group(first)
        found = [hosts[rank] for rank in ranks]
        if len(set(found)) > 1:
            each = ", ".join(f"{rank} on {host}" for rank, host in zip(ranks, found, strict=True))
            per_host = Counter(hosts).values()
            fitting = [
                plan.num_workers // size
                for size in range(min(per_host), 0, -1)
                if all(num % size == 0 for num in per_host)
            ]
            raise ConfigurationError(
                f"groups={plan.num_groups} of {plan.num_workers} ranks, but the ranks of a group "
                f"are on several hosts: {each}; allowed: groups that are each on one host, with "
                "neighbouring ranks, as srun --distribution=block numbers them; use "
                f"groups={fitting[0]}, or groups=None"
            )


def is_stagewise(plan: Plan) -> bool:
    """Say whether a plan's workers run single stages of the step, not whole micro-batches."""
    return plan.placement in ("pipelined", "single", "shared")


def _check_stagewise(plan: Plan) -> None:
    if plan.placement == "single" and plan.weights not in ("sync", "delayed", "freshest"):
        raise _not_run(plan, f"weights {plan.weights!r} with placement {plan.placement!r}")
    if plan.placement == "shared" and plan.weights not in ("delayed", "freshest"):
        raise _not_run(plan, f"weights {plan.weights!r} with placement {plan.placement!r}")
    if plan.placement == "shared" and plan.num_microbatches < plan.num_stages:
        raise PlanError(
            f"num_microbatches={plan.num_microbatches} with num_stages={plan.num_stages} and placement "
            "'shared', where as many workers take turns with stage 0; allowed: one micro-batch "
            f"for each of them, or more; use num_microbatches={plan.num_stages}"
        )


def _not_run(plan: Plan, what: str) -> PlanError:
    return PlanError(
        f"{what} (preset {plan.preset!r}) has no runtime yet; allowed: "
        f'presets {", ".join(RUNNABLE)}; use strategy="cyclic_dp", or look at the plan with '
        f"`lightning-cyclic draw {plan.preset} --workers {plan.num_workers}`"
    )


def check_trainer(trainer: Trainer, module: LightningModule, *, sync_batchnorm: bool) -> None:
    """Refuse Trainer flags and modules that cannot be trained so.

    Raises:
        ConfigurationError: with the flag, what is allowed and what to do.
    """
    if isinstance(trainer.accelerator, MPSAccelerator):
        raise ConfigurationError(
            "accelerator 'mps' cannot send point-to-point messages between processes; allowed: "
            "'cpu', 'cuda'; use Trainer(accelerator='cpu')"
        )
    if sync_batchnorm:
        raise ConfigurationError(
            "sync_batchnorm=True needs all workers in the same layer at the same time, and cyclic "
            "workers never are; allowed: sync_batchnorm=False, with which BatchNorm statistics "
            "are relayed from worker to worker; remove the flag"
        )
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__}.automatic_optimization is False, but updates are applied by "
            "the plan, not by the module; allowed: automatic optimization; return the loss from "
            "training_step, or use strategy='ddp'"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} replaces parameters while they are trained, which "
                "workers that have parts or versions of them do not see; allowed: modules that "
                "keep their parameters; prune before or behind fit (torch.nn.utils.prune), or use "
                "strategy='ddp'"
            )
    if isinstance(trainer.precision_plugin, TransformerEnginePrecision):
        raise ConfigurationError(
            f"precision={trainer.precision!r} keeps the scales of FP8 numbers in layers, outside "
            "of parameters and buffers, and changes them where a whole step ends, which workers "
            "that have stages or versions of layers do not see; allowed: FP8 layers that compute "
            "their scales from what they are given; use torchao.float8."
            "convert_to_float8_training(module) in configure_model, precision='bf16-true', or "
            "strategy='ddp'"
        )
    _check_not_compiled(module)


def scaler_of(trainer: Trainer) -> GradScaler | None:
    """Return what scales the loss; None where nothing does."""
    scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def check_pipeline(
    trainer: Trainer, module: LightningModule, *, fitting: bool, sync_batchnorm: bool
) -> None:
    """Refuse what pipelines cannot do.

    Raises:
        ConfigurationError: with the flag, what is allowed and what to do.
    """
    if fitting:
        check_trainer(trainer, module, sync_batchnorm=sync_batchnorm)
    check_no_averaging(trainer, "of which each worker of a pipeline has a part")


def check_no_averaging(trainer: Trainer, why: str) -> None:
    """Refuse callbacks that average weights, where there are several workers.

    Args:
        trainer: with its callbacks.
        why: they cannot, in words behind "the whole module".

    Raises:
        ConfigurationError: with the callback.
    """
    callbacks = trainer.callbacks if trainer.world_size > 1 else []  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ConfigurationError(
                f"{type(callback).__name__} copies the whole module, {why}; allowed: one worker, "
                "or no averaging of weights; remove the callback, or use strategy='cyclic_dp' "
                "without save_distributed_checkpoint"
            )


def check_flow(trainer: Trainer) -> None:
    """Refuse what pipelines without a flush cannot do.

    Raises:
        ConfigurationError: gradients accumulated over batches, or a backward of the module's own.
    """
    if is_overridden("backward", trainer.lightning_module):
        raise ConfigurationError(
            f"{type(trainer.lightning_module).__name__}.backward is not Lightning's own, but a "
            "pipeline without a flush runs backwards stage by stage and does not call it; "
            "allowed: the backward of LightningModule; scale the loss in training_step, or use "
            "strategy='1f1b'"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigurationError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} with a pipeline without "
            "a flush, which updates once per batch; allowed: 1; use larger batches, and "
            "CyclicStrategy(num_microbatches=...) to cut them"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            raise ConfigurationError(
                f"{type(callback).__name__} with a pipeline without a flush, which updates once "
                "per batch; allowed: no gradients accumulated over batches; remove the callback, "
                "or use strategy='1f1b'"
            )


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that cannot update one stage without the others.

    Raises:
        ConfigurationError: no optimizer, several, or one that couples parameters.
    """
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"configure_optimizers returned {len(optimizers)} optimizers; allowed: 1; "
            "use parameter groups of one optimizer"
        )
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS couples all parameters, but each stage is updated by another worker; allowed: "
            "optimizers that update each parameter by itself (SGD, AdamW, ...); "
            "use torch.optim.AdamW(self.parameters())"
        )


def check_no_exchange(optimizer: Optimizer, preset: str) -> None:
    """Refuse schedule-free optimizers where workers read several versions of the weights.

    Raises:
        ConfigurationError: an optimizer that exchanges them between steps.
    """
    if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        raise ConfigurationError(
            f"{type(optimizer).__name__} exchanges the weights between steps, by train() and "
            f"eval(), but under preset {preset!r} workers read several versions of them, which "
            "that does not reach; allowed: optimizers that change weights in step() alone; use "
            "torch.optim.AdamW(self.parameters()) with a schedule, or strategy='1f1b' or 'ddp'"
        )


def check_is_apart(module: nn.Module, memory_limit_bytes: int) -> None:
    """Refuse a module that exceeds a rank's limit, but that each rank has as a whole.

    Raises:
        ConfigurationError: with both numbers of bytes.
    """
    present = sum(num_bytes_of(p) for p in module.parameters() if not is_absent(p))
    if present > memory_limit_bytes and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigurationError(
            f"every rank has parameters of {present} bytes before training begins, but "
            f"memory_limit_bytes={memory_limit_bytes}; allowed: layers on the meta device, of "
            "which each rank makes its own, and no hook or callback that reads them all before; "
            "make them within torch.device('meta') in configure_model, or raise "
            "memory_limit_bytes"
        )


def check_beyond_memory(trainer: Trainer, *, in_files: bool, by_stages: bool) -> None:
    """Refuse what needs the whole of a module that no rank may have.

    Args:
        trainer: of the fit.
        in_files: whether checkpoints are files, not folders.
        by_stages: whether ranks run stages; else whole steps.

    Raises:
        ConfigurationError: checkpoints in one file, or validation on every rank.
    """
    if in_files and trainer.checkpoint_callbacks:
        refuse_file("checkpoints of this run")
    if not by_stages and trainer.enable_validation:
        raise ConfigurationError(
            "all parameters together exceed memory_limit_bytes, and validation under "
            "'cyclic_zero' runs on the whole module; allowed: a fit without validation; use "
            "Trainer(limit_val_batches=0), and trainer.validate(module, ckpt_path=...) on a "
            "checkpoint folder behind it, or strategy='1f1b', which validates by stages"
        )


def refuse_file(what: str) -> NoReturn:
    """Refuse a checkpoint of one file, which a rank would read or write whole.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(
        f"{what} would be one file, of which a rank has the whole, but all parameters together "
        "exceed memory_limit_bytes; allowed: folders, of which each rank has its part; use "
        "CyclicStrategy(save_distributed_checkpoint=True), or Trainer(enable_checkpointing=False)"
    )


def trained_parameters(
    module: nn.Module, optimizer: Optimizer, forms: WeightForms
) -> dict[str, nn.Parameter]:
    """Return name -> parameter of what the optimizer trains, in the module's order.

    Raises:
        ConfigurationError: a parameter outside the module, storage shared by two parameters,
            sparse gradients, or nothing to train.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {n: p for n, p in module.named_parameters() if id(forms.trained(p)) in held}
    named = {n: p for n, p in trained.items() if p.requires_grad}
    outside = len(held) - len(trained)
    if outside:
        raise ConfigurationError(
            f"the optimizer holds {outside} parameter(s) that are not in the LightningModule; "
            "allowed: parameters of the module; register them: self.name = nn.Parameter(...)"
        )
    if not named:
        raise ConfigurationError(
            "the optimizer holds no parameter with requires_grad=True; allowed: at least one; "
            "pass self.parameters() of an unfrozen module"
        )
    _check_storage(named)
    _check_dense(module)
    return named


def check_choice(given: object, allowed: Sequence[str], what: str) -> None:
    """Refuse a value that is not one of the allowed ones.

    Raises:
        ConfigurationError: with the allowed values.
    """
    if given not in allowed:
        raise ConfigurationError(
            one_of(given, list(allowed), what, f"use CyclicStrategy({what}={allowed[0]!r})")
        )


def check_once(paths: Sequence[str]) -> None:
    """Refuse paths of which one is named twice.

    Raises:
        PlanError: with the path.
    """
    twice = next((path for n, path in enumerate(paths) if path in paths[:n]), None)
    if twice is not None:
        kept = ", ".join(f'"{path}"' for path in dict.fromkeys(paths))
        raise PlanError(
            f"stages names {twice!r} twice; allowed: each module once, as its first call begins "
            f"one stage; use CyclicStrategy(stages=[{kept}])"
        )


def check_used(plan: Plan, remat: str, memory_limit_bytes: int | None) -> None:
    """Refuse arguments that plans would ignore: those without pipelines, or without shards.

    Raises:
        ConfigurationError: with the argument.
    """
    given = {"remat": (remat, "never"), "memory_limit_bytes": (memory_limit_bytes, None)}
    for name, (value, default) in given.items():
        is_limit_of_shards = name == "memory_limit_bytes" and plan.axes.sharding.gathers
        if value != default and not (is_stagewise(plan) or is_limit_of_shards):
            raise ConfigurationError(
                f"{name}={value!r} is of no use with placement {plan.placement!r} (preset "
                f"{plan.preset!r}), whose workers keep whole micro-batches; allowed: "
                f'{name}={default!r}, or a pipeline; use CyclicStrategy("1f1b", {name}={value!r})'
            )


def check_adds(plan: Plan, reduce_dtype: object, replicas: int) -> None:
    """Refuse to choose a dtype of sums where none travel.

    Raises:
        ConfigurationError: with the option.
    """
    is_one_pipeline = is_stagewise(plan) and replicas == 1 and not plan.axes.placement.takes_turns
    if reduce_dtype is not None and is_one_pipeline:
        raise ConfigurationError(
            f"reduce_dtype={reduce_dtype!r} is of no use with one replica of a pipeline (preset "
            f"{plan.preset!r}), each of whose workers adds up its own gradients; allowed: "
            "reduce_dtype=None, replicas, or another preset; use "
            f'CyclicStrategy("{plan.preset}", replicas=2, reduce_dtype={reduce_dtype!r}), or "cyclic_dp"'
        )


def check_timed(plan: Plan, stages: object) -> None:
    """Refuse to measure where nothing is decided by times.

    Raises:
        ConfigurationError: stages="measured" where they are cut by bytes.
    """
    if stages == "measured" and plan.placement not in ("pipelined", "shared"):
        raise ConfigurationError(
            f"stages='measured' is of no use with placement {plan.placement!r} (preset "
            f"{plan.preset!r}), whose stages are cut by bytes, which nobody need measure; "
            'allowed: "auto", a number or module paths; or a pipeline; use stages="auto", or '
            'CyclicStrategy("1f1b", stages="measured")'
        )


def check_delayed(plan: Plan, error_feedback: object) -> None:
    """Refuse the correction of old gradients where none are old.

    Raises:
        ConfigurationError: with the option.
    """
    check_switch(error_feedback, "error_feedback")
    if error_feedback and plan.weights == "sync":
        raise ConfigurationError(
            f"error_feedback=True is of no use with weights {plan.weights!r} (preset "
            f"{plan.preset!r}), whose gradients are not old; allowed: error_feedback=False, or a "
            'preset without a flush; use CyclicStrategy("pipedream_2bw", error_feedback=True)'
        )


def check_bytes(given: object, what: str) -> None:
    """Refuse what is no number of bytes.

    Raises:
        ConfigurationError: with the value.
    """
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is not None and not (is_number and given > 0):  # type: ignore[operator]
        raise ConfigurationError(
            f"{what}={given!r}; allowed: a number of bytes above 0, or None; use "
            f"CyclicStrategy(..., {what}=24 * 10**9)"
        )


def check_switch(given: object, what: str) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ConfigurationError: with the value.
    """
    if not isinstance(given, bool):
        raise ConfigurationError(
            f"{what}={given!r}; allowed: True or False; use CyclicStrategy(..., {what}=True)"
        )


def check_no_leftovers(kwargs: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse arguments that only DDP knows.

    Args:
        kwargs: that were given beside those that are known.
        known: names of all arguments; the last stands for others.

    Raises:
        ConfigurationError: with the names.
    """
    if kwargs:
        raise ConfigurationError(
            f"CyclicStrategy does not know {', '.join(map(repr, kwargs))}; allowed: "
            f"{', '.join([*known][:-1])}; remove it (unused parameters need no flag here)"
        )


def _check_not_compiled(module: LightningModule) -> None:
    if is_compiled(module) or getattr(module, "_compiler_ctx", None) is not None:
        raise ConfigurationError(
            f"{type(module).__name__} is compiled as a whole, so that nobody sees where its "
            "stages begin; allowed: compiled modules inside; compile its blocks one by one, "
            "block.compile() or torch.compile(block), or use strategy='ddp'"
        )


def _check_storage(named: Mapping[str, nn.Parameter]) -> None:
    at: dict[int, str] = {}
    for name, p in named.items():
        other = at.setdefault(p.data_ptr(), name) if p.numel() else name
        if other != name:
            raise ConfigurationError(
                f"parameters {other!r} and {name!r} are two objects that share one storage; "
                "allowed: tied weights that are one object; tie them by "
                f"self.{name} = self.{other}"
            )


def _check_dense(module: nn.Module) -> None:
    for path, m in module.named_modules():
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse and m.weight.requires_grad:
            raise ConfigurationError(
                f"{path!r} makes sparse gradients, whose size differs from worker to worker; "
                f"allowed: dense ones; use nn.{type(m).__name__}(..., sparse=False)"
            )
