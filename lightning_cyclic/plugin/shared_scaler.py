"""A gradient scaler over ranks that have some stages each: all skip a step, or none does.

Lightning takes the scale out of a rank's gradients, runs hooks, clips, and has the scaler step,
which looks at what the rank has found. Before it does, ranks tell each other the norms of their
gradients, as they do for clipping; a rank whose gradients overflowed tells infinite ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_cyclic.runtime.loss_scaling import State, put_state, state_behind, state_of
from lightning_cyclic.runtime.partial_step.config import Share
from lightning_cyclic.runtime.partial_step.session import StagewiseSession


@final
class SharedScaler:
    """Scale losses on all ranks alike.

    Args:
        scaler: the Trainer's.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._state: State = (1.0, 0)  # of the step under way
        self._put: tuple[int, int] | None = None  # what the scaler held then

    def get_scale(self) -> float:
        """Return by what losses of the step under way are multiplied."""
        return self._state[0]

    def scaled(self, t: int, share: Share) -> Share:
        """Return the share of a micro-batch in the loss of step ``t``, times its scale."""
        if self._put is None or self._put != self._holding():  # it is the first, or was loaded
            self._state = state_of(self._scaler)
            self._put = self._holding()
        scale = self.get_scale()
        return lambda ones: share(ones) * scale

    def _holding(self) -> tuple[int, int]:
        scale = self._scaler._scale  # None before it has scaled anything
        return (id(scale), -1 if scale is None else scale._version)

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """Say whether the scaler has found gradients of this rank that are not finite."""
        found = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(bool(x) for x in found.values())

    @contextmanager
    def deciding(self, session: StagewiseSession) -> Iterator[None]:
        """Let the scaler step as all ranks decide, while the body runs an update."""
        step = self._scaler.step

        def stepped(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            states = self._scaler._per_optimizer_states[id(optimizer)]
            if states["stage"].name == "READY":  # else Lightning has, as hooks are to see them so
                self._scaler.unscale_(optimizer)
            finite = session.all_finite(overflowed=self.has_overflowed(optimizer))
            found = torch.full((), float(not finite), device=session.device)
            states["found_inf_per_device"] = {session.device: found}
            return step(optimizer, *args, **kwargs)

        vars(self._scaler)["step"] = stepped
        try:
            yield
        finally:
            del vars(self._scaler)["step"]

    def end_step(self, session: StagewiseSession) -> None:
        """Let the scaler hold the state behind the step that has just ended."""
        if session.was_finite is not None:  # else there was no loss, and no update
            self._state = state_behind(self._scaler, self._state, session.was_finite)
            put_state(self._scaler, self._state)
            self._put = self._holding()
