"""What crosses from stage to stage, by the rule of DCT-MP: the largest of each sample, both ways.

Written from the rule (the K = ceil(density * d) largest of all but the batch dimension, of equal
ones the first; the gradient at the same positions), not from the package: nothing of it is
imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Cut(torch.autograd.Function):
    """Is a boundary between stages."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, density: float) -> Tensor:
        mask = torch.zeros_like(x, dtype=torch.bool)
        for row, kept in zip(x, mask, strict=True):
            most = -int(-density * row.numel() // 1)
            order = row.abs().view(-1).sort(descending=True, stable=True).indices
            kept.view(-1)[order[:most]] = True
        ctx.mask = mask
        return torch.where(mask, x, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.where(ctx.mask, grad, 0.0), None


def cut(x: Tensor, density: float) -> Tensor:
    """Return what the next stage has of a tensor."""
    made: Tensor = Cut.apply(x, density)
    return made
