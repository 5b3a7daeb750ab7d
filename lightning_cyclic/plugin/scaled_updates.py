"""Loss scaling where each worker runs whole micro-batches: scales, and updates that are skipped.

A worker that begins a step does not know yet how the last ones came out, so the scale of a step
follows from those whose updates all workers have read by then (Plan.ended_before): of lockstep
workers all steps before, else one fewer. Versions tell how their updates came out, so that no
message is added.

Where owners know each other's norms before they update, an overflow anywhere skips the whole
update, as under DDP. Freshest weights leave no time for that: each stage skips its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

from torch.amp import GradScaler

from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.loss_scaling import LossScaling, Outcomes, State
from lightning_cyclic.runtime.whole_step.engine import Engine


@final
class ScaledUpdates:
    """Give each step its scale, and say which stages an update leaves as they were.

    Args:
        scaler: the Trainer's.
        together: whether all stages decide about an update together.
    """

    def __init__(self, scaler: GradScaler, *, together: bool) -> None:
        self.outcomes = Outcomes()
        self._scaling = LossScaling(scaler, self._is_finite)
        self._together = together
        self._num_stages = 0

    def _is_finite(self, t: int) -> bool:
        return self.outcomes.are_finite(t, self._num_stages)

    def begin_backward(self, plan: Plan, t: int) -> None:
        """Let the scaler have the scale of step ``t``, before a loss is multiplied by it."""
        self._num_stages = plan.num_stages
        self._scaling.show(plan, t)
        self.outcomes.forget(plan.ended_before(t))

    def skipped(self, engine: Engine, t: int, stages: Sequence[int]) -> Collection[int]:
        """Take the scale out of the gradients of own stages; return those not to be updated.

        Args:
            engine: in whose parameters the gradients of step ``t`` are.
            t: step.
            stages: that are to be updated.
        """
        overflowed = [
            j for j in stages
            if not self._scaling.unscaled(engine.plan, t, [p.grad for p in engine.parameters(j)])
        ]  # fmt: skip
        if not self._together:
            return overflowed
        return () if engine.all_finite(t, overflowed) else stages

    def settle(self, t: int, group: Any) -> None:
        """Let every worker's scaler hold the state behind all steps before ``t``.

        All workers must call it, behind a flush.
        """
        self.outcomes.settle(self._scaling.known, t, group)
        self._scaling.catch_up(t)

    def state(self) -> dict[int, State]:
        """Return the states that later steps may need."""
        return self._scaling.state()

    def put_state(self, states: Mapping[int, State]) -> None:
        """Take states from a checkpoint."""
        self._scaling.put_state(states)
