"""The limit of waits: a longer one while what the steps run may still be compiled."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, final

import torch.distributed as dist

FIRST_STEPS = 3  # of a fit, or behind its first evaluation: torch.compile may be at work in them


@final
class Limit:
    """Say how long a wait for another rank may take.

    Args:
        training_s: in training, in seconds.
        starting_s: before it and in its first steps, in seconds. [as in training]
        first_steps: how many these are.
    """

    def __init__(
        self, training_s: float, starting_s: float | None = None, first_steps: int = FIRST_STEPS
    ) -> None:
        self._training_s = training_s
        self._starting_s = max(training_s, starting_s or 0.0)
        self._left = first_steps
        self._group: Any = None

    @property
    def seconds(self) -> float:
        """Return the limit of a wait that begins now."""
        return self._starting_s if self._left else self._training_s

    def begin(self) -> None:
        """Let code run that may have to be compiled: the next few steps wait longer."""
        self._left = max(self._left, FIRST_STEPS)
        self._tell()

    def end(self) -> None:
        """Wait as in training from now on."""
        self._left = 0
        self._tell()

    def end_step(self) -> None:
        """Count a step."""
        if self._left:
            self._left -= 1
            self._tell()

    def govern(self, group: Any) -> None:
        """Keep the limit of what is done together over a group of gloo, in place of another."""
        self._group = group

    def _tell(self) -> None:
        if self._group is not None and self._starting_s > self._training_s:
            set_timeout(timedelta(seconds=self.seconds), self._group)


def set_timeout(limit: timedelta, group: Any) -> None:
    """Let operations of a process group that begin from now on wait so long."""
    public = getattr(dist, "set_timeout", None)  # torch 2.15 has it, and warns of the other
    (public or dist.distributed_c10d._set_pg_timeout)(limit, group)
