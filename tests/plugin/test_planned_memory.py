"""What a plan knows of optimizers before they have made any state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_cyclic.plugin.planned_memory import state_per_param


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
        (torch.optim.Adamax, {}),
    ],
)
def test_state_is_what_optimizers_make(make: Any, settings: dict[str, Any]) -> None:
    module = net()
    optimizer, parameters = make(module.parameters(), **settings), list(module.parameters())
    planned = state_per_param([optimizer], parameters)
    assert not optimizer.state
    assert all(p.grad is None for p in parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    made = [x for held in optimizer.state.values() for x in held.values()]
    num_bytes = sum(x.nbytes for x in made if isinstance(x, torch.Tensor) and x.dim() > 0)
    assert planned == num_bytes / sum(p.nbytes for p in parameters)


def test_of_several_all_count_and_what_is_frozen_has_none() -> None:
    module = net()
    first, second = module.parameters()
    optimizers = [torch.optim.Adam([first]), torch.optim.SGD([second], 0.1, momentum=0.9)]
    assert state_per_param(optimizers, module.parameters()) == 1.5
    assert state_per_param(optimizers[1:], module.parameters()) == 0.5


def test_master_weights_are_the_optimizers() -> None:
    module = net().bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in module.parameters()]
    assert state_per_param([torch.optim.Adam(masters)], module.parameters()) == 6


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_where_shapes_do_not_tell_two_are_assumed(make: Any) -> None:
    """Where a step asks for a closure, or reads values."""
    module = net()
    assert state_per_param([make(module.parameters())], module.parameters()) == 2
