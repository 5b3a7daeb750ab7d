"""The sequential references: one process, one micro-batch after the other.

Written from the rules in the design (section 4), not from the package: nothing of it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[nn.Module, int, int], Tensor]  # (module, step, micro-batch) -> loss


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
) -> None:
    """Train in place; the module ends with the newest version of every stage."""
    n, num_stages = num_workers, len(stages)
    newest = [[p.detach().clone() for p in ps] for ps in stages]
    before = newest
    for t in range(num_steps):
        totals: list[list[Tensor | None]] = [[None] * len(ps) for ps in stages]
        for i in range(n):
            for j, ps in enumerate(stages):
                fresh = reads_newest(rule, i, j, n, num_stages, slack)
                for p, value in zip(ps, (newest if fresh else before)[j], strict=True):
                    p.data = value.clone()
                    p.grad = None
            (loss(module, t, i) / n).backward()
            for j, ps in enumerate(stages):
                for k, p in enumerate(ps):
                    so_far = totals[j][k]
                    if p.grad is not None:
                        grad = p.grad.clone()
                        totals[j][k] = grad if so_far is None else so_far + grad
        for j, ps in enumerate(stages):
            for p, value, total in zip(ps, newest[j], totals[j], strict=True):
                p.data = value.clone()
                p.grad = total
        if before_update is not None:
            before_update()
        optimizer.step()
        optimizer.zero_grad()
        if after_update is not None:
            after_update(t)
        before = newest
        newest = [[p.detach().clone() for p in ps] for ps in stages]
