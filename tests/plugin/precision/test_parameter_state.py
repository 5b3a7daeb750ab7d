"""What is kept of one parameter: gradients as they come, and master weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_cyclic.plugin.precision.compressed import Layout, ParameterState

MASK = torch.tensor([[True, False], [False, True]])
BF16 = torch.bfloat16


def state(dtype: torch.dtype = BF16, *, dense: bool = False) -> ParameterState:
    weight = nn.Parameter(torch.tensor([[1.001, 2.0], [3.0, 4.001]]))
    layout = Layout(None) if dense else Layout.of(MASK)
    return ParameterState("w", weight, layout, dtype)


def test_weights_are_pruned_and_rounded_and_masters_are_not() -> None:
    found = state()
    assert found.weight.dtype == BF16
    assert found.weight.tolist() == [[1, 0], [0, 4]]
    assert torch.equal(found.master.detach(), torch.tensor([1.001, 4.001]))
    assert found.trained_shape == (2,)


def test_gradients_are_taken_as_they_come() -> None:
    found = state()
    found.watch()
    for _ in range(2):
        (found.weight * torch.tensor([[1.0, 5.0], [7.0, 3.0]], dtype=BF16)).sum().backward()
        assert found.weight.grad is None
    assert found.master.grad is not None
    assert found.master.grad.dtype == BF16
    found.show()
    assert found.master.grad is not None
    assert found.master.grad.dtype == torch.float32
    assert found.master.grad.tolist() == [2, 6]
    with torch.no_grad():
        found.master.sub_(found.master.grad)
    address = found.weight.data_ptr()
    found.write()
    assert found.weight.data_ptr() == address  # no new dense tensor
    assert found.weight.tolist() == [[-1, 0], [0, -2]]
    assert found.master.grad is None


def test_without_a_gradient_nothing_is_shown() -> None:
    found = state()
    found.watch()
    found.weight.sum().backward()
    found.master.grad = None  # as zero_grad() of the optimizer does
    found.show()
    assert found.master.grad is None


def test_one_hook_however_often_it_is_watched() -> None:
    found = state(dense=True)
    found.watch()
    found.watch()
    found.weight.sum().backward()
    found.show()
    assert found.master.grad is not None
    assert found.master.grad.tolist() == [[1, 1], [1, 1]]
    found.release()
    found.weight.sum().backward()
    assert found.weight.grad is not None


def test_what_is_frozen_may_be_unfrozen() -> None:
    weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    found = ParameterState("w", weight, Layout.of(MASK), BF16)
    found.watch()
    assert not weight.requires_grad
    weight.requires_grad_().sum().backward()
    assert weight.grad is None
    found.show()
    assert found.master.grad is not None


def test_float32_has_no_master_weight_between_steps() -> None:
    found = state(torch.float32)
    assert found.master.untyped_storage().nbytes() == 4  # for all of its elements
    assert found.saved is None
    found.watch()
    found.weight.sum().backward()
    found.show()
    assert torch.equal(found.master.detach(), torch.tensor([1.001, 4.001]))
    found.write()
    assert found.master.shape == found.trained_shape
    assert found.master.untyped_storage().nbytes() == 4  # for all of its elements
    found.weight.sum().backward()
    assert found.master.grad is not None
    assert found.master.grad.tolist() == [1, 1]
    found.to(torch.device("cpu"))
    assert found.master.untyped_storage().nbytes() == 4
    assert torch.equal(found.weight.detach(), torch.tensor([[1.001, 0], [0, 4.001]]))


def test_an_optimizer_that_never_calls_its_closure_writes_nothing() -> None:
    found = state(torch.float32)
    found.write()
    assert found.weight.tolist()[1][1] == pytest.approx(4.001)


def test_what_others_write_is_taken_over_element_by_element() -> None:
    found = state()
    with torch.no_grad():
        found.weight.copy_(torch.tensor([[1.0, 9.0], [9.0, 8.0]]))
    found.show()
    assert torch.equal(found.master.detach(), torch.tensor([1.001, 8.0]))  # the first is as it was
    assert found.weight.tolist() == [[1, 0], [0, 8]]


def test_master_weights_are_loaded_to_the_bit() -> None:
    found = state()
    found.load(torch.tensor([0.1, 0.3], dtype=torch.float32))
    assert found.saved is not None
    assert torch.equal(found.saved, torch.tensor([0.1, 0.3]))
    assert torch.equal(found.weight.detach(), torch.tensor([[0.1, 0], [0, 0.3]]).to(BF16))


def test_a_master_weight_that_another_worker_updates_has_no_memory_here() -> None:
    found = state()
    found.leave()
    assert found.saved is None
    assert found.kept == [found.layout.index]  # type: ignore[attr-defined]
    assert found.master.untyped_storage().nbytes() == 4
    found.weight.detach()[0, 0] = 5
    found.reread()  # from a checkpoint that has no master weights
    assert found.saved is not None
    assert found.saved.tolist() == [5, 4]
    found.leave()
    found.load(torch.tensor([0.1, 0.3]))
    assert found.saved.tolist() == torch.tensor([0.1, 0.3]).tolist()
