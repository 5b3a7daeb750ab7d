"""Keyed draws: what a module draws does not depend on who calls it."""

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


def test_a_module_draws_from_its_stage_whoever_calls_it() -> None:
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    fresh, used = KeyedDraws(net, [], CPU), KeyedDraws(other, [], CPU)
    assert hooked(net) == ["first", "first.inner", "second", "second.inner"]
    drawn(used, other, 0, directly=False)
    assert torch.equal(drawn(used, other, 1, directly=True), drawn(fresh, net, 1, directly=True))
    fresh.remove()
    assert hooked(net) == []


def test_a_copy_of_a_module_may_be_called_within_a_step() -> None:
    net = Net()
    draws = KeyedDraws(net, [], CPU)
    twin = copy.deepcopy(net)
    with draws.keyed(1, 0, 0):
        twin(net(torch.ones(4, 16)))
    draws.remove()
    assert hooked(net) == []
