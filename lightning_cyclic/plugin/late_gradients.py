"""Compensation: what the options for old gradients do around the update of a stage.

A stage whose forwards read the newest weights there are at that time has gradients that are as
old as the plan says: ``plan.delay(j)`` updates. Stages without a delay are left as they are, and
so are synchronous steps at first, behind which everything begins as if at step 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn

from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.runtime.prediction.delays import ErrorFeedback, pipemare_lr


@final
class Compensation:
    """Correct the updates of stages whose gradients are old.

    Args:
        options: which of the corrections the user chose.
    """

    def __init__(self, options: Options) -> None:
        self._feedback = ErrorFeedback() if options.error_feedback else None
        self._annealing_steps = options.lr_annealing_steps

    @contextmanager
    def corrected(
        self, plan: Plan, t: int, stages: Mapping[int, Sequence[nn.Parameter]]
    ) -> Iterator[None]:
        """Correct, behind the body, by how much the update before missed what it should have been.

        A parameter without a gradient is left alone, as torch's optimizers leave it.

        Args:
            plan: says which stages have old gradients.
            t: the step whose gradients the body applies.
            stages: stage -> its parameters, which the body changes in place.
        """
        if self._feedback is None or t < plan.warmup_steps:
            yield
            return
        late = [p for j, ps in stages.items() if plan.delay(j) > 0 for p in ps]
        before = [p.detach().clone() for p in late]
        yield
        for p, values in zip(late, before, strict=True):
            if p.grad is not None:
                p.data.copy_(self._feedback.correct(p, values, p))

    def annealed(
        self, plan: Plan, t: int, j: int, groups: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return hyper-parameters with the learning rates that a stage's update has.

        Args:
            plan: says by how many updates the stage's gradients are old.
            t: the step of the update.
            j: stage.
            groups: of that step, as the scheduler left them; they are not changed.
        """
        late = t - plan.warmup_steps
        if self._annealing_steps == 0 or late < 0:
            return [dict(group) for group in groups]
        delay, steps = float(plan.delay(j)), self._annealing_steps
        return [{**group, "lr": pipemare_lr(group["lr"], delay, late, steps)} for group in groups]

    # ------------------------------------------------------------------ checkpoints

    def state(self, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return name -> last update, of the parameters that this worker updates."""
        updates = {} if self._feedback is None else self._feedback.updates
        return {n: updates[p] for n, p in named.items() if p in updates}

    def put_state(self, state: Mapping[str, Tensor], named: Mapping[str, nn.Parameter]) -> None:
        """Take last updates from a checkpoint, and forget any others."""
        if self._feedback is not None:
            self._feedback.updates.clear()
            for n, p in named.items():
                if n in state:
                    self._feedback.updates[p] = state[n].to(p.device)
