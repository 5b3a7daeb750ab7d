"""What stages keep for their backward, as surveyed, is what their own runs make autograd save."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_cyclic.runtime.stages.activations import Activations
from lightning_cyclic.runtime.stages.places import CutPoints
from lightning_cyclic.runtime.stages.survey import survey

CUT = 2  # the block that begins the second stage


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = 2 * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


class Custom(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(super().forward(x))


class Residual(nn.Module):
    """Its result is saved by what comes behind it alone, which also changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)).relu_()


class Again(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.outer, self.reentrant = nn.Linear(8, 8), use_reentrant  # the old way wants a graph
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.outer(x), use_reentrant=self.reentrant)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inner(x).chunk(2, -1)
        return (a * b).transpose(0, 1).sigmoid().transpose(0, 1)


def relu() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))


def old() -> nn.Module:
    return Again(use_reentrant=True)


def new() -> nn.Module:
    return Again(use_reentrant=False)


FLAT, IMAGES, ROWS = (4, 8), (4, 3, 8, 8), (4, 5, 8)
BLOCKS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (relu, FLAT), (conv, IMAGES), (attention, ROWS), (dropout, FLAT), (Views, ROWS), (new, FLAT),
    (old, FLAT), (Residual, FLAT), (lambda: Custom(8, 8), FLAT),
]  # fmt: skip


def saved(run: Callable[[], Any], there: Iterable[Tensor]) -> int:
    """Return the bytes of all storages that autograd saves while something runs, but of some."""
    found: dict[int, Any] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        found[storage._cdata] = storage
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        _ = run()
    known = {x.untyped_storage()._cdata for x in there}
    return sum(storage.nbytes() for place, storage in found.items() if place not in known)


def by_stages(model: nn.Sequential, x: Tensor, around: Any) -> list[int]:
    """Return what each of two stages saves, when it is run by itself."""
    there = [*model.parameters(), *model.buffers()]
    with around():
        y = model[:CUT](x).detach()
        first = saved(lambda: model[:CUT](x), there)
    y.requires_grad_()
    with around():
        return [first, saved(lambda: model[CUT:](y).sum(), [*there, y])]


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("around", [nullcontext, bfloat16])
@pytest.mark.parametrize(("make", "size"), BLOCKS)
def test_stages_keep_what_they_save_by_themselves(
    make: Callable[[], nn.Module], size: tuple[int, ...], around: Any
) -> None:
    model = nn.Sequential(*(make() for _ in range(2 * CUT)))
    x = torch.randn(size)

    def step() -> Tensor:
        with around():
            return model(x).sum()

    seen = survey(model, step, for_backward=True)
    cut = next(c.begin for c in seen.calls if c.path == str(CUT))
    kept = Activations(seen)
    found = [kept.between(0, cut), kept.between(cut, seen.end + 1)]
    assert found == by_stages(model, x, around)
    with around():
        whole = saved(lambda: model(x).sum(), [*model.parameters(), *model.buffers()])
    assert kept.between(0, seen.end + 1) == whole
    assert sum(found) + kept.adopted(cut, seen.end + 1) == whole


def test_compiled_blocks_keep_what_their_own_code_does() -> None:
    model, x = nn.Sequential(Residual(), Residual()), torch.ones(FLAT)
    plain = survey(model, lambda: model(x).sum(), for_backward=True).kept
    model[1].compile(backend="eager")
    assert survey(model, lambda: model(x).sum(), for_backward=True).kept == plain


class Masked(nn.Module):
    """Each layer keeps the batch, and what the step makes of it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.constant = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        mask, h = x * 2, x
        for layer in self.layers:
            h = layer(h) * x * mask * self.constant
        return h.sum()


def test_each_stage_keeps_the_batch_and_what_the_step_makes_of_it_alone() -> None:
    model, x = Masked(), torch.ones(FLAT)
    seen = survey(model, lambda: model(x), for_backward=True)
    points, size = CutPoints(seen), x.nbytes
    cut = next(p.tick for p in points.places if p.path == "layers.1")
    # what the second layer is given has been sent, or lies there, and the constant always does
    assert points.load(0, cut).activation_bytes == 2 * size
    assert points.load(cut, seen.end + 1).activation_bytes == 2 * size
    assert points.load(cut, seen.end + 1).adopted_bytes == size
    assert points.load(0, seen.end + 1).activation_bytes == 3 * size


class Functional(nn.Linear):
    """torch.func lets nobody see what is saved."""

    def forward(self, x: Tensor) -> Tensor:
        values = {"weight": self.weight, "bias": self.bias}
        y = super().forward(x)
        return y + torch.func.grad(lambda w: (x @ w["weight"]).sum())(values)["weight"].sum()


class Taking(nn.Linear):
    """It uses a graph of its own at once."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(z).exp().sum(), z)
        return super().forward(x) + slope.detach()


class Writing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x.copy_(super().forward(x))


class Other(nn.Linear):
    """It calls another module where there are no gradients."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if torch.is_grad_enabled() else self.inner(y)


@pytest.mark.parametrize("block", [Functional, Taking, Writing, Other])
def test_where_nobody_can_tell_all_that_is_made_counts(block: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(block() if block is Other else block(8, 8), nn.Linear(8, 8))
    x = torch.ones(FLAT)
    before, graph = x.clone(), x.grad_fn
    asked = survey(model, lambda: model(x).sum(), for_backward=True)
    assert asked.kept is None
    assert torch.equal(x, before)
    assert x.grad_fn is graph
    assert CutPoints(asked).load(0, asked.end + 1).activation_bytes > 0


class Averaging(nn.Module):
    """Its buffer would have a graph behind a step with gradients."""

    def __init__(self, *, is_view: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(9)[1:] if is_view else torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.mean.mul_(0.9).add_(y.mean(0))
        return (y - self.mean).sum()


@pytest.mark.parametrize("is_view", [False, True])  # from which no graph can be taken away
def test_no_graph_stays_behind(is_view: bool) -> None:
    model, x = Averaging(is_view=is_view), torch.ones(FLAT)
    assert (survey(model, lambda: model(x), for_backward=True).kept is None) == is_view
    assert model.mean.grad_fn is None
    assert not model.mean.requires_grad
    assert torch.equal(model.mean, torch.zeros(8))
