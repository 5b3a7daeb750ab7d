"""Specs: what is known of a tensor without its values, as data that travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


class TensorSpec(NamedTuple):
    """Hold what is known of a tensor without its values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    requires_grad: bool

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """Describe a tensor."""
        return cls(x.size(), x.stride(), x.dtype, x.is_cpu, x.requires_grad)

    def describes(self, x: Tensor) -> bool:
        """Say whether this is the description of a tensor."""
        return self == (x.size(), x.stride(), x.dtype, x.is_cpu, x.requires_grad)


def spec_to_data(spec: TensorSpec) -> list[Any]:
    """Return a tensor's description as plain data."""
    dtype = str(spec.dtype).removeprefix("torch.")
    return [list(spec.size), list(spec.stride), dtype, spec.on_host, spec.requires_grad]


def spec_from_data(data: Sequence[Any]) -> TensorSpec:
    """Make a tensor's description from what :func:`spec_to_data` returned."""
    size, stride, dtype, on_host, requires_grad = data
    return TensorSpec(
        torch.Size(size), tuple(stride), getattr(torch, dtype), on_host, requires_grad
    )
