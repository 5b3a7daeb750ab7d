"""Both halves of a backward give what one gives, bit for bit, and keep little in between."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.partial_step.split_backward import Pieces, Weights

WIDTH = 12


class Layers(nn.Module):
    """What the first layer makes goes through ``between``, then through the second."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.between(self.norm(self.first(x))))
        return made


class Often(nn.Module):
    """One weight in three calls, of which one is of another kind where asked."""

    def __init__(self, *, otherwise: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.otherwise = otherwise

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight).tanh()
        y = y @ self.weight * 1.5 if self.otherwise else functional.linear(y, self.weight)
        return functional.linear(y.sigmoid(), self.weight)


class Words(nn.Module):
    """Tokens, and the same weights at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, :4].abs().mul(3).long() % 9
        return functional.linear(self.block(self.words(tokens)), self.words.weight)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3)
        self.back = nn.ConvTranspose1d(3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.back(functional.relu_(self.norm(self.convolve(x[:, None]))))
        return made


class Adapter(nn.Module):
    """A frozen weight and two small ones, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + 0.5 * self.up(self.down(x))
        return made


class Kept(nn.Module):
    """A block whose activations are made again, and one whose are not."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.again, self.after = Layers(), nn.Linear(WIDTH, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.again, x.tanh(), use_reentrant=self.use_reentrant)
        made: Tensor = self.after(y)
        return made


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.after = Layers(), nn.Linear(WIDTH, 3)
        self.compiled = torch.compile(self.block, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.after(self.compiled(x))
        return made


def forward(
    module: Callable[[Tensor], Tensor], x: Tensor, weights: Weights
) -> tuple[Tensor, Pieces]:
    pieces = Pieces(weights)
    with pieces.cut_out():
        y = module(x)
    if pieces.looks:
        pieces.look_at([y])
    return y, pieces


def looked_at(module: Callable[[Tensor], Tensor]) -> Weights:
    """Return what one forward shows of the weights."""
    weights = Weights()
    forward(module, torch.randn(3, WIDTH), weights)
    return weights


def two_halves(
    module: Callable[[Tensor], Tensor], xs: list[Tensor], grads: list[Tensor]
) -> list[int]:
    """Run all forwards, all first halves, then all second ones; count weights put off."""
    weights = Weights()
    found = [forward(module, x, weights) for x in xs]
    for (y, pieces), grad in zip(found, grads, strict=True):
        with pieces.first_half():
            y.backward(grad)
    for _, pieces in found:
        pieces.second_half([])
    return [len(pieces.put_off) for _, pieces in found]


@pytest.mark.parametrize(
    ("make", "num_put_off"),
    [
        (Layers, 3),  # and not the two of the norm
        (lambda: Often(otherwise=False), 1),
        (lambda: Often(otherwise=True), 0),
        (Words, 9),
        (Pictures, 4),
        (Adapter, 2),
        (lambda: Kept(use_reentrant=False), 2),
        (lambda: Kept(use_reentrant=True), 2),
        (Compiled, 2),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 2)), 0),
        (lambda: nn.GRU(WIDTH, WIDTH), 0),
    ],
    ids=[
        "layers", "one weight three times", "and otherwise", "words", "pictures", "adapter",
        "checkpoint", "reentrant checkpoint", "compiled", "weight norm", "gru",
    ],
)  # fmt: skip
def test_halves_add_up_to_the_whole_bit_for_bit(
    make: Callable[[], nn.Module], num_put_off: int
) -> None:
    torch.manual_seed(3)
    module = make()

    def out(x: Tensor) -> Tensor:
        y = module(x)
        made: Tensor = y[0] if isinstance(y, tuple) else y
        return made

    xs = [torch.randn(5, WIDTH, requires_grad=True) for _ in range(3)]
    state = {k: x.clone() for k, x in module.state_dict().items()}
    grads = [torch.randn_like(out(x)) for x in xs]
    module.load_state_dict(state)
    for x, grad in zip(xs, grads, strict=True):
        out(x).backward(grad)
    trained = [p for p in module.parameters() if p.requires_grad]
    expected = [x.grad for x in (*trained, *xs)]
    for x in (*trained, *xs):
        x.grad = None
    module.load_state_dict(state)
    assert two_halves(out, xs, grads) == [0, num_put_off, num_put_off]
    assert all(x is not None for x in expected[: len(trained)])
    for x, grad in zip((*trained, *xs), expected, strict=True):
        assert (x.grad is None) is (grad is None)  # tokens have none
        assert x.grad is None or torch.equal(x.grad, grad)


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the process has from /proc")
def test_outputs_are_not_kept() -> None:
    """Make outputs that are much larger than inputs and weights."""
    module = nn.Sequential(nn.Linear(1, 4096), nn.Threshold(0.0, 0.0), nn.Linear(4096, 1))
    x, weights = torch.randn(4096, 1), Weights()
    forward(module, x[:2], weights)

    def kept() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def step() -> int:
        y, pieces = forward(module, x, weights)
        with pieces.first_half():
            y.sum().backward()
        del y
        found = kept()
        pieces.second_half([])
        return found

    step()
    before, size = kept(), 4 * 4096 * 4096
    # the input of the second layer, and the gradient of the first one's output; not that, too
    assert step() - before < 2.5 * size


def test_only_what_weights_need_is_kept_between_the_halves() -> None:
    alive: set[str] = set()

    def between(x: Tensor) -> Tensor:
        y = Saves.apply(x, alive)
        made: Tensor = y
        return made

    module = Layers(between)
    weights = looked_at(module)
    gc.collect()
    assert not alive
    y, pieces = forward(module, torch.randn(2, WIDTH), weights)
    assert alive == {"saved"}
    with pieces.first_half():
        y.sum().backward()
    del y
    gc.collect()
    assert not alive
    assert module.second.weight.grad is None
    pieces.second_half([])
    assert module.second.weight.grad is not None


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: set[str]) -> Tensor:
        kept = x.clone()
        alive.add("saved")
        weakref.finalize(kept, alive.discard, "saved")
        ctx.save_for_backward(kept)
        return kept * kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return 2 * kept * grad, None


def test_gradients_that_came_for_a_weight_are_added_first() -> None:
    p = nn.Parameter(torch.randn(WIDTH, WIDTH))
    x, came = torch.randn(3, WIDTH), torch.randn(WIDTH, WIDTH)

    def step(x: Tensor) -> Tensor:
        return functional.linear(x, p)

    y, pieces = forward(step, x, looked_at(step))
    with pieces.first_half():
        y.sum().backward()
    pieces.second_half([(p, came)])
    (own,) = torch.autograd.grad(functional.linear(x, p).sum(), p)
    assert p.grad is not None
    assert torch.equal(p.grad, came + own)


def test_hooks_of_a_weight_see_its_gradient_once_for_each_micro_batch() -> None:
    module, seen = Layers(), list[Tensor | None]()
    module.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    module.first.weight.register_hook(lambda grad: grad * 2)
    xs, ones = [torch.randn(3, WIDTH) for _ in range(2)], torch.ones(3, WIDTH)
    assert two_halves(module, xs, [ones, ones]) == [0, 3]
    assert len(seen) == 2
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    for x in xs:
        module(x).backward(ones)
    for p, grad in zip(module.parameters(), found, strict=True):
        assert grad is not None
        assert p.grad is not None
        assert torch.equal(p.grad, grad)


@pytest.mark.parametrize("is_new_kind", [False, True])
def test_a_weight_that_is_used_otherwise_later_is_refused(*, is_new_kind: bool) -> None:
    module = Often(otherwise=False)
    weights = looked_at(module)
    y, pieces = forward(module, torch.randn(3, WIDTH), weights)
    with pieces.first_half():
        y.sum().backward()
    module.otherwise = True
    refused = pytest.raises(StepError, match=r"shape \(12, 12\) was used in another way.*'1f1b'")
    pieces = Pieces(weights, "another" if is_new_kind else "")
    with pieces.cut_out():
        y = module(torch.randn(3, WIDTH))
    if is_new_kind:
        with refused:
            pieces.look_at([y])
    else:
        with refused, pieces.first_half():
            y.sum().backward()


def test_a_kind_that_uses_a_weight_otherwise_before_any_is_put_off_has_it_whole() -> None:
    module = Often(otherwise=False)
    weights = looked_at(module)
    module.otherwise = True
    pieces = Pieces(weights, "another")
    with pieces.cut_out():
        y = module(torch.randn(3, WIDTH))
    assert [p is module.weight for p in pieces.look_at([y])] == [True]
    module.otherwise = False
    _, pieces = forward(module, torch.randn(3, WIDTH), weights)
    with pieces.first_half():
        pass
    assert not pieces.put_off


def test_a_kind_that_uses_other_weights_puts_off_both() -> None:
    modules = [nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 3)]
    weights, x = Weights(), torch.randn(3, WIDTH)
    for kind in "aabbab":
        module = modules[kind == "b"]
        pieces = Pieces(weights, kind)
        is_first = pieces.looks
        with pieces.cut_out():
            y = module(x)
        if is_first:
            assert pieces.look_at([y]) == []
        with pieces.first_half():
            y.sum().backward()
        pieces.second_half([])
        assert len(pieces.put_off) == (0 if is_first else 2)


def test_a_weight_that_is_new_is_put_off_from_the_next_but_one_on() -> None:
    module, x = Layers(), torch.randn(3, WIDTH)
    module.second.requires_grad_(False)
    weights, found = Weights(), []
    for n in range(5):
        module.second.requires_grad_(n > 1)
        y, pieces = forward(module, x, weights)
        with pieces.first_half():
            y.sum().backward()
        pieces.second_half([])
        found.append(len(pieces.put_off))
    # nothing of what shows something; the weight that is new is made at once, and is then seen
    assert found == [0, 2, 2, 0, 3]


def test_gradients_of_gradients_are_refused() -> None:
    module, x = Layers(), torch.randn(3, WIDTH, requires_grad=True)
    y, _ = forward(module, x, looked_at(module))
    with pytest.raises(StepError, match="gradients of gradients.*'1f1b'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_step_may_ask_for_gradients_of_activations_itself() -> None:
    module, x = Layers(), torch.randn(3, WIDTH, requires_grad=True)
    y, pieces = forward(module, x, looked_at(module))
    (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(found, expected)
    with pieces.first_half():
        y.sum().backward()
    pieces.second_half([])
    found_of = [p.grad for p in module.parameters()]
    expected_of = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    assert all(
        x is not None and torch.equal(x, y) for x, y in zip(found_of, expected_of, strict=True)
    )


def test_what_enters_a_stage_is_no_weight() -> None:
    x = torch.randn(3, WIDTH, requires_grad=True)
    pieces = Pieces(Weights())
    with pieces.cut_out():
        y = Layers()(x.tanh()) + x
    assert [p.shape for p in pieces.look_at([y])] == [(WIDTH,), (WIDTH,)]  # of the norm


def test_functions_that_others_have_changed_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, seen, linear = Layers(), torch.randn(3, WIDTH), list[Any](), functional.linear

    def theirs(*args: Any) -> Tensor:
        seen.append(args)
        return linear(*args)

    monkeypatch.setattr(functional, "linear", theirs)
    two_halves(module, [x, x], [torch.ones(3, WIDTH)] * 2)
    assert len(seen) == 4
    assert functional.linear is theirs


def test_functions_of_torch_are_as_before() -> None:
    before = functional.linear
    with Pieces(Weights()).cut_out(), pytest.raises(TypeError):
        functional.linear(torch.zeros(1))
    assert functional.linear is before
