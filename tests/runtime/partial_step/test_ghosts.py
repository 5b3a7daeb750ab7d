"""Ghosts know what a tensor looks like, give way to it once it came, and refuse before."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.partial_step.ghosts import (
    Ghost,
    Mould,
    TensorSpec,
    real,
)
from lightning_cyclic.runtime.torch_functions import Line

CPU = torch.device("cpu")
X = torch.arange(6.0).reshape(3, 2).t()  # strides (1, 2)


class Pair(NamedTuple):
    first: Any
    second: Any


def ghost_of(x: torch.Tensor, value: torch.Tensor | None = None) -> Ghost:
    ghost = Mould(TensorSpec.of(x), (1, 2, 0), CPU).ghost()
    ghost.value = value
    return ghost


def test_a_ghost_has_the_metadata_of_its_tensor_but_no_values():
    x = X.to(torch.float64).requires_grad_()
    ghost = ghost_of(x)
    assert TensorSpec.of(ghost) == TensorSpec.of(x)
    assert (ghost.shape, ghost.size(0), len(ghost), ghost.dim()) == (x.shape, 2, 2, 2)
    assert (ghost.stride(), ghost.is_contiguous(), ghost.numel()) == ((1, 2), False, 6)
    assert (ghost.dtype, ghost.device, ghost.requires_grad) == (torch.float64, CPU, True)
    assert ghost.is_floating_point()
    assert not ghost.is_complex()
    assert isinstance(ghost, torch.Tensor)
    assert "stage 1, event 2, leaf 0, filled=False" in repr(ghost)
    assert {ghost: 1}[ghost] == 1


def test_what_was_on_the_host_stays_there():
    spec = TensorSpec.of(X)
    assert spec.on_host
    meta = torch.device("meta")
    assert Mould(spec, (0, 0, 0), meta).ghost().device == CPU
    assert Mould(spec._replace(on_host=False), (0, 0, 0), meta).ghost().device == meta


def test_torch_functions_get_the_tensor_that_came():
    ghost = ghost_of(X, X)
    assert torch.equal(ghost + 1, X + 1)
    assert torch.equal(torch.cat([ghost, X]), torch.cat([X, X]))
    assert torch.equal(nn.functional.relu(input=ghost), X)
    assert torch.equal(ghost[0], X[0])
    assert torch.equal(ghost.T, X.T)
    assert float(ghost.sum()) == 15
    assert type(ghost * 1) is torch.Tensor


def test_the_tensor_that_came_answers_for_itself():
    """Its ghost was made of an earlier description: of another requires_grad, say."""
    ghost = ghost_of(X, X.clone().requires_grad_())
    assert ghost.requires_grad
    assert (ghost * 2).requires_grad


def test_a_ghost_without_a_tensor_is_refused_with_the_line():
    ghost, line = ghost_of(X), inspect.currentframe().f_lineno
    with pytest.raises(StepError) as caught:
        ghost + 1
    assert f"a tensor of stage 1 is used at {Line(__file__, line + 2)}" in str(caught.value)
    for use in (float, torch.sum, lambda x: x.T, lambda x: [1, 2][x], lambda x: X[x]):
        with pytest.raises(StepError, match="a tensor of stage 1"):
            use(ghost)


def test_an_operation_that_did_not_pass_through_python_is_refused():
    ghost = ghost_of(X)
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(StepError) as caught:
        ghost.exp()
    assert "aten.exp" in str(caught.value)
    assert Path(__file__).name in str(caught.value)


def test_containers_are_rebuilt_only_where_they_hold_a_ghost():
    ghost, marker = ghost_of(X, X), object()
    for value in ((1, X), [X, None], {"a": X}, Pair(X, marker), slice(1, 2), marker, (), X):
        made = real(value)
        assert made is value or (type(value) is slice and made == value)
    assert real(ghost) is X
    made = real((1, [ghost], {"a": ghost}, Pair(ghost, marker), slice(None, ghost)))
    assert made[0] == 1
    assert made[1][0] is made[2]["a"] is made[3].first is made[4].stop is X
    assert type(made[3]) is Pair
    assert made[3].second is marker
