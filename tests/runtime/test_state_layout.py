"""What is known of optimizer state before there is any, and how it lies in chunks."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.buffers import aligned
from lightning_cyclic.runtime.state_layout import lay_state

SIZES = (10, 20), (100, 3), (64, 64), (7,), (1, 1)
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Rprop, {}),
]


def parameters(*sizes: tuple[int, ...]) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.randn(size)) for size in sizes or SIZES]
    spread = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return made if sizes else [*made, nn.Parameter(spread)]


@pytest.mark.parametrize(("make", "settings"), OPTIMIZERS)
def test_state_is_what_a_first_step_makes(make: Any, settings: dict[str, Any]) -> None:
    ps = parameters()
    optimizer = make(ps, **settings)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # has a step of its own on the instance
    layout = lay_state(optimizer, [ps[:3], ps[3:]])
    assert bool(optimizer.state) == (make is torch.optim.Adagrad)  # which makes it at once
    known = {(x.p, x.key): x.spec for chunks in layout.stages for c in chunks for x in c}
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    made = {
        (p, key): x for p in ps for key, x in optimizer.state[p].items() if x.dim() > 0
    }  # fmt: skip
    assert known.keys() == made.keys()
    for at, x in made.items():
        assert (known[at].size, known[at].dtype) == (x.size(), x.dtype)
        assert known[at].stride == x.stride()
    assert layout.num_bytes == sum(aligned(x.numel() * x.element_size()) for x in made.values())


def test_looking_changes_nothing_of_the_optimizer_nor_of_weights_and_calls_no_hook() -> None:
    ps, called = parameters(), list[Any]()
    optimizer = torch.optim.AdamW(ps, lr=torch.tensor(0.1))
    optimizer.param_groups[0]["seen"] = [torch.zeros(1)]
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    optimizer.register_step_post_hook(lambda *_: called.append(2))
    for p in ps:
        p.grad = torch.ones_like(p)
    before = [(p.detach().clone(), p._version, p.grad) for p in ps]
    groups = {k: x for k, x in optimizer.param_groups[0].items() if k != "params"}
    lay_state(optimizer, [ps])
    for p, (values, version, grad) in zip(ps, before, strict=True):
        assert torch.equal(p, values)
        assert p._version == version
        assert p.grad is grad
    assert {k: x for k, x in optimizer.param_groups[0].items() if k != "params"} == groups
    assert (called, dict(optimizer.state)) == ([], {})
    optimizer.step()
    assert called == [1, 2]


class Stubborn(torch.optim.SGD):
    """Changes the parameters that it was made with, whatever its groups say."""

    def __init__(self, ps: list[nn.Parameter]) -> None:
        super().__init__(ps, 0.1, momentum=0.9)
        self.mine = ps

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.mine:
            if p.grad is not None:
                p.add_(p.grad)


def test_an_optimizer_that_knows_parameters_by_another_way_changes_none() -> None:
    ps = parameters()
    for p in ps:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in ps]
    lay_state(Stubborn(ps), [ps])
    assert all(map(torch.equal, ps, before))
    assert all(p.grad is not None for p in ps)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_hold_all_in_order_and_a_size_next_to_the_best_is_found(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    ps = parameters(*((int(n),) for n in torch.randint(2, 5000, (12,), generator=g)))
    layout = lay_state(torch.optim.SGD(ps, 0.1, momentum=0.9), [ps[:5], ps[5:6], ps[6:]])
    order = [x.p for chunks in layout.stages for c in chunks for x in c]
    assert list(map(id, order)) == list(map(id, ps))
    for chunks in layout.stages:
        sizes = [sum(x.num_bytes for x in c) for c in chunks]
        assert max(sizes) <= layout.chunk_bytes
        for size, behind in pairwise(zip(sizes, chunks, strict=True)):
            assert size[0] + behind[1][0].num_bytes > layout.chunk_bytes  # it had no room
    most = max(x.num_bytes for chunks in layout.stages for c in chunks for x in c)
    in_use = sum(layout.counts) * layout.chunk_bytes
    assert layout.unused == pytest.approx(1 - layout.num_bytes / in_use)
    # no worse than the size of the largest tensor, and than three times that
    for size in (most, 3 * most):
        assert in_use <= size * sum(_fewest(chunks, size) for chunks in layout.stages)


def _fewest(chunks: Any, size: int) -> int:
    count, room = 0, -math.inf
    for x in (x for c in chunks for x in c):
        if x.num_bytes > room:
            count, room = count + 1, size
        room -= x.num_bytes
    return count


def test_an_optimizer_without_state_has_no_chunks() -> None:
    ps = parameters()
    layout = lay_state(torch.optim.SGD(ps, 0.1), [ps[:2], ps[2:]])
    assert (layout.counts, layout.num_bytes, layout.unused) == ([0, 0], 0, 0.0)


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.ASGD])
def test_optimizers_that_want_more_than_shapes_are_refused(make: Any) -> None:
    ps = parameters()
    with pytest.raises(
        ConfigurationError, match=f"memory_limit_bytes=... with {make.__name__}, whose state"
    ):
        lay_state(make(ps), [ps])
