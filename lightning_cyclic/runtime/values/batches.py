"""The tensors of a batch, which travel, and the rest of it, which every worker has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.values.trees import flatten, unflatten


def refuse_iterators(batch: Any) -> None:
    """Refuse an iterator in the place of a batch.

    Raises:
        StepError: with what to do.
    """
    if isinstance(batch, Iterator):
        raise StepError(
            f"a batch is an iterator ({type(batch).__name__}), from which every stage would take "
            "for itself; allowed: batches of tensors; use list(...) where the batch is made"
        )


def tensors_of(batch: Any) -> list[Tensor]:
    """List the tensors of a batch."""
    return [x for x in flatten(batch)[0] if isinstance(x, Tensor)]


def with_tensors(batch: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a batch like this one, with other tensors."""
    leaves, structure = flatten(batch)
    others = iter(tensors)
    return unflatten(structure, [next(others) if isinstance(x, Tensor) else x for x in leaves])
