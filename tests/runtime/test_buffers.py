"""Buffers, and the chunks that they are sent and added in."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_cyclic.runtime.buffers import Buffer, Layout
from lightning_cyclic.runtime.gradient_store import Addition, GradientStore, Sum
from lightning_cyclic.runtime.sum_dtypes import SumDtypes
from lightning_cyclic.simulate.best_chunks import MOST

CPU = torch.device("cpu")


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Tensors that lie in different ways, some smaller than a chunk, and one without elements."""
    g = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=g).to(dtype)

    last = draw(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    gaps = draw(6, 8)[:, :5]
    return [draw(37, 5), draw(1), draw(7, 11).t(), draw(), draw(0, 3), last, gaps, draw(300)]


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 16, 200])
def test_chunks_are_the_whole_without_gap_or_overlap(num_chunks: int) -> None:
    layout = Layout(tensors(), CPU, num_chunks=num_chunks)
    buffer = layout.new()
    place = layout.head_bytes
    for c in range(num_chunks):
        for content in layout.content(buffer, c):
            assert content.data_ptr() == buffer.data.data_ptr() + place
            place += content.numel()
        assert layout.is_last(c) == (c == num_chunks - 1)
    assert place == layout.num_bytes
    (whole,) = layout.content(buffer, None)
    assert whole.numel() == layout.num_bytes - layout.head_bytes
    (first,) = layout.content(buffer, 0, with_head=True)
    assert first.data_ptr() == buffer.data.data_ptr()
    assert layout.is_last(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("num_chunks", [1, 3, 16, 200])
def test_every_element_is_in_one_piece(dtype: torch.dtype, num_chunks: int) -> None:
    given = tensors(dtype)
    layout = Layout(given, CPU, num_chunks=num_chunks)
    buffer, counts = layout.new(), layout.laid(map(torch.zeros_like, given))
    for c in range(num_chunks):
        for piece in layout.pieces(c):
            one, there = piece.of(counts), piece.of(buffer.tensors)
            assert one is not None
            assert there is not None
            one.add_(1)
            (content,) = layout.content(buffer, c)  # that the piece lies in
            inside = there.data_ptr() - content.data_ptr()
            assert 0 <= inside <= content.numel() - there.numel() * there.element_size()
    assert all(x is not None and bool((x == 1).all()) for x in counts)


def test_auto_asks_for_no_more_than_the_smallest_tensor_fills() -> None:
    assert Layout([torch.zeros(1)], CPU).most_chunks == MOST


def test_pieces_are_of_what_lies_as_the_layout_has_it() -> None:
    given = tensors()
    layout = Layout(given, CPU, num_chunks=4)
    assert layout.laid(given) == given
    other: list[Tensor | None] = [x.clone(memory_format=torch.contiguous_format) for x in given]
    other[1] = None
    laid = layout.laid(other)
    assert laid[1] is None
    assert laid[0] is other[0]  # it lies in the same way
    assert laid[5] is not other[5]  # it did not
    for x, spec in zip(laid, layout.specs, strict=True):
        assert x is None or x.numel() < 2 or x.stride() == spec.stride


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
def test_adding_chunk_by_chunk_has_the_bits_of_adding_at_once(
    total: torch.dtype, own: torch.dtype, wire: torch.dtype | None,
    of_total: int | None, of_own: int | None,
) -> None:  # fmt: skip
    dtypes, num = SumDtypes(wire), 5
    layout = Layout(tensors(total), CPU, num_chunks=num)
    args = (total, 1, of_total), (own, 2, of_own)
    at_once = Addition(summand(*args[0], layout), summand(*args[1], None), dtypes).add()
    addition = Addition(summand(*args[0], layout), summand(*args[1], None), dtypes)
    for c in range(num):
        addition.add_pieces(layout.pieces(c))
    addition.end()
    assert addition.sum.word == at_once.word == 3
    assert (addition.sum.buffer is None) == (at_once.buffer is None)
    for x, y in zip(addition.sum.grads, at_once.grads, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert x.dtype == y.dtype
            assert bits(x) == bits(y)


def test_a_chunk_adds_what_it_has_and_no_more() -> None:
    layout = Layout(tensors(), CPU, num_chunks=3)
    total, own = summand(torch.float32, 1, None, layout), summand(torch.float32, 2, None, None)
    assert total.buffer is not None
    before = total.buffer.data.clone()
    addition = Addition(total, own, SumDtypes())
    addition.add_pieces(layout.pieces(1))
    changed = (total.buffer.data != before).nonzero()
    (content,) = layout.content(total.buffer, 1)
    begin = content.data_ptr() - total.buffer.data.data_ptr()
    assert begin <= int(changed.min())
    assert int(changed.max()) < begin + content.numel()
    assert addition.sum.buffer is total.buffer  # in place, so that it is sent from there


def test_what_is_first_is_the_sum_and_lies_as_it_will_be_sent() -> None:
    layout = Layout(tensors(), CPU, num_chunks=3)
    store = GradientStore(lambda j: [])
    given = Sum([x.clone(memory_format=torch.contiguous_format) for x in tensors()])
    store.extend(0, 0, given)
    assert store.begin_addition(0, 0, layout=layout) is None
    found = store.take(0, 0)
    for x, y, spec in zip(found.grads, tensors(), layout.specs, strict=True):
        assert x is not None
        assert torch.equal(x, y)
        assert x.numel() < 2 or x.stride() == spec.stride
