"""What a training step returns besides its loss, once for the batch and on every worker.

Callbacks find it in ``on_train_batch_end(outputs)``. Of several micro-batches

    numbers (tensors of shape () that are floating)    their mean, weighted by samples
    tensors with a row for each sample                 concatenated
    what is the same for all                           itself
    anything else                                      a list, by micro-batch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cyclic.runtime.values.trees import flatten, unflatten


def further_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> dict[str, Any]:
    """Put together what the micro-batches of a batch returned besides the loss.

    Args:
        outputs: of ``training_step``, by micro-batch.
        sizes: samples of each micro-batch.

    Example:
        >>> import torch
        >>> outputs = [{"loss": torch.ones(()), "y": torch.ones(n)} for n in (2, 1)]
        >>> further_outputs(outputs, [2, 1])
        {'y': tensor([1., 1., 1.])}
    """
    if not outputs or not all(isinstance(output, Mapping) for output in outputs):
        return {}
    names = [n for n in outputs[0] if n != "loss" and all(n in output for output in outputs)]
    return {n: _together([output[n] for output in outputs], sizes) for n in names}


def weighted_mean(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the mean of tensors of shape (), each weighted by its number of samples."""
    if len(values) == 1:
        return values[0]
    weights = weights_for(values[0], sizes)
    return (torch.stack(list(values)) * weights).sum() / weights.sum()


def weights_for(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return numbers of samples as a tensor of the type of ``x``, and where it is."""
    weights = torch.tensor(sizes, dtype=x.dtype)
    # from memory that is not pinned the host would wait for the copy
    return weights.pin_memory().to(x.device, non_blocking=True) if x.is_cuda else weights


def _together(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    first, *rest = values
    if not rest:
        return first
    flat = [flatten(value) for value in values]
    if any(structure != flat[0][1] for _, structure in flat):
        return list(values)
    leaves = [_leaf(parts, sizes) for parts in zip(*(x for x, _ in flat), strict=True)]
    return unflatten(flat[0][1], leaves)


def _leaf(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    if all(isinstance(x, Tensor) for x in parts):
        if all(x.dim() == 0 and x.is_floating_point() for x in parts):
            return weighted_mean(parts, sizes)
        with_rows = (x.dim() > 0 and len(x) == n for x, n in zip(parts, sizes, strict=True))
        same_rest = len({(x.dtype, x.shape[1:]) for x in parts}) == 1
        return torch.cat(list(parts)) if same_rest and all(with_rows) else list(parts)
    if any(isinstance(x, Tensor) or type(x) is not type(parts[0]) for x in parts):
        return list(parts)
    return parts[0] if all(bool(x == parts[0]) for x in parts) else list(parts)
