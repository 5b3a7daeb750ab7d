"""The sequential references: one process, one micro-batch after the other.

Written from the rules in the design (section 4), not from the package: nothing of it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LEAST = torch.float32  # of sums of several workers

Loss = Callable[[nn.Module, int, int], Tensor]  # (module, step, micro-batch) -> loss


@dataclass(frozen=True)
class Wire:
    """Add gradients of several workers.

    Args:
        sum_goes: (step, stage, micro-batch) -> whether the sum up to it goes to another worker.
        gradient_goes: the same of its gradient. [none does]
        dtype: in which it goes, if it is not narrower anyway. [any]
        least: of sums.
        is_apart: whether each gradient is added by itself, and not as autograd makes it.
    """

    sum_goes: Callable[[int, int, int], bool]
    gradient_goes: Callable[[int, int, int], bool] = lambda t, j, i: False
    dtype: torch.dtype | None = None
    least: torch.dtype = LEAST
    is_apart: bool = False

    def behind(self, x: Tensor) -> Tensor:
        """Return what has gone to another worker as it comes there."""
        if self.dtype is None or torch.promote_types(x.dtype, self.dtype) == self.dtype:
            return x
        return x.to(self.dtype)

    def plus(self, so_far: Tensor | None, grad: Tensor, t: int, j: int, i: int) -> Tensor:
        """Return the sum up to micro-batch i, where it is needed next."""
        if self.gradient_goes(t, j, i):
            grad = self.behind(grad)
        of_one = i > 0 and not self.is_apart and not self.sum_goes(t, j, i - 1)
        if so_far is not None and of_one and so_far.dtype == grad.dtype:
            grad = so_far + grad  # as on one device
        elif so_far is not None:
            wide = torch.promote_types(so_far.dtype, grad.dtype)
            wide = torch.promote_types(wide, self.least if self.dtype is None else self.dtype)
            grad = so_far.to(wide) + grad.to(wide)
        return self.behind(grad) if self.sum_goes(t, j, i) else grad


def wire_of(plan: Any, dtype: torch.dtype | None = None, least: torch.dtype = LEAST) -> Wire:
    """Return the wire between the workers of a plan, which says who they are."""
    last, at_owner = plan.num_microbatches - 1, plan.axes.sharding.gathers
    is_apart = at_owner or plan.group_size > 1
    # where replicas sum their own, the last micro-batch of each stands for its sum
    first = plan.num_microbatches - plan.copies_of_stages if plan.sums_by_replica else 0

    def adder(t: int, j: int, i: int) -> int:
        w = plan.worker_of(i, j, t)
        if at_owner:
            return int(plan.owner(j))
        return int(plan.lead(w, j) if plan.group_size > 1 else w)

    def gradient_goes(t: int, j: int, n: int) -> bool:
        i = first + n
        return bool(is_apart and adder(t, j, i) != plan.worker_of(i, j, t))

    def sum_goes(t: int, j: int, n: int) -> bool:
        i = first + n
        after = plan.owner(j) if i == last else adder(t, j, i + 1)
        return bool(after != adder(t, j, i))

    return Wire(sum_goes, gradient_goes, dtype, least, is_apart)


def give(p: nn.Parameter, total: Tensor | None) -> None:
    """Let an optimizer have a gradient, in the parameter's dtype if it must have that."""
    p.grad = total if total is None or p.grad_dtype is None else total.to(p.dtype)


def reads_newest(rule: str, i: int, j: int, n: int, num_stages: int, slack: float) -> bool:
    """Say whether micro-batch i's forward of stage j reads version t (else max(t-1, 0))."""
    if rule == "sync":
        return True
    if rule == "delayed":
        return False
    # freshest: (2S/N) i + 2j >= (2S/N)(N-1) + c, in whole numbers
    return 2 * num_stages * i + 2 * j * n >= 2 * num_stages * (n - 1) + slack * n


def train(  # noqa: C901  (the rule on one screen, to be read beside the design)
    module: nn.Module,
    stages: Sequence[Sequence[nn.Parameter]],
    optimizer: Optimizer,
    loss: Loss,
    *,
    rule: str,
    num_workers: int,
    num_steps: int,
    slack: float = 0,
    after_update: Callable[[int], None] | None = None,
    before_update: Callable[[], None] | None = None,
    wire: Wire | None = None,
    num_groups: int | None = None,
) -> None:
    """Train in place; the module ends with the newest version of every stage.

    Workers of a group read what one worker in its place would. Without a wire all gradients are of
    one worker, and added in their own dtype.
    """
    n, num_stages = num_workers, len(stages)
    groups = num_groups or n
    newest = [[p.detach().clone() for p in ps] for ps in stages]
    before = newest
    for t in range(num_steps):
        totals: list[list[Tensor | None]] = [[None] * len(ps) for ps in stages]
        for i in range(n):
            for j, ps in enumerate(stages):
                fresh = reads_newest(rule, i * groups // n, j, groups, num_stages, slack)
                for p, value in zip(ps, (newest if fresh else before)[j], strict=True):
                    p.data = value.clone()
                    p.grad = None
            (loss(module, t, i) / n).backward()
            for j, ps in enumerate(stages):
                for k, p in enumerate(ps):
                    so_far = totals[j][k]
                    if p.grad is not None:
                        grad = p.grad.clone()
                        plain = grad if so_far is None else so_far + grad
                        totals[j][k] = wire.plus(so_far, grad, t, j, i) if wire else plain
        for j, ps in enumerate(stages):
            for p, value, total in zip(ps, newest[j], totals[j], strict=True):
                p.data = value.clone()
                give(p, total)
        if before_update is not None:
            before_update()
        optimizer.step()
        optimizer.zero_grad()
        if after_update is not None:
            after_update(t)
        before = newest
        newest = [[p.detach().clone() for p in ps] for ps in stages]
