"""Compressed tensors: of a pruned weight, the kept elements alone, in the order of the index.

mask         1 0 0 1 / 0 1 0 0        which elements of a weight are kept
index        0 3 5                    their positions in the flat weight, int32, made once
compress     w.view(-1)[index]        1-D; gradient, master weight and optimizer state share it
expand_into  w.view(-1)[index] = v    in place; the others are zero and stay so

Nothing here knows of optimizers, hooks or Lightning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor

from lightning_cyclic.errors import ConfigurationError

Layout: TypeAlias = "DenseLayout | SparseLayout"

MOST_ELEMENTS = 2**31 - 1  # of a tensor whose positions are int32
_AT_ONCE = 1 << 18


@final
class DenseLayout:
    """Train all elements, in the weight's own shape: the same methods, of no index."""

    def compress(self, dense: Tensor) -> Tensor:
        """Return what is trained of a tensor of the weight's shape, in its dtype."""
        return dense.detach()

    def expand(self, values: Tensor) -> Tensor:
        """Return a tensor of the weight's shape."""
        return values.detach()

    def expand_into(self, values: Tensor, dense: Tensor) -> None:
        """Write values into a tensor of the weight's shape, in place and in its dtype."""
        dense.detach().copy_(values.detach())

    def to(self, device: torch.device) -> DenseLayout:
        """Return the same layout for tensors of a device."""
        return self


@final
class SparseLayout:
    """Train the elements that a mask keeps, as a 1-D tensor.

    Args:
        index: positions in the flat weight, int32, ascending, shape (kept,).
        shape: of the weight.

    Raises:
        ConfigurationError: a weight whose positions do not fit into int32.

    Source: Singh and Bhatele, "Exploiting Sparsity in Pruned Neural Networks to Optimize Large
        Model Training", IPDPS 2023, arXiv 2302.05045, section III.

    Example:
        >>> layout = SparseLayout.of(torch.tensor([[True, False], [False, True]]))
        >>> layout.index
        tensor([0, 3], dtype=torch.int32)
        >>> layout.compress(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([1., 4.])
    """

    def __init__(self, index: Tensor, shape: Sequence[int]) -> None:
        self.index = index
        self.shape = torch.Size(shape)
        check_size(self.shape)

    @classmethod
    def of(cls, mask: Tensor) -> SparseLayout:
        """Return the layout of a mask, bool, True where an element is kept."""
        check_size(mask.shape)
        return cls(mask.reshape(-1).nonzero().view(-1).to(torch.int32), mask.shape)

    @property
    def mask(self) -> Tensor:
        """Return the mask, bool, of the weight's shape."""
        return self.expand(torch.ones_like(self.index, dtype=torch.bool))

    @property
    def digest(self) -> str:
        """Return a hash of shape and positions, the same wherever the mask is."""
        told = hashlib.sha256(repr(tuple(self.shape)).encode())
        told.update(self.index.cpu().contiguous().view(torch.uint8).numpy().data)
        return told.hexdigest()

    def compress(self, dense: Tensor) -> Tensor:
        """Return the kept elements of a tensor of the weight's shape, in its dtype."""
        flat = (dense.to_dense() if dense.is_sparse else dense).detach().reshape(-1)
        return flat.index_select(0, self.index)

    def expand(self, values: Tensor) -> Tensor:
        """Return a new tensor of the weight's shape, with zeros in all other places."""
        dense = torch.zeros(self.shape, dtype=values.dtype, device=values.device)
        self.expand_into(values, dense)
        return dense

    def expand_into(self, values: Tensor, dense: Tensor) -> None:
        """Write values into a tensor of the weight's shape, whose other elements stay."""
        if not dense.is_contiguous():  # channels_last
            dense.detach().copy_(self.expand(values.to(dense.dtype)))
            return
        flat = dense.detach().view(-1)
        # index_put_ makes an int64 copy of its positions: of all at once, 8 bytes for each
        for k in range(0, len(self.index), _AT_ONCE):
            part = slice(k, k + _AT_ONCE)
            flat.index_put_((self.index[part],), values.detach()[part].to(dense.dtype))

    def to(self, device: torch.device) -> SparseLayout:
        """Return the same layout for tensors of a device."""
        return SparseLayout(self.index.to(device), self.shape)


def check_size(shape: Sequence[int], name: str = "") -> None:
    """Refuse a weight of more elements than int32 can tell apart.

    Args:
        shape: of the weight, of which no more is looked at.
        name: of its parameter, for the error.

    Raises:
        ConfigurationError: with the number of elements.
    """
    numel = torch.Size(shape).numel()
    if numel > MOST_ELEMENTS:
        raise ConfigurationError(
            f"parameter {name!r} has {numel} elements, but positions of kept elements are int32; "
            f"allowed: up to {MOST_ELEMENTS} in one tensor; split the layer, or exclude it: "
            f"SparseStatePrecision(exclude=({name!r}, ...))"
        )
