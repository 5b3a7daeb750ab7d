"""Which parameters weight decay applies to, and which are tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def decay_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Split the trainable parameters into groups with weight decay and one without.

    Decay pulls at what multiplies: matrices and convolution kernels. Biases and the scales and
    shifts of normalisation layers, all of one dimension, are left alone.

    Returns:
        Param groups for any torch optimizer: the first takes the optimizer's own weight decay,
        the second sets it to zero. A third takes it as well, and says ``is_table=True``: tables
        of embeddings, and output layers of language models, where there are any.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    tables = set(map(id, _tables(module)))
    kinds = [
        {"params": [p for p in parameters if p.ndim > 1 and id(p) not in tables]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        {"params": [p for p in parameters if id(p) in tables], "is_table": True},
    ]
    return [*kinds[:2], *(kind for kind in kinds[2:] if kind["params"])]


def _tables(module: nn.Module) -> Iterator[nn.Parameter]:
    for each in module.modules():
        if isinstance(each, nn.Embedding):
            yield each.weight
        output = getattr(each, "get_output_embeddings", lambda: None)()  # of Hugging Face
        if output is not None:
            yield output.weight
