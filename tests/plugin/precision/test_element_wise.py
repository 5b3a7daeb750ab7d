"""The trial: which optimizers train compressed tensors as they would pruned weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.plugin.precision.element_wise import is_element_wise
from tests import optimizers as o

T: Any = torch.optim
CPU = torch.device("cpu")


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(s)) for s in ((6, 7), (5,), (2, 3, 3, 3), ())]


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(6, 7)), nn.Parameter(torch.ones(7, 7))]


class Lion(o.Chain):
    """Steps by the sign of a mean of gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.add_(torch.sign(0.9 * mean + 0.1 * p.grad), alpha=-group["lr"])
                    mean.lerp_(p.grad, 0.01)


class Lamb(o.Chain):
    """Scales the step of each tensor by a trust ratio."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)), alpha=group["lr"])


class Shampoo(o.Chain):
    """Preconditions matrices by their rows, and leaves vectors as they are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim == 2:
                    left = p.grad @ p.grad.t() + torch.eye(len(p))
                    p.sub_(torch.linalg.solve(left, p.grad), alpha=group["lr"])
                elif p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


class Centred(o.Chain):
    """Takes the mean off each gradient."""

    def begin(self) -> None:
        for grad in self.grads():
            grad.sub_(grad.mean())


class Noisy(o.Chain):
    """Adds noise, to zeros too."""

    def begin(self) -> None:
        for grad in self.grads():
            grad.add_(torch.randn_like(grad))


ELEMENT_WISE: dict[str, Callable[[], Any]] = {
    "SGD": lambda: T.SGD(parameters(), lr=0.1),
    "momentum": lambda: T.SGD(parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "fused SGD": lambda: T.SGD(parameters(), lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda: T.Adam(parameters(), amsgrad=True),
    "AdamW": lambda: T.AdamW(parameters(), weight_decay=0.1),
    "fused": lambda: T.AdamW(parameters(), fused=True),
    "foreach": lambda: T.AdamW(parameters(), foreach=True),
    "rate as tensor": lambda: T.AdamW(parameters(), lr=torch.tensor(0.1)),
    "RMSprop": lambda: T.RMSprop(parameters(), centered=True, momentum=0.9),
    "Adagrad": lambda: T.Adagrad(parameters(), initial_accumulator_value=0.1),
    "Adadelta": lambda: T.Adadelta(parameters()),
    "Adamax": lambda: T.Adamax(parameters()),
    "NAdam": lambda: T.NAdam(parameters()),
    "RAdam": lambda: T.RAdam(parameters()),
    "ASGD": lambda: T.ASGD(parameters()),
    "Rprop": lambda: T.Rprop(parameters()),
    "Lion": lambda: Lion(parameters()),
    "counting": lambda: o.Counting(parameters()),
    "schedule-free rates": lambda: o.Weighing(parameters()),
    "low precision": lambda: T.AdamW([nn.Parameter(p.data.bfloat16()) for p in parameters()]),
}
MIXING: dict[str, Callable[[], Any]] = {
    "Adafactor": lambda: T.Adafactor(parameters()),
    "Muon": lambda: T.Muon(matrices()),
    "Lamb": lambda: Lamb(parameters()),
    "Shampoo": lambda: Shampoo(parameters()),
    "mean": lambda: Centred(parameters()),
    "noise": lambda: Noisy(parameters()),
    "common norm": lambda: o.Clipping(parameters()),
    "common rate": lambda: o.Estimating(parameters()),
    "no rate at first": lambda: T.Adafactor(parameters(), lr=0.0),
}
UNTRIED: dict[str, Callable[[], Any]] = {
    "LBFGS": lambda: T.LBFGS(parameters()),
    "SparseAdam": lambda: T.SparseAdam(parameters()),
    "others within": lambda: o.Wrapping(parameters()),
}


@pytest.mark.parametrize("make", ELEMENT_WISE.values(), ids=list(ELEMENT_WISE))
def test_element_by_element(make: Callable[[], Any]) -> None:
    assert is_element_wise(make(), CPU) is True


@pytest.mark.parametrize("make", MIXING.values(), ids=list(MIXING))
def test_several_elements_at_once(make: Callable[[], Any]) -> None:
    if make is MIXING["Muon"] and not hasattr(T, "Muon"):
        pytest.skip("torch has it from 2.9 on")
    assert is_element_wise(make(), CPU) is False


@pytest.mark.parametrize("make", UNTRIED.values(), ids=list(UNTRIED))
def test_nothing_is_told(make: Callable[[], Any]) -> None:
    assert is_element_wise(make(), CPU) is None


def test_a_trial_changes_nothing() -> None:
    given = parameters()
    optimizer = T.Adagrad(given, lr=0.1)
    before: list[Tensor] = [p.detach().clone() for p in given]
    state, drawn, plain = optimizer.state_dict(), torch.get_rng_state(), random.getstate()
    assert is_element_wise(optimizer, CPU) is True
    assert all(map(torch.equal, before, given))
    assert all(p.grad is None for p in given)
    assert str(optimizer.state_dict()) == str(state)
    assert torch.equal(drawn, torch.get_rng_state())
    assert plain == random.getstate()
