"""Gradients are laid where memory comes and goes, and left where it stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.runtime.gradient_store import GradientStore, Sum
from lightning_cyclic.runtime.messages import Messages
from lightning_cyclic.runtime.whole_step.exchange import Exchange
from lightning_cyclic.runtime.whole_step.versions import VersionStore

CPU = torch.device("cpu")


class Owner:
    """Has one stage, a layer."""

    def __init__(self, *, is_lean: bool, keeps: bool = False) -> None:
        module = nn.Linear(6, 4)
        parameters = list(module.parameters())
        messages = Messages(None, {}, lambda pending, action: pending.wait(), CPU, is_lean=is_lean)
        store = VersionStore(parameters, 0, messages, keeps=keeps)
        grads = GradientStore(lambda j: parameters)
        unasked: Any = None  # stages and norms
        self.exchange = Exchange(module, 0, unasked, [store], grads, unasked, messages)


def test_gradients_are_copied_into_a_buffer_and_autograd_s_memory_goes() -> None:
    exchange = Owner(is_lean=True).exchange
    weight = torch.randn(4, 6)
    made: list[Tensor | None] = [weight.clone(), None]
    laid = exchange.laid(0, Sum(made, 3))
    assert made == []  # the list that a backward holds
    assert laid.word == 3
    assert laid.buffer is not None
    first, second = laid.grads
    assert second is None
    assert first is not None
    assert torch.equal(first, weight)
    assert _memory(first) == _memory(laid.buffer.data)


def test_what_lies_in_a_buffer_is_laid_already() -> None:
    exchange = Owner(is_lean=True).exchange
    laid = exchange.laid(0, Sum([torch.randn(4, 6), torch.randn(4)]))
    assert exchange.laid(0, laid) is laid
    assert None not in laid.grads


@pytest.mark.parametrize(("is_lean", "keeps"), [(False, False), (False, True), (True, True)])
def test_gradients_stay_where_memory_does(is_lean: bool, keeps: bool) -> None:
    exchange = Owner(is_lean=is_lean, keeps=keeps).exchange
    found = Sum([torch.randn(4, 6), torch.randn(4)])
    assert exchange.laid(0, found) is found
    assert found.buffer is None
    assert len(found.grads) == 2


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
