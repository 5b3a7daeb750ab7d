"""Coded crossings: what a codec sends between stages, and what it keeps between F and B.

    F(i,j)      x -> sent, in the packet of stage j+1; kept here until ...
    F(i,j+1)    sent -> y; kept there, too, until ...
    B(i,j+1)    ... the gradient of y -> sent
    B(i,j)      ... sent -> the gradient of x

It is done for stages of one worker as for those of several: results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from lightning_cyclic.runtime.codecs.activations import (
    AbstractCrossingCodec,
    Kept,
    apart,
    laid_out,
    like_of,
)
from lightning_cyclic.runtime.partial_step.ghosts import Handle
from lightning_cyclic.runtime.partial_step.packets import Coded, Packet
from lightning_cyclic.runtime.values.plain import TensorSpec

_Key = tuple[int, int, int]  # step, micro-batch, stage
Sent = Mapping[Handle, Sequence[Tensor]]  # gradients, or what is sent of them


class _Known(NamedTuple):
    """Hold what the gradient of a tensor that was encoded needs."""

    kept: Kept
    spec: TensorSpec


@final
class CodedCrossings:
    """Encode and decode what crosses to and from the stages of one worker.

    Args:
        codec: by which.
        say: tells the user where it has nothing to do.
    """

    def __init__(
        self, codec: AbstractCrossingCodec, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self._codec = codec
        self._device = device
        self._say = say
        self._told: set[int] = set()  # stages
        # of what has gone from a stage, or come to it, and whose gradients are still to cross
        self._gone: dict[_Key, dict[Handle, _Known]] = {}
        self._came: dict[_Key, dict[Handle, _Known]] = {}

    def encode(self, key: _Key, packet: Packet, size: int) -> None:
        """Put what is sent of tensors in their place.

        Args:
            key: of the forward that has made the packet.
            packet: to the next stage.
            size: samples of the micro-batch.
        """
        codec, found = self._codec, packet.tensors.items()
        taken = [h for h, x in found if h in packet.with_grad and codec.takes(x, size)]
        with apart(self._device):
            for h in taken:
                x = packet.tensors.pop(h)
                spec = TensorSpec.of(x)._replace(requires_grad=True)
                packet.coded[h] = Coded(codec.encode(x), spec)
        self._gone[key] = self._known(packet)
        if not taken and key[2] not in self._told:
            self._say_nothing_is_taken(key[2], size)
        self._told.add(key[2])

    def decode(self, key: _Key, packet: Packet) -> Packet:
        """Put what stages have of tensors in the place of what was sent; return the packet.

        Args:
            key: of the forward that takes it.
        """
        self._came[key] = self._known(packet)
        packet.with_grad |= packet.coded.keys()
        with apart(self._device):
            for h, (sent, spec) in packet.coded.items():
                packet.tensors[h] = laid_out(self._codec.decode(sent, like_of(spec)), spec)
        packet.tensors = {h: packet.tensors[h] for h in sorted(packet.tensors)}
        packet.coded = {}
        return packet

    def _known(self, packet: Packet) -> dict[Handle, _Known]:
        kept = self._codec.kept
        return {h: _Known(kept(sent), spec) for h, (sent, spec) in packet.coded.items()}

    def encode_gradients(self, key: _Key, grads: Mapping[Handle, Tensor]) -> Sent:
        """Return what is sent of the gradients that a backward has made.

        Args:
            key: of its forward.
        """
        known = self._came.pop(key)
        with apart(self._device):
            return {
                h: self._codec.encode_gradient(x, known[h].kept) if h in known else (x,)
                for h, x in grads.items()
            }

    def decode_gradients(self, key: _Key, sent: Sent) -> dict[Handle, Tensor]:
        """Return the gradients with which a backward begins.

        Args:
            key: of its forward.
        """
        known = self._gone.pop(key)
        with apart(self._device):
            return {
                h: self._decoded(xs, known[h]) if h in known else xs[0] for h, xs in sent.items()
            }

    def _decoded(self, sent: Sequence[Tensor], known: _Known) -> Tensor:
        kept, spec = known
        return laid_out(self._codec.decode_gradient(sent, kept, like_of(spec)), spec)

    def _say_nothing_is_taken(self, j: int, size: int) -> None:
        self._say(
            f"compress={{'activations': ...}} makes nothing smaller of what crosses from stage "
            f"{j} to stage {j + 1}: it takes floating-point tensors that have gradients, and "
            "enough elements for less to be sent; TopK those whose first dimension is that of "
            f"the micro-batch's {size} samples."
        )
