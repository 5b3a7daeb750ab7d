"""Keyed draws: what a module draws does not depend on which of its modules still have hooks."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cyclic.runtime.whole_step.draws import KeyedDraws

CPU = torch.device("cpu")


class Inner(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return F.dropout(out, 0.5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: Tensor, *, directly: bool = False) -> Tensor:
        h = F.dropout(self.first(x), 0.5)
        return F.dropout(self.second.inner(h) if directly else self.second(h), 0.5)


def drawn(draws: KeyedDraws, net: Net, t: int, *, directly: bool) -> Tensor:
    with draws.keyed(1, t, 0):
        return net(torch.ones(4, 16), directly=directly)


def hooked(net: Net) -> list[str]:
    return [path for path, m in net.named_modules() if m._forward_pre_hooks]


def test_only_modules_that_were_called_from_outside_keep_their_hooks() -> None:
    net = Net()
    draws = KeyedDraws(net, ["second"], CPU)
    assert hooked(net) == ["first", "first.inner", "second", "second.inner"]
    drawn(draws, net, 0, directly=False)
    assert hooked(net) == ["first", "second"]
    draws.remove()
    assert hooked(net) == []


def test_a_module_without_hooks_that_is_called_directly_draws_as_with_them() -> None:
    net = Net()
    other = copy.deepcopy(net)
    fresh, used = KeyedDraws(net, [], CPU), KeyedDraws(other, [], CPU)
    drawn(used, other, 0, directly=False)
    assert hooked(other) == ["first", "second"]
    assert torch.equal(drawn(used, other, 1, directly=True), drawn(fresh, net, 1, directly=True))
    assert hooked(net) == ["first", "second", "second.inner"]


def test_a_copy_of_a_module_may_be_called_in_the_first_step() -> None:
    net = Net()
    draws = KeyedDraws(net, [], CPU)
    twin = copy.deepcopy(net)
    with draws.keyed(1, 0, 0):
        twin(net(torch.ones(4, 16)))
    assert hooked(net) == ["first", "second"]
