"""Buffers, and gradients that are added where they lie."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_cyclic.runtime.buffers import Buffer, Layout
from lightning_cyclic.runtime.gradient_store import GradientStore, Sum, SumDtypes

CPU = torch.device("cpu")


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Tensors that lie in different ways, and one without elements."""
    g = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=g).to(dtype)

    last = draw(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    gaps = draw(6, 8)[:, :5]
    return [draw(37, 5), draw(1), draw(7, 11).t(), draw(), draw(0, 3), last, gaps, draw(300)]


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_the_content_is_what_is_behind_the_head() -> None:
    layout = Layout(tensors(), CPU)
    buffer = layout.new()
    (content,) = layout.content(buffer)
    assert content.data_ptr() == buffer.data.data_ptr() + layout.head_bytes
    assert content.numel() == layout.num_bytes - layout.head_bytes
    (whole,) = layout.content(buffer, with_head=True)
    assert (whole.data_ptr(), whole.numel()) == (buffer.data.data_ptr(), layout.num_bytes)
    empty = Layout([], CPU)
    assert empty.content(empty.new()) == []


def summand(dtype: torch.dtype, seed: int, missing: int | None, layout: Layout | None) -> Sum:
    """Gradients, in a buffer of a layout if one is given; one of them may be missing."""
    given = tensors(dtype, seed)
    buffer: Buffer | None = None
    if layout is not None:
        buffer = layout.new()
        buffer.write(given)
        given = buffer.tensors
    return Sum([None if k == missing else x for k, x in enumerate(given)], seed, buffer)


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("total", "own"), list(product(DTYPES, DTYPES)))
@pytest.mark.parametrize(
    ("of_total", "of_own"), [(None, None), (2, None), (None, 5), (0, 0), (3, 6)]
)
def test_gradients_are_added_to_the_sum_in_the_wider_dtype(
    total: torch.dtype, own: torch.dtype, wire: torch.dtype | None,
    of_total: int | None, of_own: int | None,
) -> None:  # fmt: skip
    dtypes = SumDtypes(wire)
    store = GradientStore(lambda j: [], dtypes)
    store.put(0, 0, summand(total, 1, of_total, Layout(tensors(total), CPU)))
    store.add(0, 0, summand(own, 2, of_own, None))
    found = store.take(0, 0)
    assert found.word == 3
    pairs = zip(tensors(total, 1), tensors(own, 2), strict=True)
    for k, (x, (first, second)) in enumerate(zip(found.grads, pairs, strict=True)):
        there = [y for y, gap in ((first, of_total), (second, of_own)) if k != gap]
        assert (x is None) == (not there)
        if x is not None:
            dtype = dtypes.of_addition(total, own) if len(there) == 2 else there[0].dtype
            sums = [y.to(dtype) for y in there]
            expected = sums[0] if len(sums) == 1 else sums[0] + sums[1]
            assert x.dtype == dtype
            assert bits(x) == bits(expected)


def test_a_sum_that_is_wide_enough_is_added_to_in_place() -> None:
    layout = Layout(tensors(), CPU)
    total, own = summand(torch.float32, 1, None, layout), summand(torch.float32, 2, None, None)
    store = GradientStore(lambda j: [])
    store.put(0, 0, total)
    store.add(0, 0, own)
    assert store.take(0, 0).buffer is total.buffer  # so that it is sent from there
