"""Refuse to cut time: layers that have it in dim 0 must not meet the batch there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_cyclic.errors import StepError

_LAYERS = (nn.RNNBase, nn.MultiheadAttention)  # those of nn.Transformer are made of these


def refusing_time_major(
    module: nn.Module, size: int, call: Callable[[Any], Any], batch: Any
) -> Any:
    """Run the user's step on the first of several micro-batches.

    Args:
        module: whose layers are looked at.
        size: samples of the micro-batch.
        call: runs the step.
        batch: the micro-batch.

    Raises:
        StepError: if a layer without batch_first has as many time steps as there are samples, and
            another number of samples.
    """
    handles = [
        layer.register_forward_pre_hook(partial(_check, path, size), with_kwargs=True)
        for path, layer in module.named_modules()
        if isinstance(layer, _LAYERS) and not layer.batch_first
    ]
    try:
        return call(batch)
    finally:
        for handle in handles:
            handle.remove()


def _check(
    path: str, size: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    x = next((x for x in [*args, *kwargs.values()] if isinstance(x, Tensor)), None)
    if x is None or x.dim() != 3 or x.shape[0] != size or x.shape[1] == size:
        return
    raise StepError(
        f"{path}, {type(layer).__name__} without batch_first, was given {list(x.shape)} for a "
        f"micro-batch of {size} samples, as if these were time steps; allowed: batches that are "
        "cut along their samples; make the layer with batch_first=True if dim 0 is the batch; if "
        "dim 0 is time, cut dim 1 in the module's or datamodule's split_batch(batch, "
        "num_microbatches)"
    )
