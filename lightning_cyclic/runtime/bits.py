"""Bits: notice that a tensor has changed, or differs from another, without a copy of it.

And the other way round: change tensors in place, and let autograd not count it.

    version     how often torch has counted that a tensor was changed in place
    Mark        a value and its version: whether it is still the same
    digest      of all elements; sum_of_bits costs less, and sees less
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_AT_ONCE = 1 << 18
_ODD = 0x5851F42D4C957F2D  # spreads places over 64 bits


class Mark(NamedTuple):
    """Hold a value, and its version, so that it can be told later whether it is the same."""

    value: Any
    version: int

    @classmethod
    def of(cls, value: Any) -> Mark:
        return cls(value, version(value))

    def is_of(self, value: Any) -> bool:
        """Say whether a value is this one, and was not changed in place since."""
        return value is self.value and version(value) == self.version


def version(x: Any) -> int:
    """Return how often a tensor was changed in place; 0 where nobody counts."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


@contextmanager
def unseen(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let the body change tensors in place, unnoticed by graphs that hold them."""
    with ExitStack() as each:
        for x in tensors:  # one by one, as torch 2.6 takes no tuple
            each.enter_context(_unsafe_preserve_version_counter(x))
        yield


@contextmanager
def kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let tensors have their values again behind the body, unnoticed by graphs that hold them."""
    before = [x.detach().clone() for x in tensors]
    try:
        yield
    finally:
        put(tensors, before)


@torch.no_grad()
def put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give tensors values, unnoticed by graphs that hold them."""
    with unseen(tensors):
        for x, value in zip(tensors, values, strict=True):
            x.copy_(value)


def same(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors have one shape, one dtype and the same values."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.detach())


def sum_of_bits(x: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, whose bits are read as integers, shape ()."""
    integers = _integers(x.detach())
    if not integers.is_cpu or integers.numel() <= _AT_ONCE or not integers.is_contiguous():
        return integers.sum(dtype=torch.int64)
    # on the host all that is added at once is there as 64 bits first
    parts = [part.sum(dtype=torch.int64) for part in torch.split(integers.view(-1), _AT_ONCE)]
    return torch.stack(parts).sum()


def digest(x: Tensor) -> Tensor:
    """Return 64 bits that say whether two tensors have the same elements in the same order.

    Each element is multiplied by an odd number of its place, modulo 2**64, so that no single
    change goes unseen, and several with a probability of about 2**-60. 0.0 and -0.0 are the same.

    Args:
        x: of any shape, dense, on any device.

    Returns:
        int64, shape (), where the tensor is: nothing waits for a GPU.
    """
    x = x.detach()
    if x.is_floating_point() or x.is_complex():
        x = x + 0  # -0.0 becomes 0.0
    flat = _integers(x.contiguous()).view(-1)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for number, part in enumerate(torch.split(flat, _AT_ONCE)):
        places = _places(x.device)[: part.numel()]
        total = total * _ODD + (part * places).sum() + number
    return total


@functools.lru_cache(maxsize=8)
def _places(device: torch.device) -> Tensor:
    numbers = torch.arange(1, _AT_ONCE + 1, dtype=torch.int64, device=device)
    numbers = numbers * _ODD
    return (numbers ^ (numbers >> 29)) | 1


def _integers(x: Tensor) -> Tensor:
    numbers = torch.view_as_real(x) if x.is_complex() else x
    return numbers.view(_INTEGERS[numbers.element_size()])
