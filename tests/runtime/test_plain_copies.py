"""Plain copies: what is left out of them, and what stays."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_cyclic.runtime.compiled import around_forwards
from lightning_cyclic.runtime.plain_copies import ours, plain_copies


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


class Slow(nn.Module):
    """Copies itself by code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.copied = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def __deepcopy__(self, memo: Any) -> Slow:
        self.copied += 1
        made = Slow()
        made.__dict__ = {k: copy.deepcopy(x, memo) for k, x in vars(self).items()}
        return made


def test_hooks_of_the_user_stay_and_ours_go() -> None:
    net, calls = nn.Linear(2, 2), []
    net.register_forward_hook(double)
    around_forwards(net, lambda m: calls.append("before"), lambda: calls.append("behind"))
    with plain_copies(net):
        for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert list(made._forward_hooks.values()) == [double]
            assert type(made._forward_hooks) is OrderedDict
            assert not made._forward_pre_hooks
            assert not made._forward_hooks_always_called
            assert torch.equal(made(torch.ones(2)), net(torch.ones(2)))
        assert calls == ["before", "behind"] * 2


def test_methods_that_a_module_had_are_those_of_copies() -> None:
    net = nn.Linear(2, 2)
    net.forward = own = abs  # type: ignore[method-assign, assignment]
    net.forward = ours(lambda x: x, own)  # type: ignore[method-assign]
    with plain_copies(net):
        for made in (copy.copy(net), copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert made.forward is own
        assert net.forward is not own


def test_where_a_step_follows_what_is_read_shallow_copies_share_and_pickles_do_not() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for m in net.modules():
        m.forward = ours(lambda x: x, is_followed=lambda: True)  # type: ignore[method-assign]
    with plain_copies(net):
        shallow, pickled = copy.copy(net[0]), pickle.loads(pickle.dumps(net))
        assert net.forward is not None
    assert type(vars(shallow)) is dict
    assert shallow.weight is net[0].weight
    assert "forward" not in vars(shallow).keys() | vars(pickled).keys() | vars(pickled[0]).keys()
    assert pickled[0].weight is not net[0].weight
    assert all(map(torch.equal, pickled.state_dict().values(), net.state_dict().values()))


def test_modules_that_copy_themselves() -> None:
    slow = Slow()
    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    for net in (slow, graph):
        around_forwards(net, lambda m: None, lambda: None)
        with plain_copies(net):
            made = copy.deepcopy(net)
        assert not made._forward_hooks
        assert not {"__deepcopy__", "__reduce_ex__"} & vars(made).keys()
        assert torch.equal(made(torch.ones(2)), net(torch.ones(2)))
    assert slow.copied == 1
    with plain_copies(graph):
        assert not pickle.loads(pickle.dumps(graph))._forward_hooks


def test_tied_parameters_of_one_memory_stay_tied() -> None:
    flat = torch.arange(5_000.0)
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[0].weight.data = flat[:4].view(2, 2)
    net[1].weight = net[0].weight
    net[0].weight.decays = False  # type: ignore[union-attr]
    with plain_copies(net):
        data = pickle.dumps(net)
        made = pickle.loads(data)
        assert copy.copy(net[0]).weight is net[0].weight
    assert len(data) < 5_000
    assert made[0].weight is made[1].weight
    assert vars(made[0].weight) == {"decays": False}
    assert torch.equal(made[0].weight, net[0].weight)
    assert net[0].weight.untyped_storage().nbytes() == flat.nbytes
