"""A session: one worker's training, from its first step to its last.

whole_step/session.py      the user's step runs at once, and pulls the program behind it
partial_step/session.py    the program runs the user's step, one stage after the other

Here is what does not depend on that: who this worker is, how it fails, and how it ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_cyclic.errors import PeerError, StepError, WaitTimeoutError
from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.failure_words import words_of
from lightning_cyclic.runtime.flight_recorder import FlightRecorder
from lightning_cyclic.runtime.late_values import LateValues
from lightning_cyclic.runtime.transport import CountingTransport
from lightning_cyclic.runtime.transport.crew import heard
from lightning_cyclic.runtime.weight_watch import StillBuffers, WeightWatch


class AbstractSession(ABC):
    """Train one worker's part.

    Args:
        assembly: all ranks, for what they say beside the program.
        rank: of this worker's process.
        changed_late: makes the error of a buffer that begins to change later than others can be
            told of it, of its name, the rank and the step.
    """

    transport: CountingTransport | None  # of messages; None for one worker

    def __init__(
        self,
        module: nn.Module,
        assembly: Assembly,
        worker: int,
        rank: int,
        device: torch.device,
        changed_late: Callable[[str, int, int], StepError],
    ) -> None:
        self.module = module
        self.assembly = assembly
        self.worker = worker
        self.rank = rank
        self.device = device
        self.failed = False
        self.flight = FlightRecorder()  # what this worker did last
        self.losses = LateValues()  # that somebody looks at
        self._changed_late = changed_late
        self._watch = WeightWatch(rank)
        self._still = self._still_buffers(())

    def _still_buffers(self, names: Iterable[str]) -> StillBuffers:
        return StillBuffers(self.module, names, self.rank, self._changed_late)

    # ------------------------------------------------------------------ what there is

    @property
    @abstractmethod
    def plan(self) -> Plan | None:
        """Return the plan with the stages that were found; None before they are."""

    @property
    @abstractmethod
    def stage_of(self) -> dict[str, int] | None:
        """Return parameter name -> stage; None before the stages are found."""

    @property
    @abstractmethod
    def starts(self) -> tuple[str, ...] | None:
        """Return the module paths that begin stages 1, 2, ...; None before they are found."""

    @property
    @abstractmethod
    def with_state(self) -> list[nn.Parameter]:
        """Return the parameters that this worker has optimizer state for."""

    @abstractmethod
    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this worker's stages by name, once they are found."""

    @abstractmethod
    def own_names(self) -> set[str]:
        """Return the names of the parameters and buffers of stages that this worker updates."""

    # ------------------------------------------------------------------ between steps

    @abstractmethod
    def flush(self) -> None:
        """Finish all steps that have begun; do nothing behind a failure."""

    @abstractmethod
    def state(self) -> dict[str, Any] | None:
        """Return this worker's part of what a checkpoint needs; None before any step."""

    @abstractmethod
    def resume(self, saved: Mapping[str, Any] | None, *, fits: bool) -> bool:
        """Go on from weights that were loaded, and from what :meth:`state` returned beside them.

        Args:
            saved: None for weights alone.
            fits: whether it is of the plan of this run.

        Returns:
            Whether training goes on with the same bits.
        """

    # ------------------------------------------------------------------ failures, the end

    @property
    @abstractmethod
    def when(self) -> str:
        """Say where this worker is, as "in step 12"."""

    def fail(self, error: BaseException, todo: str = "") -> None:
        """Tell the other ranks why this one fails, and what to do; communicate no more."""
        if self.failed:
            return
        self.failed = True
        self._watch.stop()
        if self.transport is not None:
            crew, first = self.transport.crew, self.transport.error
            if first is not None and not isinstance(error, PeerError | WaitTimeoutError):
                # what streams waited for has not come, and they went on with what was there
                words = crew.failure()
                first = first if words is None else PeerError(heard(words, self.rank))
                error.add_note(f"Before that: {first}")
                error = first
            crew.tell(words_of(error, crew.names, self.when, todo))

    def close(self) -> None:
        """End, with all others where none has failed: what this worker sent has arrived then."""
        transport, is_together = self.transport, not self.failed
        if is_together:
            self._settle()
            self.assembly.meet("to finish")
        self._watch.stop()
        self._let_go()
        if transport is not None:
            transport.close()
            if is_together:
                transport.disconnect()

    @abstractmethod
    def _settle(self) -> None:
        """Wait until what was sent has left."""

    @abstractmethod
    def _let_go(self) -> None:
        """Take hooks off the module, and end what runs in the background."""
