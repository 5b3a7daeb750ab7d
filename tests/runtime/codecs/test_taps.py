"""Taps: what autograd makes of all else keeps its bits, and no gradient of a weight is made."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_cyclic.runtime.codecs.coded import Codes
from lightning_cyclic.runtime.codecs.factored import FactoredGradient
from lightning_cyclic.runtime.codecs.low_rank import LowRank
from lightning_cyclic.runtime.codecs.taps import obstacle, tap
from lightning_cyclic.runtime.plain_copies import plain_copies
from tests.harness.rows import more


@contextmanager
def tapped(module: nn.Module, rank: int = 2, block: int = 4) -> Iterator[LowRank]:
    layers = {n: m for n, m in module.named_modules() if obstacle(m) == ""}
    codec = LowRank("low rank", rank, [f"{n}.weight" for n in layers])
    Codes(codec).begin(0)
    ends = [tap(m, f"{n}.weight", codec, block, lambda: True) for n, m in layers.items()]
    try:
        yield codec
    finally:
        for end in ends:
            end()


LAYERS = {
    "rows": (nn.Linear(12, 20), (9, 12)),
    "tokens": (nn.Linear(12, 20), (3, 5, 12)),
    "one row": (nn.Linear(12, 20, bias=False), (12,)),
    "images": (nn.Conv2d(3, 8, 3, padding=1), (5, 3, 6, 6)),
    "strides": (nn.Conv2d(3, 8, 3, stride=2, dilation=2, padding=(2, 1)), (5, 3, 9, 8)),
    "one image": (nn.Conv2d(3, 8, (1, 2), bias=False), (3, 6, 6)),
}


def backward(layer: nn.Module, x: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """Return what a layer gives, and the gradient of what goes into it."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x * 1)  # not a leaf
    y.square().sum().backward(**more)
    assert x.grad is not None
    return y, x.grad


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_else_keeps_its_bits(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[kind]
    layer, x = copy.deepcopy(layer).to(dtype), torch.randn(shape, dtype=dtype)
    expected, (bias, weight) = backward(layer, x), (layer.bias, layer.weight)
    bias_grad, weight_grad = None if bias is None else bias.grad, weight.grad
    with tapped(layer, rank=6):
        found = backward(layer, x)
        assert isinstance(weight.grad, FactoredGradient)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    if bias is not None:
        # of a convolution in float32, a kernel of torch makes both at once, in another order
        is_close = isinstance(layer, nn.Conv2d) and dtype is torch.float32
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if is_close else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(bias.grad, bias_grad, **tolerance)
    if kind == "one row":  # of which there is no more than one direction
        torch.testing.assert_close(weight.grad.matrix(), weight_grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["images", "strides"])
def test_a_convolution_is_a_linear_layer_of_unfolded_places(kind: str) -> None:
    torch.manual_seed(0)
    conv, shape = LAYERS[kind]
    conv, x = copy.deepcopy(conv), torch.randn(shape)
    rows = functional.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride).mT
    linear = nn.Linear(rows.shape[-1], conv.out_channels)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.flatten(1))
        linear.bias.copy_(conv.bias)
    places = rows.shape[1]
    with tapped(conv, block=places), tapped(linear, block=places):
        for _ in range(3):
            for layer, given in ((conv, x), (linear, rows)):
                backward(layer, given)
    torch.testing.assert_close(
        conv.weight.grad.matrix().flatten(1), linear.weight.grad.matrix(), rtol=1e-4, atol=1e-4
    )


class Made(TorchDispatchMode):
    """Notes the new memory that is as large as a weight, if any."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.held = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.sizes = {p.nbytes for p in module.parameters() if p.dim() > 1}
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.held:
                self.found |= {x.untyped_storage().nbytes()} & self.sizes
        return result


def test_no_gradient_of_a_weight_is_made_in_a_backward() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 30, 5), nn.ReLU(), nn.Flatten(), nn.Linear(120, 50))
    x = torch.randn(4, 3, 6, 6)
    plain, factors = Made(net), Made(net)
    loss = net(x).square().sum()
    with plain:
        loss.backward()
    assert plain.found == {4 * 30 * 75, 4 * 50 * 120}
    net.zero_grad()
    with tapped(net):
        loss = net(x).square().sum()
        with factors:
            loss.backward()
        assert not factors.found
    for m in (net[0], net[3]):
        assert isinstance(m.weight.grad, FactoredGradient)


def test_what_is_written_over_behind_a_layer_is_its_output() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(12, 20), nn.ReLU(inplace=True), nn.Linear(20, 20))
    other = copy.deepcopy(one)
    other[1].inplace = False
    x = torch.randn(9, 12)
    with tapped(one), tapped(other):
        for found, expected in zip(backward(one, x), backward(other, x), strict=True):
            assert torch.equal(found, expected)
    assert torch.equal(one[0].weight.grad.matrix(), other[0].weight.grad.matrix())


def test_a_layer_that_is_called_twice_has_the_rows_of_both() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 12)
    x = torch.randn(8, 12)
    with tapped(layer, rank=12, block=4):
        (layer(x) + layer(-x)).square().sum().backward()
        assert layer.weight.grad.num_rows == 16


def test_blocks_that_are_run_again_have_the_same_factors() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20))
    x = torch.randn(8, 12, requires_grad=True)
    found = []
    for call in (net, lambda y: checkpoint(net, y, use_reentrant=False)):
        net.zero_grad()
        with tapped(net):
            call(x).square().sum().backward()
            found.append([net[k].weight.grad.matrix() for k in (0, 2)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_gradients_of_inputs_alone_move_no_stream() -> None:
    layer, x = nn.Linear(12, 20), torch.randn(4, 12, requires_grad=True)
    with tapped(layer):
        torch.autograd.grad(layer(x).square().sum(), x)
        assert layer.weight.grad is None
        layer(x).square().sum().backward()
        assert layer.weight.grad.num_rows == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, more(torch.float16)])
def test_autocast_computes_as_ever_and_factors_are_wide(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(12, 20), torch.randn(9, 12)
    with torch.autocast("cpu", dtype):
        expected = backward(layer, x)
        bias = layer.bias.grad
        with tapped(layer):
            found = backward(layer, x)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert torch.equal(layer.bias.grad, bias)
    assert layer.weight.grad.factors.u.dtype is torch.float32


def test_without_a_graph_and_for_other_weights_layers_are_as_ever() -> None:
    layer, x = nn.Linear(12, 20), torch.randn(4, 12)
    with tapped(layer):
        with torch.no_grad():
            assert layer(x).grad_fn is None
        other = {"weight": torch.randn(20, 12, requires_grad=True) * 1, "bias": layer.bias}
        y = torch.func.functional_call(layer, other, (x,))
        assert torch.equal(y, functional.linear(x, **other))
        assert "Tap" not in type(y.grad_fn).__name__
        each = torch.func.vmap(layer)(x)
        torch.testing.assert_close(each, layer(x))
        layer.weight.requires_grad_(False)
        layer(x).sum().backward()
        assert layer.weight.grad is None


def test_copies_are_plain() -> None:
    net = nn.Sequential(nn.Linear(12, 20))
    x = torch.randn(4, 12)
    with plain_copies(net), tapped(net):
        for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            with torch.no_grad():
                made[0].weight.zero_()
                assert torch.equal(made(x), made[0].bias.expand(4, 20))
                assert not torch.equal(net(x), made(x))
        assert net.state_dict().keys() == {"0.weight", "0.bias"}
    assert "forward" not in vars(net[0])


# ---------------------------------------------------------------------- what holds factors


def gradient_of(layer: nn.Module, dtype: torch.dtype = torch.float32) -> FactoredGradient:
    with tapped(layer.to(dtype)):
        layer(torch.ones(4, 12, dtype=dtype)).square().sum().backward()
    found = layer.weight.grad
    assert isinstance(found, FactoredGradient)
    return found


def test_who_reads_a_gradient_finds_the_matrix() -> None:
    layer = nn.Linear(12, 20)
    grad = gradient_of(layer)
    dense = grad.factors.dense()
    assert torch.equal(grad.norm(), dense.norm())
    assert torch.equal(grad * 2, dense * 2)
    assert torch.equal(copy.deepcopy(grad), dense)
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
    assert norm > 1
    assert grad.norm() < 0.11
    assert grad.is_changed


def test_another_dtype_keeps_factors() -> None:
    grad = gradient_of(nn.Linear(12, 20), torch.bfloat16)
    wide = grad.to(torch.float32)
    assert isinstance(wide, FactoredGradient)
    assert wide.dtype is torch.float32
    assert torch.equal(wide.matrix().bfloat16(), grad.matrix())


# ---------------------------------------------------------------------- what is left alone


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Named(nn.Linear):
    """Computes as its base does."""


def hooked() -> nn.Module:
    layer = nn.Linear(3, 4)
    layer.weight.register_hook(lambda grad: grad * 2)
    return layer


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Linear(3, 4), ""),
        (lambda: Named(3, 4), ""),
        (lambda: nn.Conv2d(3, 4, 3), ""),
        (lambda: Own(3, 4), "a forward of its own"),
        (lambda: nn.Conv2d(4, 4, 3, groups=2), "groups=2"),
        (lambda: nn.Conv2d(4, 4, 3, padding="same"), "padding='same'"),
        (
            lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
            "padding_mode='circular'",
        ),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), "parametrized"),
        (lambda: nn.LazyLinear(4), "not made yet"),
        (hooked, "a weight with a hook"),
        (lambda: nn.Conv1d(3, 4, 3), None),
        (lambda: nn.Embedding(3, 4), None),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_has_no_stream(make: Any, says: str | None) -> None:
    found = obstacle(make())
    assert found == says if not says else says in str(found)
