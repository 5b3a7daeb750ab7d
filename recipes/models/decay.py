"""Which parameters weight decay applies to."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Split the trainable parameters into a group with weight decay and one without.

    Decay pulls at what multiplies: matrices and convolution kernels. Biases and the scales and
    shifts of normalisation layers, all of one dimension, are left alone.

    Returns:
        Two param groups for any torch optimizer: the first takes the optimizer's own weight
        decay, the second sets it to zero.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
