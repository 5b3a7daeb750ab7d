"""What autograd saves, as it leaves memory and comes back: values, errors, and what stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan.actions import parse
from lightning_cyclic.runtime.cast_copies import CastCopies
from lightning_cyclic.runtime.partial_step import graph_tier
from lightning_cyclic.runtime.partial_step.graph_tier import GraphTier
from lightning_cyclic.runtime.state_homes import FileHome, HostHome
from lightning_cyclic.runtime.worker import LaneThread
from tests.harness.commands import until
from tests.harness.races import Device, Streams, noted

CPU = torch.device("cpu")


class Rig:
    """Move the graphs of forwards of a function, one after the other.

    Args:
        folder: of the files; None for memory of the host.
    """

    def __init__(self, folder: Path | None, buffers: tuple[Tensor, ...] = ()) -> None:
        self.made: list[int] = []  # bytes of homes
        self._folder = folder
        self.tier = GraphTier(self._make_home, CPU, lambda: buffers)

    def _make_home(self, num_bytes: int) -> Any:
        self.made.append(num_bytes)
        if self._folder is None:
            return HostHome(num_bytes, is_pinned=False)
        return FileHome(self._folder, num_bytes)

    def forward(self, call: Callable[[], Tensor], i: int = 0, casts: Any = None) -> Tensor:
        """Return what a function returns, of which everything is saved."""
        self.tier.expect([parse(f"0EVICT_A{i}#0~tiers")])
        with self.tier.saving(parse(f"0F{i}#0"), casts):
            return call()

    def evict(self, i: int = 0) -> None:
        a = parse(f"0EVICT_A{i}#0~tiers")
        self.tier.hold(a)
        self.tier.move(a)

    def free(self, i: int = 0) -> int:
        """Return how many storages have left."""
        self.tier.free(parse(f"0FREE_A{i}#0"))
        return len(self.tier._graphs[0, i, 0].moved)

    def fetch(self, i: int = 0) -> None:
        a = parse(f"0FETCH_A{i}#0~tiers")
        self.tier.hold(a)
        self.tier.move(a)
        self.tier.take(parse(f"0B{i}#0"))

    def there_and_back(self) -> int:
        self.evict()
        num_away = self.free()
        self.fetch()
        return num_away


@pytest.fixture(params=["file", "host"])
def rig(request: Any, tmp_path: Path) -> Rig:
    return Rig(tmp_path if request.param == "file" else None)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.GELU(), nn.Flatten(), nn.Linear(48, 5)]
    return nn.Sequential(*layers, nn.Tanh(), nn.LayerNorm(5), nn.Softmax(1))


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(module.parameters()), retain_graph=True))


def test_gradients_are_those_of_a_graph_in_memory_also_the_second_time(rig: Rig) -> None:
    module, x = net(), torch.randn(4, 2, 6, 6)
    plain = module(x.clone()).square().sum()
    expected = gradients(module, plain)
    loss = rig.forward(lambda: module(x.clone()).square().sum())
    assert rig.there_and_back() >= 6
    for _ in range(2):
        assert all(map(torch.equal, gradients(module, loss), expected))


class Looks(torch.autograd.Function):
    """Notes what it is given back of what it saves."""

    seen: tuple[Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        base = torch.arange(60.0).to(x.dtype).reshape(3, 4, 5)
        bits = torch.tensor([True, False, True])
        ctx.save_for_backward(base[1:, ::2, 1:].mT, base, x, bits, base.to(torch.bfloat16))
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Looks.seen = ctx.saved_tensors
        return grad


def test_views_have_their_sizes_strides_places_and_alignment(rig: Rig) -> None:
    p = torch.randn(3, requires_grad=True)
    loss = rig.forward(lambda: Looks.apply((p + 1).clone()).sum())
    loss.backward(retain_graph=True)
    before = [x.clone() for x in Looks.seen]
    forms = [(x.size(), x.stride(), x.storage_offset(), x.dtype) for x in Looks.seen]
    Looks.seen = ()
    assert rig.there_and_back() == 4  # of which two views are of one storage
    loss.backward()
    view, base, *_ = Looks.seen
    assert [(x.size(), x.stride(), x.storage_offset(), x.dtype) for x in Looks.seen] == forms
    assert all(map(torch.equal, Looks.seen, before))
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert {x.untyped_storage().data_ptr() % 64 for x in Looks.seen} == {0}


def test_a_storage_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, p, written = Rig(tmp_path), torch.ones(100, requires_grad=True), []
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda f, x, at: written.append(len(x)) or write(f, x, at))

    def call() -> Tensor:
        h = p * 2
        return (h.exp() * h[:50].sum() * h.view(10, 10).sum()).sum()

    loss = rig.forward(call)
    rig.evict()
    assert written.count(400) == 2  # h, and its exp
    del loss


def test_weights_buffers_and_what_others_have_stay(rig: Rig) -> None:
    linear, mask = nn.Linear(8, 8), torch.ones(4, 8)
    rig.tier._buffers = lambda: [mask]
    kept = torch.randn(4, 8)

    def call() -> Tensor:
        h = linear(kept) * mask  # saves kept, mask, and what the layer gave
        return (h.sigmoid() @ linear.weight[:, :4]).square().sum()

    loss = rig.forward(call)
    rig.evict()
    graph = rig.tier._graphs[0, 0, 0]
    storages = {block.data.untyped_storage().data_ptr() for block, _ in graph.moved}
    others = {x.untyped_storage().data_ptr() for x in (linear.weight, mask)}
    assert not storages & others
    assert kept.untyped_storage().data_ptr() in storages  # it may be let go meanwhile
    num_moved = len(graph.moved)
    assert rig.free() == num_moved - 1
    kept.fill_(0)  # as anybody may, whom autograd would tell
    rig.fetch()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("when", ["before it leaves", "while it leaves", "when it is back"])
@pytest.mark.parametrize("what", ["a value", "a weight"])
def test_what_is_changed_in_place_is_refused_as_by_autograd(
    what: str, when: str, rig: Rig
) -> None:
    p = nn.Parameter(torch.randn(5))
    saved: list[Tensor] = []

    def call() -> Tensor:
        saved.append(p * 2)
        return (saved[0].exp() * (saved[0] if what == "a value" else p)).sum()

    def change() -> None:
        with torch.no_grad():
            (saved[0] if what == "a value" else p).add_(1)

    loss, plain = rig.forward(call), None
    if when == "before it leaves":
        change()
    rig.evict()
    if when == "while it leaves":
        change()
        saved.clear()
    rig.free()
    rig.fetch()
    if when == "when it is back":
        change()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*FloatTensor"):
        loss.backward()
    del saved[:]
    plain = call()
    change()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*FloatTensor"):
        plain.backward()


def test_a_change_behind_one_saving_and_before_another_is_no_matter_to_that(rig: Rig) -> None:
    p, kept = torch.randn(5, requires_grad=True), []

    def call() -> Tensor:
        h = p * 1
        kept.append(h.exp())  # saves what it gives, and nobody goes back through it
        h.add_(1)
        return h.square().sum()  # saves h as it is now

    loss = rig.forward(call)
    rig.there_and_back()
    (given,) = torch.autograd.grad(loss, p)
    assert torch.equal(given, 2 * (p.detach() + 1))


def test_a_graph_that_is_away_is_not_used(rig: Rig) -> None:
    p = torch.randn(5, requires_grad=True)
    loss = rig.forward(lambda: (p * 2).exp().sum())
    rig.evict()
    assert rig.free()
    with pytest.raises(StepError, match="whose saved tensors are not in memory"):
        loss.backward(retain_graph=True)
    rig.fetch()
    loss.backward()
    assert torch.equal(p.grad, 2 * (p.detach() * 2).exp())


def test_what_nobody_goes_back_through_does_not_leave(rig: Rig) -> None:
    p = torch.randn(5, requires_grad=True)

    def call() -> Tensor:
        (p * 3).exp().sum()  # a metric, say
        return (p * 2).exp().sum()

    loss = rig.forward(call)
    assert rig.there_and_back() == 1
    loss.backward()


def test_lazily_conjugated_values_come_back_so(rig: Rig) -> None:
    p = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)

    def call() -> Tensor:
        h = p * 2
        return (h.conj() @ h.exp()).abs().sum()

    plain = call()
    (expected,) = torch.autograd.grad(plain, p)
    loss = rig.forward(call)
    rig.there_and_back()
    assert torch.equal(torch.autograd.grad(loss, p)[0], expected)


def test_nodes_let_go_one_by_one(rig: Rig) -> None:
    alive: list[int] = []
    p = torch.randn(64, requires_grad=True)

    def call() -> Tensor:
        h = p
        for k in range(4):
            h = (h * 1.5).tanh()
            if k == 0:  # the last that is gone back through
                h.register_hook(lambda _: alive.append(count_alive(rooms)))
        return h.sum()

    loss = rig.forward(call)
    assert rig.there_and_back() == 4
    rooms = [x.untyped_storage()._weak_ref() for x in storages_of(loss)]
    assert len(rooms) == 4
    loss.backward()
    assert alive == [1]


def storages_of(loss: Tensor) -> list[Tensor]:
    """Return what tanh has saved, as it lies in memory now."""
    found, node = [], loss.grad_fn
    while node is not None:
        if "Tanh" in node.name():
            found.append(node._saved_result)
        node = node.next_functions[0][0] if node.next_functions else None
    return found


def count_alive(rooms: list[Any]) -> int:
    return sum(not torch.UntypedStorage._expired(room) for room in rooms)


def test_homes_are_used_again_and_grow(rig: Rig) -> None:
    p = torch.ones(4000, requires_grad=True)
    kept: dict[int, Tensor] = {}

    def leave(i: int, size: int) -> None:
        kept[i] = rig.forward(lambda: (p[:size] * (i + 1)).exp().sum(), i)
        rig.evict(i)
        rig.free(i)

    def come(i: int) -> None:
        rig.fetch(i)
        p.grad = None
        kept.pop(i).backward()
        size = int((p.grad != 0).sum())
        assert torch.equal(p.grad[:size], (i + 1) * (torch.ones(size) * (i + 1)).exp())

    leave(0, 1000)
    leave(1, 1000)
    come(0)
    leave(2, 1000)
    assert len(rig.made) == 2  # as many as are away at once
    come(1)
    leave(3, 4000)
    assert len(rig.made) == 3  # a larger one in the place of the spare one
    come(2)
    come(3)
    assert len(rig.tier._spare) == 2
    for i, size in ((4, 800), (5, 3900)):
        leave(i, size)
    assert len(rig.made) == 3
    come(5)
    come(4)


def test_shared_copies_of_weights_stay_and_are_shared(rig: Rig) -> None:
    linear, casts = nn.Linear(8, 8), CastCopies()
    x = torch.randn(4, 8)

    def call() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return linear(linear(x).tanh()).float().square().sum()

    plain = call()
    expected = gradients(linear, plain)
    loss = rig.forward(call, casts=casts)
    assert len(casts._known) == 1  # of the one weight
    assert rig.there_and_back()
    assert all(map(torch.equal, gradients(linear, loss), expected))


def test_functions_that_let_nobody_see_what_is_saved_are_refused(rig: Rig) -> None:
    def call() -> Tensor:
        return torch.func.grad(lambda x: x.square().sum())(torch.ones(3, requires_grad=True)).sum()

    with pytest.raises(StepError, match=r"torch.func or torch.vmap with activation_checkpointing"):
        rig.forward(call)


def test_a_gradient_of_gradients_within_the_forward(rig: Rig) -> None:
    p = torch.randn(5, requires_grad=True)

    def call() -> Tensor:
        y = (p * 2).exp().sum()
        (slope,) = torch.autograd.grad(y, p, create_graph=True)
        return slope.square().sum()

    (expected,) = torch.autograd.grad(call(), p)
    loss = rig.forward(call)
    rig.there_and_back()
    assert torch.equal(torch.autograd.grad(loss, p)[0], expected)


def test_a_graph_that_comes_back_is_not_used_before_it_has(rig: Rig) -> None:
    p = torch.randn(5, requires_grad=True)
    loss = rig.forward(lambda: (p * 2).exp().sum())
    rig.evict()
    rig.free()
    rig.tier.hold(parse("0FETCH_A0#0~tiers"))
    with pytest.raises(StepError, match="not the turn of its backward"):
        loss.backward()


# ---------------------------------------------------------------------- where a host runs ahead


def on_a_device(forgets: str, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Run micro-batches on a device that is as slow as it can be, with a lane beside; note all.

    Args:
        forgets: what is not waited for, or that memory is not kept.
    """
    device = Device()
    with noted(device):
        streams = Streams(device)
        monkeypatch.setattr(graph_tier, "streams_of", lambda _: streams)
        if forgets == "keep":
            monkeypatch.setattr(Streams, "keep", lambda *_: None)
        rig = Rig(None)
        make = rig.tier._make_home

        def aside(num_bytes: int) -> Any:
            with device.aside():  # as memory of the host is no stream's
                return make(num_bytes)

        monkeypatch.setattr(rig.tier, "_make_home", aside)
        lane = LaneThread("cyclic-tiers", rig.tier.move, streams)
        p = torch.ones(50, requires_grad=True)

        def move(kind: str, i: int) -> None:
            a = parse(f"0{kind}_A{i}#0~tiers")
            rig.tier.hold(a)
            lane.put([a])
            if forgets == kind:
                until(lambda: lane.num_over == lane.num_put, 5.0, "the lane")
            else:
                lane.wait_for(lane.num_put)

        for i in range(3):  # the second and third find a home that is used again
            loss = rig.forward(lambda: (p * 2).exp().square().sum(), i)
            move("EVICT", i)
            assert rig.free(i) == 1
            move("FETCH", i)
            rig.tier.take(parse(f"0B{i}#0"))
            loss.backward()
            del loss
        lane.close()
        lane._thread.join()  # its mode ends before the one around it, or torch's flag stays
    return device


def test_no_two_streams_use_what_was_saved_in_no_order(monkeypatch: Any) -> None:
    on_a_device("", monkeypatch).check()


@pytest.mark.parametrize(
    ("forgets", "words"), [("FETCH", "does not wait for"), ("keep", "not kept")]
)
def test_the_model_finds_who_does_not_wait(forgets: str, words: str, monkeypatch: Any) -> None:
    with pytest.raises(AssertionError, match=words):
        on_a_device(forgets, monkeypatch).check()
