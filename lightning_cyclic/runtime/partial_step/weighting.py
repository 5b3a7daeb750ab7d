"""The share of each micro-batch in the loss of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


def shares_of(sizes: Sequence[int], parts: int) -> list[Callable[[Tensor], Tensor]]:
    """Return the share of each micro-batch: by samples, where their numbers differ.

    Args:
        sizes: samples of the replica's micro-batches.
        parts: how many such batches make an update.
    """
    if len(set(sizes)) == 1:  # as Lightning divides while it accumulates
        count = len(sizes) * parts
        return [lambda ones: ones / count] * len(sizes)
    total = sum(sizes) * parts
    return [lambda ones, size=size: ones * (size / total) for size in sizes]  # type: ignore[misc]


def whole_share(ones: Tensor) -> Tensor:
    """Return the share of a batch that is not cut."""
    return ones
