"""Compute that is slept, where workers share cores."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


class Slept(torch.autograd.Function):
    """Sleep in forward and longer in backward, as compute would take.

    Args:
        times: how much longer. [twice as long]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, times: int = 2) -> Tensor:
        ctx.seconds = times * seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None
