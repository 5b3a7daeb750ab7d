"""Checks: what a Trainer, module or optimizer must be like to be trained so; errors by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
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
    WeightAveraging,
    is_overridden,
)
from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.presets import AXES, PRESETS
from lightning_cyclic.runtime.absent import is_absent, num_bytes_of
from lightning_cyclic.runtime.compiled import is_compiled
from lightning_cyclic.runtime.weight_forms import WeightForms


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
    has_both = plan.weights == "delayed" or plan.axes.weights.is_local
    allowed = ["optimizer", "none"] if has_both else ["optimizer"]
    if plan.schedule == "cyclic":
        allowed.append("full")
    if plan.num_workers > 1 and plan.sharding not in allowed:
        raise PlanError(
            f"sharding {plan.sharding!r} (preset {plan.preset!r}) has no runtime yet with "
            f"{plan.weights!r} weights; allowed: {', '.join(map(repr, allowed))}; "
            "use "
            f"preset={ {axis: getattr(plan, axis) for axis in AXES} | {'sharding': allowed[0]}!r}"
        )


def workers_per_host(hosts: Sequence[str]) -> int:
    """Return how many neighbouring ranks share a host, if all of several hosts have as many."""
    runs = [len(list(run)) for _, run in groupby(hosts)]
    return runs[0] if len(set(runs)) == 1 and len(set(hosts)) == len(runs) > 1 else 1


def check_hosts_of_groups(plan: Plan, hosts: Sequence[str]) -> None:
    """Refuse groups whose workers are on several hosts, between which messages take longer."""
    for first in range(0, plan.num_workers, plan.group_size):
        ranks = plan.group(first)
        found = [hosts[rank] for rank in ranks]
        if len(set(found)) > 1:
            each = ", ".join(f"{rank} on {host}" for rank, host in zip(ranks, found, strict=True))
            raise ConfigurationError(
                f"group_size={plan.group_size} with {plan.num_workers} ranks, but those of a "
                f"group are on several hosts: {each}; allowed: groups that are each on one host, "
                "with neighbouring ranks, as srun --distribution=block numbers them; use "
                "group_size='host', or group_size=1"
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
            f"num_microbatches={plan.num_microbatches} with num_stages={plan.num_stages} and "
            "placement "
            "'shared', where as many workers take turns with stage 0; allowed: one micro-batch "
            f"for each of them, or more; use num_microbatches={plan.num_stages}"
        )


def _not_run(plan: Plan, what: str) -> PlanError:
    return PlanError(
        f"{what} (preset {plan.preset!r}) has no runtime yet; allowed: "
        f'presets {", ".join(PRESETS)}; use strategy="cyclic_dp", or look at the plan with '
        f"`lightning-cyclic draw {plan.preset} --workers {plan.num_workers}`"
    )


def check_fit(trainer: Trainer, module: LightningModule, *, sync_batchnorm: bool) -> None:
    """Refuse Trainer flags and modules that cannot be trained so."""
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
    kind = type(trainer.precision_plugin)
    if kind.optimizer_step.__module__.partition(".")[0] not in _KNOWN:
        raise ConfigurationError(
            f"{kind.__name__}.optimizer_step is not Lightning's own, but updates are made stage "
            "by stage, and do not call it; allowed: precision plugins that leave the optimizer's "
            "step alone; scale the loss in training_step, change gradients in hooks, or use "
            "strategy='ddp'"
        )
    _check_not_compiled(module)


_KNOWN = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_cyclic")


def scaler_of(trainer: Trainer) -> GradScaler | None:
    """Return what scales the loss; None where nothing does."""
    scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def check_no_averaging(trainer: Trainer, why: str) -> None:
    """Refuse callbacks that average weights, where there are several workers.

    Args:
        why: they cannot, in words behind "the whole module".
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
    """Refuse what pipelines without a flush cannot do."""
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
            "num_microbatches=... to cut them"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            raise ConfigurationError(
                f"{type(callback).__name__} with a pipeline without a flush, which updates once "
                "per batch; allowed: no gradients accumulated over batches; remove the callback, "
                "or use strategy='1f1b'"
            )


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that cannot update one stage without the others."""
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
    """Refuse schedule-free optimizers where workers read several versions of the weights."""
    if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        raise ConfigurationError(
            f"{type(optimizer).__name__} exchanges the weights between steps, by train() and "
            f"eval(), but under preset {preset!r} workers read several versions of them, which "
            "that does not reach; allowed: optimizers that change weights in step() alone; use "
            "torch.optim.AdamW(self.parameters()) with a schedule, or strategy='1f1b' or 'ddp'"
        )


def check_is_apart(module: nn.Module, memory_limit_bytes: int) -> None:
    """Refuse a module that exceeds a rank's limit, but that each rank has as a whole."""
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
        in_files: whether checkpoints are files, not folders.
        by_stages: whether ranks run stages; else whole steps.
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
    """Refuse a checkpoint of one file, which a rank would read or write whole."""
    raise ConfigurationError(
        f"{what} would be one file, of which a rank has the whole, but all parameters together "
        "exceed memory_limit_bytes; allowed: folders, of which each rank has its part; use "
        "save_distributed_checkpoint=True, or Trainer(enable_checkpointing=False)"
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


_INSIDE = ("sampler", "batch_sampler")  # of loaders, of batch samplers, and of what wraps them


def check_samplers(loader: object, wanted: Mapping[str, int], preset: str) -> None:
    """Refuse a sampler that gives ranks of one replica different data."""
    for sampler in _samplers(loader):
        given = {name: getattr(sampler, name, None) for name in wanted}
        if all(isinstance(x, int) for x in given.values()) and given != wanted:
            raise ConfigurationError(
                f"a loader has a {type(sampler).__name__} with {_words(given)}, but under preset "
                f"{preset!r} the ranks of a replica run stages of the same batches; allowed on "
                f"this rank: {_words(wanted)}; make it with "
                "DistributedSampler(data, **self.trainer.distributed_sampler_kwargs), or leave "
                "sampler=... out, and Lightning makes one where data are to be divided"
            )


def _samplers(holder: Any, depth: int = 4) -> Iterator[Any]:
    for inner in (getattr(holder, name, None) for name in _INSIDE if depth):
        if inner is not None:
            yield inner
            yield from _samplers(inner, depth - 1)


def _words(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={number}" for name, number in numbers.items())
