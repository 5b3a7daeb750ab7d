"""Compute that is slept, where workers share cores."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


class Slept(torch.autograd.Function):
    """Sleep in forward and twice as long in backward, as compute would take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None
