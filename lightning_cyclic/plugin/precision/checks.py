"""Checks: what a fit with compressed states must be like; errors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cyclic.compat import LightningModule, ModelPruning, SingleDeviceStrategy, Trainer
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.optimizers import SAID_BY, updates_each


def check_fit(trainer: Trainer, module: LightningModule) -> None:
    """Refuse strategies, loops and callbacks that do not know of compressed gradients.

    Raises:
        ConfigurationError: with what was found.
    """
    if (check := getattr(trainer.strategy, "check_compressed_states", None)) is not None:
        check()
    elif not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise ConfigurationError(
            f"SparseStatePrecision was given with {type(trainer.strategy).__name__}, which "
            "exchanges dense gradients or parameters; allowed: one device, strategy='cyclic_dp', "
            "'cyclic_zero', '1f1b' and others of lightning_cyclic; use "
            "Trainer(strategy='cyclic_dp')"
        )
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__}.automatic_optimization is False, but SparseStatePrecision "
            "takes gradients from the parameters as they appear, and toggle_optimizer does not "
            "see those; allowed: automatic optimization; return the loss from training_step, or "
            "leave SparseStatePrecision out"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} prunes while SparseStatePrecision trains, whose masks "
                "stay as they are; allowed: pruning before; fit with the callback first, then "
                "with SparseStatePrecision and without it"
            )


def check_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Refuse weights of another dtype where they are to be trained as they are.

    Raises:
        ConfigurationError: with the parameter.
    """
    for name, p in module.named_parameters():
        if dtype == torch.float32 and p.is_floating_point() and p.dtype != dtype:
            raise ConfigurationError(
                f"parameter {name!r} is {p.dtype}, but SparseStatePrecision(compute='32-true') "
                "trains the module's own weights; allowed: torch.float32; use module.float(), or "
                "compute='bf16-true'"
            )


def check_optimizer(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return the optimizer; refuse those that do not update each element by itself.

    Raises:
        ConfigurationError: with its name.
    """
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"configure_optimizers returned {len(optimizers)} optimizers; allowed: 1 under "
            "SparseStatePrecision; use parameter groups of one optimizer"
        )
    name = type(optimizers[0]).__name__
    if not updates_each("element", optimizers[0]):
        raise ConfigurationError(
            f"nothing says that {name} updates each element by its own gradient and state, and "
            "leaves a zero without a gradient at zero, as SparseStatePrecision needs; allowed: "
            "SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop and ASGD "
            "of torch.optim, and others that say so; if it has no norm and no mean over elements, "
            "and no use for the shape of a matrix, use "
            f"optimizer.{SAID_BY} = 'element'; else use torch.optim.AdamW(self.parameters())"
        )
    return optimizers[0]


def check_gradients(optimizer: Optimizer, names: Mapping[int, str], dtype: torch.dtype) -> None:
    """Refuse low-precision parameters that the optimizer would train without a master weight.

    Args:
        optimizer: before its update.
        names: of the module's parameters, by id.
        dtype: of forwards and backwards.

    Raises:
        ConfigurationError: with a parameter that was unfrozen, or given to it, within the fit.
    """
    if dtype == torch.float32:
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.dtype == dtype and p.grad is not None:
                raise ConfigurationError(
                    f"parameter {names.get(id(p), '?')!r} was unfrozen, or given to the "
                    "optimizer, after the fit began, and has no float32 master weight; allowed: "
                    "parameters that require gradients from the start; call requires_grad_() "
                    "before fit, or use SparseStatePrecision(compute='32-true')"
                )
