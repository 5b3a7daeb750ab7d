"""Bits: notice that a tensor has changed, by whatever way, without a copy of it."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def sum_of_bits(x: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, whose bits are read as integers, shape ()."""
    numbers = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    return numbers.view(_INTEGERS[numbers.element_size()]).sum(dtype=torch.int64)
