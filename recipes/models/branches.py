"""What Inception networks are made of: convolutions side by side, joined along the channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Size = int | tuple[int, int]


def convolution(
    inputs: int, outputs: int, size: Size, *, stride: int = 1, padding: Size = 0
) -> nn.Sequential:
    """Make a convolution without bias, BatchNorm and ReLU."""
    conv = nn.Conv2d(inputs, outputs, size, stride, padding, bias=False)
    nn.init.trunc_normal_(conv.weight, std=0.1, a=-0.2, b=0.2)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU())


class Branches(nn.ModuleList):
    """Give each branch the same input and concatenate what they return: (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, sum of the branches' channels, H', W')."""
        return torch.cat([branch(x) for branch in self], dim=1)
