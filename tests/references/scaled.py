"""Loss scaling by the rule, in one process: what runs with 16-mixed are compared with."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

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
        max_norm: clip by a norm, if one is given: over all stages that decide together.
        late: steps before the last whose outcome the scale of a step does not follow from yet.
        state: scale and updates since it was last changed, at first.
    """

    def __init__(
        self, optimizer: Optimizer, stages: list[list[nn.Parameter]], *, together: bool,
        max_norm: float | None = None, late: int = 0, state: tuple[float, int] = (FIRST_SCALE, 0),
    ) -> None:  # fmt: skip
        self.skipped: list[int] = []  # stages, by step
        self.states = [state]
        self.zero_grad = optimizer.zero_grad
        self._optimizer = optimizer
        self._stages = stages
        self._together = together
        self._max_norm = max_norm
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
        skips = list(range(len(self._stages))) if bad and self._together else bad
        if self._max_norm is not None:
            ps = [p for group in self._optimizer.param_groups for p in group["params"]]
            apart = [{id(p) for p in stage} for stage in self._stages]
            for ids in [set().union(*apart)] if self._together else apart:
                nn.utils.clip_grad_norm_([p for p in ps if id(p) in ids], self._max_norm)
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
