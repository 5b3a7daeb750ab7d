"""Compression: the codec of a fit, what it goes with, and what checkpoints keep of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_cyclic.compat import Trainer, rank_zero_warn
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.checks import scaler_of
from lightning_cyclic.runtime.codecs.base import AbstractCodec
from lightning_cyclic.runtime.codecs.coded import Codes
from lightning_cyclic.runtime.codecs.weights import CodedWeights

_LEFT = "left_of_weights"


def check_codec(trainer: Trainer, codec: AbstractCodec, *, accumulates: bool) -> None:
    """Refuse what a codec of gradients does not go with.

    Args:
        accumulates: whether one process adds up batches that it cuts as several would.
    """
    if codec.has_memory and scaler_of(trainer) is not None:
        raise ConfigurationError(
            f"compress={codec!r} with precision={trainer.precision!r}, whose loss scale changes, "
            "and with it what is left of earlier gradients; allowed: codecs that leave nothing, "
            "or gradients that are not scaled; use compress='bf16', or "
            "Trainer(precision='bf16-mixed')"
        )
    if accumulates:
        raise ConfigurationError(
            f"compress={codec!r} with num_microbatches and accumulate_grad_batches (or "
            "GradientAccumulationScheduler) on one device, which encodes each micro-batch by "
            "itself, while workers would encode the sum of their own; allowed: one of them; use "
            "accumulate_grad_batches=1, or several devices"
        )
    _check_takes_some(trainer.lightning_module, codec)


def check_weight_codec(trainer: Trainer, codec: AbstractCodec) -> None:
    """Refuse what a codec of new weights does not go with."""
    if scaler_of(trainer) is not None:
        raise ConfigurationError(
            f"compress={{'weights': {codec!r}}} with precision={trainer.precision!r}, by whose "
            "loss scale updates are left out, while those who are sent changes of weights wait "
            "for each; allowed: gradients that are not scaled; use precision='bf16-mixed', or "
            "leave 'weights' out"
        )
    _check_takes_some(trainer.lightning_module, codec)


def _check_takes_some(module: nn.Module, codec: AbstractCodec) -> None:
    """Refuse a codec that would change nothing: of a rank above that of all matrices, say."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained or any(is_lazy(p) or codec.takes(p) for p in trained):  # or not made yet
        return
    largest = max(trained, key=Tensor.numel)
    raise ConfigurationError(
        f"compress={codec!r} with {type(module).__name__}, of whose trained parameters it takes "
        f"none: the largest is of {str(largest.dtype).removeprefix('torch.')} and shape "
        f"{list(largest.shape)}; allowed: codecs that make some of them smaller, and take those "
        f"of {codec.least_elements} elements or more; use another one (of a lower rank), or "
        "leave compress out"
    )


def state_of(codes: Codes | None) -> dict[str, Any]:
    """Return what a checkpoint keeps of a worker's codec, and of those that it stands for."""
    if codes is None or not codes.codec.has_memory:
        return {}
    states = {str(worker): each for worker, each in codes.states().items()}
    return {"codec": {"name": repr(codes.codec), "workers": states}}


def left_of(
    weights: CodedWeights | None, named: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """Return what a checkpoint keeps of what the weights lack that a worker sends."""
    return {} if weights is None else {_LEFT: weights.state(named)}


def put_left(
    weights: CodedWeights | None, saved: Mapping[str, Any], named: Mapping[str, nn.Parameter]
) -> None:
    """Go on with what weights lack in a checkpoint, or from the weights as all have them."""
    if weights is not None:
        weights.put_state(saved.get(_LEFT, {}), named)
    elif saved.get(_LEFT):
        rank_zero_warn(
            "The checkpoint has what was left of changes of weights under "
            "compress={'weights': ...}, and this run sends weights as they are: it is dropped, "
            "and training goes on without it, not with the same bits."
        )


def put_state(codes: Codes | None, saved: Mapping[str, Any], num_workers: int) -> None:
    """Go on with what a checkpoint has kept, where it is of the same codec and workers.

    Args:
        num_workers: how many encode gradients in this run.
    """
    kept = saved.get("codec", {})
    workers = {int(w): each for w, each in kept.get("workers", {}).items()}
    is_same = codes is not None and kept.get("name") == repr(codes.codec)
    if codes is not None and is_same and workers.keys() == set(range(num_workers)):
        codes.put_states(workers)
    elif workers:
        now = "none" if codes is None else f"{codes.codec!r} of {num_workers}"
        rank_zero_warn(
            "The checkpoint has what gradients left behind under "
            f"compress={kept['name']} of {len(workers)} workers, and this run has {now}: it is "
            "dropped, and training goes on without it, not with the same bits."
        )
