"""Taps: layers whose backward gives factors of their weight's gradient, and never the gradient.

    y = layer(x) with a weight that needs no gradient    autograd's own gradient of x: its own bits
    y = tap(y, x, weight)                                the same y; in the backward the stream of
                                                         the weight takes x and the gradient of y

A layer has a ``forward`` of its own while a training is under way. Calls without a graph, in
evaluation, of other weights (torch.func) and within a compiled function are as ever.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from lightning_cyclic.runtime.codecs.factored import Form
from lightning_cyclic.runtime.codecs.low_rank import LowRank
from lightning_cyclic.runtime.plain_copies import ours
from lightning_cyclic.runtime.torch_functions import is_made_now, is_transformed

Blocks = Iterator[tuple[Tensor, Tensor]]


class _AbstractKind(ABC):
    """Know how layers of a class compute, and which rows they multiply with their weight."""

    @abstractmethod
    def obstacle(self, layer: nn.Module) -> str:
        """Return why a layer of this kind cannot be taken; nothing where it can."""

    @abstractmethod
    def call(self, layer: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what a layer gives, and the bias whose gradient is left to the tap, if any."""

    @abstractmethod
    def blocks(self, layer: Any, x: Tensor, delta: Tensor, size: int) -> Blocks:
        """Iterate over blocks of about so many rows, of what went in and of what came back."""


@final
class _Linear(_AbstractKind):
    @override
    def obstacle(self, layer: nn.Module) -> str:
        return "" if type(layer).forward is nn.Linear.forward else "a forward of its own"

    @override
    def call(self, layer: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return functional.linear(x, weight, layer.bias), None

    @override
    def blocks(self, layer: Any, x: Tensor, delta: Tensor, size: int) -> Blocks:
        rows, back = (y.reshape(-1, y.shape[-1]) for y in (x, delta))
        return zip(torch.split(rows, size), torch.split(back, size), strict=True)


@final
class _Convolution(_AbstractKind):
    """Take a convolution as the product of its weight with unfolded places, some images at once.

    A block has one image at least. Kernels of torch that make the gradient of a bias make that of
    the weight with it, so it is left to the tap.
    """

    @override
    def obstacle(self, layer: nn.Module) -> str:
        kind, base = type(layer), nn.Conv2d
        if kind.forward is not base.forward or kind._conv_forward is not base._conv_forward:  # type: ignore[attr-defined]
            return "a forward of its own"
        if layer.groups != 1:
            return f"groups={layer.groups}, of which each has a matrix of its own"
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return f"padding={layer.padding!r} and padding_mode={layer.padding_mode!r}"
        return ""

    @override
    def call(self, layer: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        bias = layer.bias
        return layer._conv_forward(x, weight, None if bias is None else bias.detach()), bias

    @override
    def blocks(self, layer: Any, x: Tensor, delta: Tensor, size: int) -> Blocks:
        if x.dim() == 3:  # one image, without a batch
            x, delta = x[None], delta[None]
        places = delta.shape[2] * delta.shape[3]
        images = max(1, size // max(places, 1))
        for each, back in zip(torch.split(x, images), torch.split(delta, images), strict=True):
            rows = functional.unfold(
                each, layer.kernel_size, layer.dilation, layer.padding, layer.stride
            )
            yield rows.mT.flatten(0, 1), back.flatten(2).mT.flatten(0, 1)


_KINDS: tuple[tuple[type[nn.Module], _AbstractKind], ...] = (
    (nn.Linear, _Linear()),
    (nn.Conv2d, _Convolution()),
)


def _kind_of(layer: nn.Module) -> _AbstractKind | None:
    return next((kind for base, kind in _KINDS if isinstance(layer, base)), None)


def obstacle(layer: nn.Module) -> str | None:
    """Return why a layer has no stream, but for what others do with its weight.

    Returns:
        Nothing ("") where it can have one; None where it is of no kind that ever has.
    """
    kind, weight = _kind_of(layer), layer._parameters.get("weight")
    if kind is None:
        return None
    if is_parametrized(layer) or type(weight) is not nn.Parameter:
        return "a weight that is parametrized, or not made yet"
    if weight._backward_hooks:
        return "a weight with a hook"
    if "forward" in vars(layer):
        return "a forward of its own"
    return kind.obstacle(layer)


def tap(
    layer: nn.Module, name: str, codec: LowRank, block: int, is_on: Callable[[], bool]
) -> Callable[[], None]:
    """Let a layer's backward follow the gradient of its weight; return what ends that.

    Args:
        name: of the weight.
        block: rows that are taken at once.
        is_on: says whether training is under way.
    """
    kind, plain = _kind_of(layer), layer.forward
    assert kind is not None

    def follow(form: Form, x: Tensor, delta: Tensor) -> Tensor:
        return codec.follow(name, form, kind.blocks(layer, x, delta, block))

    def forward(x: Tensor) -> Any:
        weight: Any = layer.weight
        is_trained = torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf
        if not (is_trained and is_on()) or is_transformed() or torch.compiler.is_compiling():
            return plain(x)
        y, bias = kind.call(layer, x, weight.detach())
        # of autocast, which computes with a copy of x: no more is kept than it would keep
        kept = x.detach().to(y.dtype)
        return _Tap.apply(y, kept, weight, bias, follow)  # type: ignore[no-untyped-call]

    layer.forward = ours(forward)

    def end() -> None:
        if vars(layer).get("forward") is forward:
            del layer.forward

    return end


@final
class _Tap(torch.autograd.Function):
    """Be the identity, and give a weight its gradient."""

    @staticmethod
    @override
    def forward(
        ctx: Any, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
        follow: Callable[[Form, Tensor, Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x)
        ctx.form, ctx.follow = Form.of(weight), follow  # the weight itself may leave
        ctx.bias_dtype = None if bias is None or not bias.requires_grad else bias.dtype
        return y.detach()  # no view: who writes to it, as ReLU(inplace=True) does, may

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        bias = None
        if ctx.bias_dtype is not None:
            bias = delta.sum((-1, -2) if delta.dim() == 3 else (0, 2, 3)).to(ctx.bias_dtype)
        is_asked = is_made_now(ctx.next_functions[2][0])  # not by autograd.grad of an input alone
        weight = ctx.follow(ctx.form, x, delta) if is_asked else None
        return delta, None, weight, bias, None
