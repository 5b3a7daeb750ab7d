"""Loss scaling by the rule, in one process: what runs with 16-mixed are compared with."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.amp import GradScaler

FIRST_SCALE, GROWS_AFTER = 2.0**24, 3


def precision(first_scale: float = FIRST_SCALE) -> MixedPrecision:
    scaler = GradScaler("cpu", init_scale=first_scale, growth_interval=GROWS_AFTER)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


class Scaled:
    """Step an optimizer as a gradient scaler does, with scales that follow late.

    Args:
        optimizer: steps where gradients are finite.
        stages: the parameters of each.
        together: skip all stages if one has gradients that are not finite; else that one.
        late: steps before the last whose outcome the scale of a step does not follow from yet.
        state: scale and updates since it was last changed, at first.
    """

    def __init__(
        self, optimizer: Any, stages: list[list[nn.Parameter]], *, together: bool,
        late: int = 0, state: tuple[float, int] = (FIRST_SCALE, 0),
    ) -> None:  # fmt: skip
        self.skipped: list[int] = []  # stages, by step
        self.states = [state]
        self.param_groups, self.zero_grad = optimizer.param_groups, optimizer.zero_grad
        self._optimizer = optimizer
        self._stages = stages
        self.together = together
        self._late = late

    def scale(self, t: int) -> float:
        """Return the scale of step t."""
        return self.states[max(t - self._late, 0)][0]

    def step(self) -> None:
        t, bad = len(self.skipped), []
        for j, stage in enumerate(self._stages):
            grads = [p.grad for p in stage if p.grad is not None]
            for grad in grads:
                grad.mul_(1.0 / self.scale(t))
            if not all(bool(grad.isfinite().all()) for grad in grads):
                bad.append(j)
        skips = list(range(len(self._stages))) if bad and self.together else bad
        for j in skips:
            for p in self._stages[j]:
                p.grad = None
        self._optimizer.step()
        self.skipped.append(len(skips))
        scale, tracker = self.states[-1]
        if bad:
            self.states.append((scale / 2, 0))
        elif tracker + 1 == GROWS_AFTER:
            self.states.append((scale * 2, 0))
        else:
            self.states.append((scale, tracker + 1))
