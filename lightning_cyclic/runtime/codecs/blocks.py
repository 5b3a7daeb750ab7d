"""Blocks of small whole numbers: a quarter of the bytes, without a memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_cyclic.runtime.codecs.base import AbstractCodec, State, wide

_SIZE: Final = 256  # of a block: its scale takes 1/64 of its bytes
_MOST: Final = 127


@final
@dataclass(frozen=True)
class Int8(AbstractCodec):
    """Round each element to one of 255 multiples of a scale, which 256 neighbours share.

    The largest of a block is kept but for the last bit; what is below 1/254 of it becomes 0. A
    block with an element that is not finite has none that is.

    Example:
        >>> Int8().num_bytes(256_000)  # and 1000 scales
        260000
    """

    def sent(self, like: Tensor) -> Sequence[Tensor]:
        num_blocks = -(-like.numel() // _SIZE)
        return [
            torch.empty(num_blocks, _SIZE, dtype=torch.int8, device="meta"),
            torch.empty(num_blocks, 1, dtype=wide(like.dtype), device="meta"),
        ]

    def encode(self, gradient: Tensor, state: State) -> Sequence[Tensor]:
        x = gradient.reshape(-1).to(wide(gradient.dtype))
        blocks = pad(x, (0, -len(x) % _SIZE)).view(-1, _SIZE)
        largest = blocks.abs().amax(1, keepdim=True)  # NaN where one is NaN
        # of a block of zeros, too
        scales = (largest / _MOST).clamp(min=torch.finfo(x.dtype).smallest_normal)
        return [(blocks / scales).round().nan_to_num_(nan=0.0).to(torch.int8), scales]

    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        blocks, scales = sent
        return (blocks * scales).view(-1)[: like.numel()].view(like.shape)
