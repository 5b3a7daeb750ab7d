"""Local steps behind Lightning's hooks: what does not fit them, and what a checkpoint has of each.

state_dict, optimizer_states    the outer weights; rank 0's own buffers and optimizer state
lightning_cyclic
    local                       own weights where they are not the outer ones, outer momentum
    ranks                       of each: its optimizer's state, and its buffers
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cyclic.compat import Trainer, rank_zero_warn
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.checks import check_no_averaging, scaler_of
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.precision.sparse_state import SparseStatePrecision

RANKS = "ranks"


def check_local_steps(trainer: Trainer, options: Options, plan: Plan) -> None:
    """Refuse what would not be alike on workers that each train weights of their own."""
    check_no_averaging(trainer, "of which each worker trains one of its own")
    precision = trainer.precision_plugin
    found = {
        f"precision={trainer.precision!r}, whose loss scale each worker would have of its own": (
            scaler_of(trainer) is not None,
            "'32-true', 'bf16-mixed' or 'bf16-true'; use Trainer(precision='bf16-mixed')",
        ),
        f"{type(precision).__name__}, which trains parts of the weights": (
            isinstance(precision, SparseStatePrecision),
            "precision plugins that train all of them; remove it, or use preset='lockstep_dp'",
        ),
        "save_distributed_checkpoint=True, in which each stage has one state": (
            options.save_distributed_checkpoint,
            "checkpoints in one file; leave it out",
        ),
    }
    for what, (is_so, todo) in found.items():
        if is_so:
            raise ConfigurationError(
                f"preset {plan.preset!r}, whose workers have weights and optimizer state of "
                f"their own, does not fit {what}; allowed: {todo}"
            )


def own_state(optimizer: Optimizer, module: nn.Module, rank: int) -> dict[str, Any]:
    """Return what a rank alone has, besides weights."""
    buffers = {name: x.detach().clone() for name, x in module.named_buffers()}
    mine = {"optimizer": optimizer.state_dict()["state"], "buffers": buffers}
    return {RANKS: {str(rank): mine}}


def put_buffers(mine: Mapping[str, Any], module: nn.Module) -> None:
    with torch.no_grad():
        for name, x in module.named_buffers():
            if isinstance(x, Tensor) and name in mine["buffers"]:
                x.copy_(mine["buffers"][name])


def put_optimizer_state(mine: Mapping[str, Any], optimizer: Optimizer) -> None:
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": mine["optimizer"], "param_groups": groups})


def warn_of_lost_steps(plan: Plan, t: int) -> None:
    """Say that the last steps are not in the weights that a fit leaves.

    Args:
        t: steps done.
    """
    assert plan.local is not None
    if not (lost := max(_since_exchange(plan, t, j) for j in range(plan.num_stages))):
        return
    todo = f"let max_steps be a multiple of every={plan.local.every}"
    if plan.local.in_turn:  # whose stages are not exchanged in one step
        todo += ", and LocalSteps(in_turn=False), as stages in turn leave some at any end"
    rank_zero_warn(
        f"Training ended {lost} steps behind a period of preset {plan.preset!r}, or of one of its "
        "stages, so that what workers learned in these is not in the outer weights, which are "
        f"those of the module now; {todo}"
    )


def _since_exchange(plan: Plan, t: int, j: int) -> int:
    """Count the steps behind the last exchange of a stage."""
    return next((k for k in range(t) if plan.exchanges(t - 1 - k, j)), t)
