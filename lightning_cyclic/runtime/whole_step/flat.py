"""Flat buffers: many tensors in one message, seen as tensors without copying.

One buffer of bytes per stage and version (or partial sum), made once:

    | parameter 0 | parameter 1 | ... | presence bytes (one per tensor) | word byte |
      16-byte aligned, own dtype and strides

The *presence* bytes say which tensors have a gradient at all: an optimizer skips a parameter
without one, so "no gradient" must not become "zero". The *word* byte carries short words around
the ring, so that no collective is needed for them: its bits are those of :class:`Word`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 16


class Word(enum.IntFlag):
    """Say something about a step; a sum carries what any worker said."""

    NONE = 0
    STOP = 1  # somebody asked to end training (SIGTERM)
    ENDS = 2  # somebody had the last batch of the epoch
    GOES_ON = 4  # somebody has more batches


@final
class FlatLayout:
    """Know where each tensor of a list lies in a flat buffer.

    Args:
        tensors: the tensors whose shapes, strides and dtypes the layout copies. Tensors that are
            not dense (expanded, say) are laid out contiguously.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self._specs: list[tuple[int, torch.Size, tuple[int, ...], torch.dtype]] = []
        offset = 0
        for tensor in tensors:
            dense = torch.empty_like(tensor, device="meta")  # keeps strides where they are dense
            self._specs.append((offset, tensor.shape, dense.stride(), tensor.dtype))
            nbytes = tensor.numel() * tensor.element_size()
            offset += _padded(nbytes)
        self._flags_at = offset
        self._num_tensors = len(tensors)
        # whole words: torch.save writes a storage in units of a view's dtype
        self.num_bytes = _padded(offset + len(tensors) + 1)

    def new(self) -> FlatBuffer:
        """Make a buffer of this layout; its tensors are not initialised, its flags are zero."""
        data = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        data[self._flags_at :].zero_()
        views = []
        for offset, shape, stride, dtype in self._specs:
            span = data[offset : offset + shape.numel() * dtype.itemsize].view(dtype)
            views.append(span.as_strided(shape, stride))
        present, word, _ = data[self._flags_at :].tensor_split(
            [self._num_tensors, self._num_tensors + 1]
        )
        return FlatBuffer(data, views, present, word)


@final
class FlatBuffer:
    """Hold one flat buffer and the tensors that lie in it.

    Args:
        data: all bytes, shape (num_bytes,), dtype uint8; this is what a message carries.
        views: the tensors, in layout order.
        present: one byte per tensor, 1 where the tensor holds a value.
        word: one byte, bits of :class:`Word`.
    """

    __slots__ = ("data", "present", "views", "word")

    def __init__(self, data: Tensor, views: list[Tensor], present: Tensor, word: Tensor) -> None:
        self.data = data
        self.views = views
        self.present = present
        self.word = word

    def write(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy the tensors in; None leaves a gap that the presence bytes record."""
        pairs = [(view, x) for view, x in zip(self.views, tensors, strict=True) if x is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [x for _, x in pairs])
        self._mark(tensors, fresh=True)

    def add(self, tensors: Sequence[Tensor | None]) -> None:
        """Add the tensors in place: what is here comes first in every sum."""
        if len(tensors) == 0:
            return
        there = [x for x in tensors if x is not None]
        if len(there) == len(tensors) and bool(self.present.all()):
            torch._foreach_add_(self.views, there)
            return
        here = self.present.tolist()
        for view, x, was_here in zip(self.views, tensors, here, strict=True):
            if x is None:
                continue
            if was_here:
                view.add_(x)
            else:
                view.copy_(x)
        self._mark(tensors, fresh=False)

    def tensors(self) -> list[Tensor | None]:
        """Return the views, None where no value is present."""
        here = self.present.tolist()
        return [view if there else None for view, there in zip(self.views, here, strict=True)]

    def _mark(self, tensors: Sequence[Tensor | None], *, fresh: bool) -> None:
        if all(x is not None for x in tensors):
            self.present.fill_(1)
            return
        marks = torch.tensor([x is not None for x in tensors], dtype=torch.uint8)
        marks = marks.to(self.present.device)
        if fresh:
            self.present.copy_(marks)
        else:
            self.present.bitwise_or_(marks)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
