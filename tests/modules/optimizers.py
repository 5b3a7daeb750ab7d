"""Optimizers as users bring them, each with a habit of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Chain(torch.optim.Optimizer):
    """Gradient descent by rates that a subclass gives.

    Args:
        params: what is trained.
        lr: rate.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        for group in self.param_groups:
            rate = self.rate(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.change(p, rate)
        return loss

    def change(self, p: nn.Parameter, rate: Any) -> None:
        """Take a step of one parameter."""
        p.add_(p.grad, alpha=-rate)

    def begin(self) -> None:
        """Look at all gradients."""

    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"]

    def grads(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from (p.grad for p in group["params"] if p.grad is not None)


class Assigning(Chain):
    """Gives parameters other memory, as hand-written ones do."""

    updates_apart = "element"

    def change(self, p: nn.Parameter, rate: Any) -> None:
        p.data = p.data - rate * p.grad


class Counting(Chain):
    """Counts its steps in its groups, from the first one on, as many do."""

    updates_apart = "element"

    def rate(self, group: dict[str, Any]) -> float:
        group["step"] = group.get("step", 0) + 1
        return group["lr"] / group["step"]


class CountingByTensor(Chain):
    """Counts its steps in a tensor of its groups, in place."""

    updates_apart = "element"

    def rate(self, group: dict[str, Any]) -> float:
        group.setdefault("step", torch.zeros((), dtype=torch.long)).add_(1)
        return group["lr"] / int(group["step"])


class Clipping(Chain):
    """Scales all gradients by their common norm, as some kinds of LAMB do."""

    def begin(self) -> None:
        norm = torch.stack([g.norm() for g in self.grads()]).norm()
        for grad in self.grads():
            grad.div_(norm.clamp(min=0.01))


class LateState(torch.optim.SGD):
    """Makes more state in its second step, as those do that average from some step on."""

    updates_apart = "element"

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["steps"] = state.get("steps", 0) + 1
                    if state["steps"] > 1:
                        state["late"] = p.detach().clone()
        return loss

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)


class Nested(torch.optim.SGD):
    """Has another optimizer inside, which does the work."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.AdamW(params, lr=0.01)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)
