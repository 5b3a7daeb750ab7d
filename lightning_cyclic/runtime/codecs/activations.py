"""Codecs of what crosses from stage to stage: activations, and the gradients that come back.

    forward    x  ->  sent  ->  y, in the place of x for all later stages
    backward   gradient of y  ->  sent  ->  gradient of x

Nothing is kept from one micro-batch to the next: each is of other samples. Between a forward and
its backward both ends keep what the gradient needs, as positions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.errors import ConfigurationError, StepError
from lightning_cyclic.runtime.codecs.base import AbstractCodec
from lightning_cyclic.runtime.codecs.blocks import Int8
from lightning_cyclic.runtime.codecs.power_sgd import PowerSgd
from lightning_cyclic.runtime.codecs.sparse import Dct, TopK, as_large_as, last_of
from lightning_cyclic.runtime.values.plain import TensorSpec

_LEAST_ELEMENTS: Final = AbstractCodec.least_elements
_UINT16: Final = 2**16
DTYPES: Final[Mapping[str, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES: Final = (*DTYPES, "int8")

Kept: TypeAlias = tuple[Tensor, ...]
"""What both ends know of what was sent, and need for its gradient."""


class AbstractCrossingCodec(ABC):
    """Make smaller what crosses from a stage to the next one, and its gradient."""

    def takes(self, x: Tensor, size: int) -> bool:
        """Say whether it encodes a tensor that has a gradient; others are sent as they are.

        Args:
            x: the tensor.
            size: samples of the micro-batch.
        """
        is_usual = x.is_floating_point() and x.dtype.itemsize > 1 and x.layout is torch.strided
        return is_usual and self._takes(x, size)

    @abstractmethod
    def _takes(self, x: Tensor, size: int) -> bool:
        """Say so of a tensor of a usual make."""

    @abstractmethod
    def encode(self, x: Tensor) -> Sequence[Tensor]:
        """Return what is sent of a tensor: new tensors, whose shapes follow from that of x."""

    @abstractmethod
    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return what later stages have of it.

        Args:
            sent: as :meth:`encode` gave it.
            like: the tensor, on the meta device.
        """

    def kept(self, sent: Sequence[Tensor]) -> Kept:
        """Return what its gradient needs of what was sent."""
        return ()

    @abstractmethod
    def encode_gradient(self, grad: Tensor, kept: Kept) -> Sequence[Tensor]:
        """Return what is sent of a gradient."""

    @abstractmethod
    def decode_gradient(self, sent: Sequence[Tensor], kept: Kept, like: Tensor) -> Tensor:
        """Return what earlier stages have of it."""


@final
class LargestOfSamples(AbstractCrossingCodec):
    """Send of each sample the largest elements, and of its gradient those at the same positions.

    All others are 0, so that y = x * mask, of a mask that has no gradient.

    Args:
        density: how much of each sample is sent.

    Source: DCT-MP, Gupta et al., KDD 2021, https://arxiv.org/abs/2010.08899.
    """

    def __init__(self, density: float) -> None:
        self._density = density

    def _num_kept(self, num_elements: int) -> int:
        return math.ceil(self._density * num_elements)

    @override
    def _takes(self, x: Tensor, size: int) -> bool:
        if x.numel() < _LEAST_ELEMENTS or x.shape[0] != size:
            return False
        of_sample = x.numel() // size
        return self._num_kept(of_sample) < of_sample

    @override
    def encode(self, x: Tensor) -> Sequence[Tensor]:
        rows = x.reshape(len(x), -1)
        most = self._num_kept(rows.shape[1])
        size = rows.abs().nan_to_num_(nan=torch.inf)  # what is not finite is sent first
        chosen = as_large_as(last_of(size, most), size, most)
        # the n-th that is chosen goes to place n; others behind the last, where nobody looks
        places = torch.where(chosen, chosen.cumsum(1) - 1, most)
        numbers = torch.arange(rows.shape[1], device=x.device).expand_as(rows)
        positions = places.new_empty(len(x), most + 1).scatter_(1, places, numbers)[:, :-1]
        return [rows.gather(1, positions), _narrowed(positions, rows.shape[1])]

    @override
    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        values, positions = sent
        return _placed(values, positions, like)

    @override
    def kept(self, sent: Sequence[Tensor]) -> Kept:
        return (sent[1],)

    @override
    def encode_gradient(self, grad: Tensor, kept: Kept) -> Sequence[Tensor]:
        return [grad.reshape(len(grad), -1).gather(1, _widened(kept[0]))]

    @override
    def decode_gradient(self, sent: Sequence[Tensor], kept: Kept, like: Tensor) -> Tensor:
        return _placed(sent[0], kept[0], like)


def _placed(values: Tensor, positions: Tensor, like: Tensor) -> Tensor:
    rows = values.new_zeros(len(values), like.numel() // len(values))
    return rows.scatter_(1, _widened(positions), values).view(like.shape)


def _narrowed(positions: Tensor, num_elements: int) -> Tensor:
    """Write down positions in 2 bytes each where that is enough, else in 4, or 8."""
    if num_elements <= _UINT16:  # those from the middle on as negative numbers
        return (positions - _UINT16 * (positions >= _UINT16 // 2)).to(torch.int16)
    fits = num_elements <= torch.iinfo(torch.int32).max
    return positions.to(torch.int32) if fits else positions.contiguous()


def _widened(positions: Tensor) -> Tensor:
    wide = positions.to(torch.int64)
    return wide % _UINT16 if positions.dtype is torch.int16 else wide


@final
class Rounded(AbstractCrossingCodec):
    """Send all in a narrower dtype.

    Args:
        dtype: which.
        may_overflow: whether somebody looks for gradients that are too large for it.
    """

    def __init__(self, dtype: torch.dtype, *, may_overflow: bool = False) -> None:
        self._dtype = dtype
        self._may_overflow = may_overflow

    @override
    def _takes(self, x: Tensor, size: int) -> bool:
        return x.numel() >= _LEAST_ELEMENTS and x.dtype.itemsize > self._dtype.itemsize

    @override
    def encode(self, x: Tensor) -> Sequence[Tensor]:
        return [self._rounded("an activation has", x)]

    @override
    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        return sent[0].to(like.dtype)

    @override
    def encode_gradient(self, grad: Tensor, kept: Kept) -> Sequence[Tensor]:
        if self._may_overflow:
            return [grad.to(self._dtype)]
        return [self._rounded("the gradient of an activation has", grad)]

    @override
    def decode_gradient(self, sent: Sequence[Tensor], kept: Kept, like: Tensor) -> Tensor:
        return self.decode(sent, like)

    def _rounded(self, what: str, x: Tensor) -> Tensor:
        sent = x.to(self._dtype)
        # a GPU is waited for: this is the one dtype that has no larger exponents
        if self._dtype is not torch.float16 or bool(sent.isfinite().all()):
            return sent
        if not bool(x.isfinite().all()):  # nor was it before
            return sent
        raise StepError(
            f"{what} an element of {float(x.abs().max()):g}, but "
            "compress={'activations': 'fp16'} sends none above "
            f"{torch.finfo(torch.float16).max:g}; allowed: smaller ones, or a dtype with a larger "
            "range; use compress={'activations': 'bf16'}"
        )


@final
class EachByItself(AbstractCrossingCodec):
    """Send tensors and gradients alike, as a codec of gradients does that remembers nothing.

    Args:
        codec: the codec; its state is empty each time.
    """

    def __init__(self, codec: AbstractCodec) -> None:
        self._codec = codec

    @override
    def _takes(self, x: Tensor, size: int) -> bool:
        return self._codec.takes(x)

    @override
    def encode(self, x: Tensor) -> Sequence[Tensor]:
        sent = self._codec.encode(x, {})
        # who has a part of x itself would see what later stages change in place
        own = x.untyped_storage().data_ptr()
        return [p.clone() if p.untyped_storage().data_ptr() == own else p for p in sent]

    @override
    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        return self._codec.decode(sent, like).to(like.dtype).view(like.shape)

    @override
    def encode_gradient(self, grad: Tensor, kept: Kept) -> Sequence[Tensor]:
        return self.encode(grad)

    @override
    def decode_gradient(self, sent: Sequence[Tensor], kept: Kept, like: Tensor) -> Tensor:
        return self.decode(sent, like)


def crossing_codec_of(
    given: str | AbstractCodec, *, is_scaled: bool = False
) -> AbstractCrossingCodec:
    """Return what encodes activations, for what a user has chosen.

    Args:
        given: the choice.
        is_scaled: whether a loss scale follows from gradients that are not finite.

    Raises:
        ConfigurationError: a codec of gradients that is none of activations.
    """
    if isinstance(given, Dct | PowerSgd):
        raise _refused(given)
    if isinstance(given, TopK):
        return LargestOfSamples(given.density)
    if isinstance(given, AbstractCodec):
        return EachByItself(given)
    if given == "int8":
        return EachByItself(Int8())
    return Rounded(DTYPES[given], may_overflow=is_scaled)


def _refused(given: Dct | PowerSgd) -> ConfigurationError:
    if isinstance(given, Dct):
        why = (
            "whose thresholds are of gradients of one tensor, step after step; those of samples "
            "are chosen anew each time, which TopK does"
        )
        use = f"TopK(density={given.density})"
    else:
        why = "which has a memory of one matrix, and other samples have others"
        use = "TopK(density=0.05)"
    names = ", ".join(map(repr, NAMES))
    return ConfigurationError(
        f"compress={{'activations': {given!r}}}, {why}; allowed: {names}, TopK(density=...) or a "
        f"codec of your own; use compress={{'activations': {use}}}"
    )


# ---------------------------------------------------------------------- apart from the step


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Let codecs compute as they do anywhere, whatever the user's step has entered."""
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def laid_out(x: Tensor, spec: TensorSpec) -> Tensor:
    """Return a tensor that lies in memory as another one did: kernels add in that order."""
    if x.stride() == spec.stride or 0 in spec.stride:
        return x.data  # no view in autograd's eyes: it may be changed in place
    made = torch.empty_strided(spec.size, spec.stride, dtype=x.dtype, device=x.device)
    return made.copy_(x)


def like_of(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.size, dtype=spec.dtype, device="meta")
