"""Gradients live by step and stage; p.grad has one of them while somebody looks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_cyclic.runtime.gradient_store import GradientStore, Sum, SumDtypes


def stage(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([x])) for x in values]


def test_steps_and_stages_do_not_meet_in_p_grad() -> None:
    stages = [stage(1.0, 2.0), stage(3.0)]
    store = GradientStore(stages.__getitem__)
    for t in (0, 1, 0):
        for j in (1, 0):
            with store.adding(t, j):
                sum((10.0 * t + 1) * p.sum() for p in stages[j][:1]).backward()  # type: ignore[union-attr]
    assert all(p.grad is None for ps in stages for p in ps)
    assert [x if x is None else float(x) for x in store.of(0, 0)] == [2.0, None]
    assert [x if x is None else float(x) for x in store.of(1, 1)] == [11.0]
    shown = store.show(0, 0)
    assert stages[0][0].grad is shown.grads[0]
    assert store.of(0, 0) == [None, None]  # it has been taken


def low(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([x], dtype=torch.bfloat16)) for x in values]


@pytest.mark.parametrize(("wire", "expected"), [(None, 258.0), (torch.bfloat16, 256.0)])
def test_what_several_workers_add_is_rounded_once_or_each_time(
    wire: torch.dtype | None, expected: float
) -> None:
    parameters = low(0.0)
    store = GradientStore([parameters].__getitem__, SumDtypes(wire))
    for x in (256.0, 1.0, 1.0):  # 257 is no number of bfloat16
        store.extend(0, 0, Sum([torch.tensor([x], dtype=torch.bfloat16)]))
        store.add(0, 0)
    grad = store.show(0, 0).grads[0]
    assert grad is parameters[0].grad
    assert grad is not None
    assert grad.dtype is torch.bfloat16
    assert float(grad) == expected


def test_a_backward_adds_to_a_wider_sum_without_rounding_it() -> None:
    parameters = low(0.0)
    store = GradientStore([parameters].__getitem__)
    store.put(0, 0, Sum([torch.tensor([257.0])]))
    with store.adding(0, 0):
        parameters[0].sum().backward()
    assert store.take(0, 0).grads == [torch.tensor([258.0])]
