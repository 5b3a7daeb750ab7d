"""The loss in what a training step returned, and what it must be like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_cyclic.errors import StepError


def check_loss(output: Any, t: int) -> None:
    """Refuse a loss that no backward can begin at.

    Raises:
        StepError: there is none, or it has several numbers or no graph.
    """
    loss = loss_of(output, t)
    if loss.numel() != 1:
        raise StepError(
            f"training_step returned a loss of shape {list(loss.shape)} (step {t}); allowed: one "
            "number; return its mean"
        )
    if not loss.requires_grad:
        raise StepError(
            f"training_step returned a loss without a graph (step {t}); allowed: a tensor that "
            "depends on trained parameters; do not detach it, and do not compute it under "
            "torch.no_grad()"
        )


def loss_of(output: Any, t: int | None = None) -> Tensor:
    """Return the loss in what a training step returned.

    Raises:
        StepError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        given = "None" if loss is None else f"a {type(loss).__name__} as its loss"
        raise StepError(
            f"training_step returned {given}{'' if t is None else f' (step {t})'}; allowed: a "
            'tensor, or a dict with a tensor under "loss"; return 0 * loss to skip a batch'
        )
    return loss
