"""Plain crossings: the plain step, where a codec makes smaller what crosses between stages.

    x, of region 0   ->   y, in regions behind   ->   gradient of y, coded   ->   gradient of x

The plain step has no stages, but it knows where they would begin. What the user's code uses there
of earlier regions is what would have come: once coded for each boundary between.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_cyclic.runtime.codecs.activations import (
    AbstractCrossingCodec,
    apart,
    laid_out,
    like_of,
)
from lightning_cyclic.runtime.values.plain import TensorSpec
from lightning_cyclic.runtime.values.trees import map_tensors, tensors


@final
class _Chain:
    """Hold a tensor as regions have it, from the one on that made it."""

    def __init__(self, x: Tensor, region: int) -> None:
        self.region = region
        self.values = [x]


@final
class PlainCrossings:
    """Give the code of one micro-batch the tensors that its stages would have.

    Args:
        size: samples of the micro-batch.
    """

    def __init__(self, codec: AbstractCrossingCodec, size: int) -> None:
        self._codec = codec
        self._size = size
        self._chains: dict[int, _Chain] = {}  # by id: the tensors live as long

    def note(self, value: Any, region: int) -> None:
        """Note the tensors with gradients that a region has, and no earlier one."""
        with torch._C.DisableTorchFunction():
            made = (x for x in tensors(value) if x.requires_grad)
            for x in made:
                if id(x) not in self._chains and not isinstance(x, nn.Parameter):
                    self._chains[id(x)] = _Chain(x, region)

    def at(self, region: int, value: Any) -> Any:
        """Return a value as the stage of a region has it."""
        with torch._C.DisableTorchFunction():
            return map_tensors(lambda x: self._tensor_at(region, x), value)

    def _tensor_at(self, region: int, x: Tensor) -> Tensor:
        chain = self._chains.get(id(x))
        if chain is None:
            return x
        while len(chain.values) <= region - chain.region:
            y = self._crossed(chain.values[-1])
            self._chains[id(y)] = chain
            chain.values.append(y)
        return chain.values[region - chain.region]

    def _crossed(self, x: Tensor) -> Tensor:
        if not self._codec.takes(x, self._size):
            return x
        with torch.enable_grad():  # which the user's code may have left for a while
            crossed: Tensor = _cross(x, self._codec)
        return crossed


class _Crossing(torch.autograd.Function):
    """Be a boundary: encode and decode what passes it, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codec: AbstractCrossingCodec) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.codec, ctx.spec = codec, TensorSpec.of(x)
        with apart(x.device):
            sent = codec.encode(x.detach())
            ctx.kept = codec.kept(sent)
            return laid_out(codec.decode(sent, like_of(ctx.spec)), ctx.spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        codec, kept, spec = ctx.codec, ctx.kept, ctx.spec
        with apart(grad.device):
            sent = codec.encode_gradient(grad.detach(), kept)
            return laid_out(codec.decode_gradient(sent, kept, like_of(spec)), spec), None


_cross: Any = _Crossing.apply
