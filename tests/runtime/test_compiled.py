"""Compiled modules: seen as a whole, entered from outside, and left as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.runtime.compiled import (
    around_forwards,
    before_calls,
    is_compiled,
    named_modules,
    seen_as,
    uncompiled,
)

# torch.compile looks at the gradients of its inputs, and warns of those that have none
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")
X = torch.ones(2, 3)


def made() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    net = nn.Sequential(block, nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    net[0].compile(backend="eager")
    net[1] = torch.compile(net[1], backend="eager")
    return net


def test_nothing_inside_is_seen() -> None:
    net = made()
    assert [path for path, _ in named_modules(net)] == ["", "0", "1", "2", "2.0"]
    assert [seen_as(net, path) for path in ("0.0", "1._orig_mod", "2.0", "1")] == [
        "0", "1", "2.0", "1"
    ]  # fmt: skip
    assert [is_compiled(net[k]) for k in range(3)] == [True, True, False]


def test_callbacks_are_called_around_compiled_code_in_any_order_of_endings() -> None:
    net, expected, seen = made(), made()(X), []
    ends = [before_calls(m, lambda m: seen.append("before")) for m in (net[0], net[1], net[2])]
    ends += [
        around_forwards(m, lambda m: seen.append("in"), lambda: seen.append("out"))
        for m in (net[0], net[1], net[2])
    ]
    assert torch.equal(net(X), expected)
    assert seen.count("before") == seen.count("in") == seen.count("out") == 3
    for end in ends:
        end()
    seen.clear()
    assert torch.equal(net(X), expected)
    assert seen == []


def test_uncompiled_code_runs_module_by_module() -> None:
    net, called = made(), []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        called.append(type(module).__name__)

    with uncompiled(net):
        handles = [m.register_forward_pre_hook(note) for m in (net[0][0], net[1]._orig_mod)]
        expected = net(X)
        for handle in handles:
            handle.remove()
    assert called == ["Linear", "Linear"]
    assert torch.equal(net(X), expected)
    assert is_compiled(net[0])
    assert net[1].forward is not net[1]._orig_mod
