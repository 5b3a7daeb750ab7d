"""Buffers: tensors laid out once as the bytes of one message, and seen there without copying.

    | head | tensor 0 | tensor 1 | ...

Each begins at a multiple of 512 bytes, and has its own dtype and strides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from lightning_cyclic.plan.actions import Action
from lightning_cyclic.runtime.moments import AbstractMoment, streams_of
from lightning_cyclic.runtime.transport import AbstractPending
from lightning_cyclic.runtime.values.plain import TensorSpec

NUM_WORDS = 16  # bytes of a head before the marks of tensors that are there
_ALIGNMENT = 512  # of allocators on GPUs: kernels may take another way on less
_MOST_SPREAD = 2  # a tensor that spans more of its storage than this is packed densely


class Sent(NamedTuple):
    action: Action
    pending: AbstractPending
    data: Tensor


@final
class Buffer:
    """Hold tensors that lie in one message, behind its head.

    Args:
        data: all bytes, uint8.
        home: where the buffer goes when nobody needs it.
    """

    __slots__ = ("_streams", "_words", "data", "head_bytes", "home", "sent", "tensors", "users")

    def __init__(
        self, data: Tensor, tensors: list[Tensor], head_bytes: int, home: deque[Buffer]
    ) -> None:
        self.data = data
        self.tensors = tensors
        self.head_bytes = head_bytes
        self.home = home
        self.sent: list[Sent] = []  # under way from here
        self.users: list[AbstractMoment] = []  # when streams of the device are done with it
        self._streams = streams_of(data.device)
        self._words = data.numpy().data if data.is_cpu else None

    @property
    def words(self) -> memoryview:
        """Return the beginning of the message as bytes; a copy where it is not on the host."""
        if self._words is not None:
            return self._words
        # stops the host; only without control, which takes heads where GPUs talk to each other
        return self.data[: self.head_bytes].cpu().numpy().data

    def write_words(self, words: bytes) -> None:
        if self._words is None:
            write_words_to(self.data, words)
        else:  # much faster than by operators of torch
            self._words[: len(words)] = words

    def write(self, tensors: Iterable[Tensor | None]) -> None:
        """Copy tensors in; None leaves a gap."""
        write(tensors, self.tensors)

    def note_use(self) -> None:
        """Note that what the current stream has by now may use it."""
        moment = self._streams.now()
        if not moment.is_over():
            self.users.append(moment)

    def let_go(self) -> None:
        """Let the next who needs a buffer take this one."""
        self.note_use()
        self.home.append(self)

    def is_free(self) -> bool:
        """Say whether the current stream may have it written, without waiting for anything."""
        return all(sent.pending.is_done() for sent in self.sent) and all(
            moment.is_here() or moment.is_over() for moment in self.users
        )


@final
class Layout:
    """Lay tensors of known shapes into buffers, and keep buffers for the next use.

    Args:
        tensors: whose shapes, strides and dtypes it copies.
        num_marks: how many marks its messages have. [one for each tensor]
        keeps: whether buffers that nobody needs wait for the next use, or their memory goes.
    """

    def __init__(
        self, tensors: Iterable[Tensor], device: torch.device, num_marks: int | None = None,
        *, keeps: bool = True,
    ) -> None:  # fmt: skip
        self.specs = tuple(map(sent_spec, tensors))
        self.num_marks = len(self.specs) if num_marks is None else num_marks
        self._device = device
        self.head_bytes = aligned(NUM_WORDS + self.num_marks)
        self.num_bytes = self.head_bytes + total_bytes(self.specs)
        self.keeps = keeps
        self.spare: deque[Buffer] = deque(maxlen=None if keeps else 0)

    def has(self, buffer: Buffer) -> bool:
        return buffer.home is self.spare

    def content(self, buffer: Buffer, *, with_head: bool = False) -> list[Tensor]:
        """Return the bytes of a message, if there are any: NCCL is not asked to send none."""
        begin = 0 if with_head else self.head_bytes
        return [buffer.data[begin:]] if begin < self.num_bytes else []

    def new(self) -> Buffer:
        data = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        tensors = views_of(data, self.head_bytes, self.specs)
        return Buffer(data, tensors, self.head_bytes, self.spare)


def write(tensors: Iterable[Tensor | None], laid: Sequence[Tensor]) -> None:
    pairs = [(v, x) for v, x in zip(laid, tensors, strict=True) if x is not None]
    if pairs:
        torch._foreach_copy_([v for v, _ in pairs], [x for _, x in pairs])


def write_words_to(data: Tensor, words: bytes) -> None:
    """Write the beginning of a message, wherever it lies."""
    data[: len(words)].copy_(torch.frombuffer(bytearray(words), dtype=torch.uint8))


def aligned(num_bytes: int) -> int:
    """Return the next number of bytes at which a tensor may begin."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def sent_spec(x: Tensor) -> TensorSpec:
    """Describe the tensor that the receiver makes: with the same strides, where not wasteful."""
    spec = TensorSpec.of(x)
    if span(spec) <= _MOST_SPREAD * x.numel():
        return spec
    return spec._replace(stride=torch.empty_like(x, device="meta").stride())


def span(spec: TensorSpec) -> int:
    """Count the elements of storage from a tensor's first to its last."""
    if 0 in spec.size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(spec.size, spec.stride, strict=True))


def _num_bytes(spec: TensorSpec) -> int:
    return aligned(span(spec) * spec.dtype.itemsize)


def total_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(map(_num_bytes, specs))


def views_of(data: Tensor, start: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Lay tensors into a buffer; they are no views of it in autograd's eyes."""
    made = []
    for spec in specs:
        x = torch.empty(0, dtype=spec.dtype, device=data.device)
        offset = start // spec.dtype.itemsize
        made.append(x.set_(data.untyped_storage(), offset, spec.size, spec.stride))
        start += _num_bytes(spec)
    return made


def write_into(
    data: Tensor, start: int, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]
) -> None:
    """Copy tensors to where a message lays them."""
    with torch.no_grad():
        for view, spec, x in zip(views_of(data, start, specs), specs, tensors, strict=True):
            if _overlaps(spec):  # an expanded tensor: its span of storage, once
                once = (span(spec),)
                view.as_strided(once, (1,)).copy_(x.as_strided(once, (1,)))
            else:
                view.copy_(x)


def _overlaps(spec: TensorSpec) -> bool:
    return any(n > 1 and step == 0 for n, step in zip(spec.size, spec.stride, strict=True))
