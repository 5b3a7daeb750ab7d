"""Bits: notice that a tensor has changed, by whatever way, without a copy of it."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_AT_ONCE = 1 << 18


def sum_of_bits(x: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, whose bits are read as integers, shape ()."""
    numbers = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    integers = numbers.view(_INTEGERS[numbers.element_size()])
    if not integers.is_cpu or integers.numel() <= _AT_ONCE or not integers.is_contiguous():
        return integers.sum(dtype=torch.int64)
    # on the host all that is added at once is there as 64 bits first
    parts = [part.sum(dtype=torch.int64) for part in torch.split(integers.view(-1), _AT_ONCE)]
    return torch.stack(parts).sum()
