"""The recorder of whole steps: what the user's step computes lies between what the engine does.

    the engine     F0       F1              B1          B0 ...      does little in each
    the step         ######   ####    ######   ########             forward 0, 1, backward 1, 0

So a forward lasts from its F to where the step comes to the next stage, or ends; a backward from
where the engine last left off, or the step's backward began, to where the gradients are complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, TypeVarTuple, final

from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.runtime.recorder import Recorder, add_updates
from lightning_cyclic.viz.words import sentence

Ts = TypeVarTuple("Ts")


@final
class StepRecorder:
    """Record a worker that runs whole micro-batches.

    Args:
        recorder: of the worker.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: tuple[Action, int] | None = None  # the forward under way, and its begin
        self._left_ns = 0  # when the step last came to the engine
        self._back_ns = 0  # when it last went on behind it, in a backward

    # ------------------------------------------------------------------ what a worker calls

    def recorded(self, kind: Kind, do: Callable[[Action], None]) -> Callable[[Action], None]:
        """Return what carries out an action, timed where it is no mark in the user's step."""
        own: dict[Kind, Callable[[Action], None]] = {Kind.F: self._forward, Kind.B: self._backward}
        if kind in (Kind.UPDATE, Kind.TELL):  # made for several at once; said by the step itself
            return do
        note = own.get(kind)
        if note is None:
            return self._recorder.recorded(kind, do)

        def noted(a: Action) -> None:
            do(a)
            note(a)

        return noted

    def awaited(self, receive: Callable[[Action, Any], None]) -> Callable[[Action, Any], None]:
        """Return what waits for a message, timed."""
        return self._recorder.awaited(receive)

    def joined(self, wait: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        """Return what waits for a lane, timed."""
        return self._recorder.joined(wait)

    # ------------------------------------------------------------------ what an engine calls

    def interrupting(self, do: Callable[[*Ts], None]) -> Callable[[*Ts], None]:
        """Return what the user's step calls in its middle, so that it counts as no compute."""

        def interrupt(*args: *Ts) -> None:
            self._left_ns = time.perf_counter_ns()
            do(*args)
            self._back_ns = time.perf_counter_ns()

        return interrupt

    def updating(
        self, update: Callable[[int, Sequence[int]], Collection[int] | None]
    ) -> Callable[[int, Sequence[int]], Collection[int] | None]:
        """Return what updates stages, timed as one."""

        def timed(t: int, stages: Sequence[int]) -> Collection[int] | None:
            begin_ns = time.perf_counter_ns()
            try:
                return update(t, stages)
            finally:
                add_updates(self._recorder, t, stages, begin_ns)

        return timed

    # ------------------------------------------------------------------ what a session calls

    @contextmanager
    def finding(self) -> Iterator[None]:
        """Let the body be a forward that finds the stages: the program has its parts later."""
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._recorder.add("forward of step 0, which finds the stages", None, begin_ns)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the body be the forward of a step, whose first stage has been entered."""
        try:
            yield
        finally:
            self._left_ns = time.perf_counter_ns()
            self._close()

    @contextmanager
    def reversing(self) -> Iterator[None]:
        """Let the body be the backward of a step."""
        self._open = None  # of a stage that was entered behind the forward
        self._back_ns = time.perf_counter_ns()
        yield

    def attach(self, worker: Attached) -> None:
        """Record a worker."""
        worker.record(self)

    def _forward(self, a: Action) -> None:
        self._close()
        self._open = (a, time.perf_counter_ns())

    def _backward(self, a: Action) -> None:
        self._recorder.add(sentence, a, self._back_ns, end_ns=self._left_ns)

    def _close(self) -> None:
        if self._open is not None:
            (a, begin_ns), self._open = self._open, None
            if self._left_ns > begin_ns:  # else the step skips the stage
                self._recorder.add(sentence, a, begin_ns, end_ns=self._left_ns)


@final
class Unrecorded:
    """Stand where nothing is recorded."""

    finding = running = reversing = nullcontext

    def attach(self, worker: Attached) -> None:
        """Leave a worker as it is."""


class Attached(Protocol):
    """Be what can be recorded."""

    def record(self, recorder: StepRecorder) -> None:
        """Have recorded what is done from now on."""
