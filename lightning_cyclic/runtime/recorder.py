"""The recorder: what a worker really did, and when, written as a trace while it trains.

    Worker.record(recorder)   every action, and every wait for a message or a lane, is timed
    rows                      noted by any thread; made to text and written a few hundred at a time
    the file                  the first events as they come, and the last ones when it is closed

Nothing is timed of a worker that has none: what it calls is wrapped once, when it is made. Times
are the host's: on a GPU, when work was handed to the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, final

from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.viz.trace_events import (
    BEGIN,
    END,
    MAIN,
    SEPARATOR,
    Event,
    Place,
    Times,
    end_of_message,
    lines,
    moment,
    names,
    run_process,
    span,
)
from lightning_cyclic.viz.words import sentence, waiting

# of one trace: what viewers open with ease, some tens of megabytes at most
MOST_FIRST, MOST_LAST = 50_000, 20_000
_CHUNK = 256  # rows that are written at once
_SHORTEST_WAIT_NS = 10_000  # for a lane; a shorter one is the look whether it is done
# name of a thread -> that of the trace, and what it does
LANES = {
    "cyclic-sums": (2, "sums of gradients"),
    "cyclic-weights": (3, "new weights that are passed on"),
}
_THREADS = {MAIN: "compute"} | {tid: f"beside it: {what}" for tid, what in LANES.values()}


class Row(NamedTuple):
    """Hold what took time: who did it, and from when to when in nanoseconds of the process."""

    name: str | Callable[[Action], str]  # text is made when it is written, not in the step
    a: Action | None
    begin_ns: int
    end_ns: int
    thread: str
    category: str = ""


@final
class Recorder:
    """Record one worker.

    Args:
        path: of the file, which is begun anew.
        worker: this worker.
        title: of its rows in the trace.
        zero_ns: when the trace begins, on the clock of the wall: of all workers the same.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, worker: int, title: str, zero_ns: int) -> None:
        self.path = path
        self.problem: OSError | None = None  # which has ended the file early
        self._worker = worker
        self._process = run_process(worker)
        self._offset_ns = time.time_ns() - time.perf_counter_ns() - zero_ns
        self._rows: deque[Row] = deque()  # that are noted: appended by any thread
        self._last: deque[Row] = deque(maxlen=MOST_LAST)  # of those that come after the first
        self._num_first = self._num_late = 0
        self._compute_ns = self._num_compute = 0  # of forwards and backwards in the file
        self.first: tuple[Action, float] | None = None  # of them, and when it began, in us
        self.num_steps = 0  # that the file knows, up to the last of the first events
        self._lock = threading.Lock()  # of the file
        self._file = path.open("w", encoding="utf-8")
        self._file.write(BEGIN + SEPARATOR.join(lines(names(self._process, title, _THREADS))))
        self._file.flush()

    # ------------------------------------------------------------------ what a worker calls

    def recorded(self, kind: Kind, do: Callable[[Action], None]) -> Callable[[Action], None]:
        """Return what carries out an action of a kind, timed."""

        def timed(a: Action) -> None:
            begin_ns = time.perf_counter_ns()
            try:
                do(a)
            finally:
                self.add(sentence, a, begin_ns)

        return timed

    def awaited(self, receive: Callable[[Action, Any], None]) -> Callable[[Action, Any], None]:
        """Return what waits for a message and takes it in, timed."""

        def timed(a: Action, incoming: Any) -> None:
            begin_ns = time.perf_counter_ns()
            try:
                receive(a, incoming)
            finally:
                self.add(waiting, a, begin_ns, "wait")

        return timed

    def joined(self, wait: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        """Return what waits until a lane has done a number of actions, timed."""

        def timed(lane: Any, number: int) -> None:
            begin_ns = time.perf_counter_ns()
            try:
                wait(lane, number)
            finally:
                if time.perf_counter_ns() - begin_ns > _SHORTEST_WAIT_NS:
                    what = LANES[lane.name][1]
                    self.add(f"wait for {what}, beside the compute", None, begin_ns, "wait")

        return timed

    def add(
        self,
        name: str | Callable[[Action], str],
        a: Action | None,
        begin_ns: int,
        category: str = "",
        end_ns: int | None = None,
    ) -> None:
        """Note what has taken from a time to another.

        Args:
            name: what it is called, or makes the name of the action.
            a: the action, if it is one.
            begin_ns: on the clock of the process (perf_counter), as the next one.
            category: by which viewers can filter. [that of the action]
            end_ns: when it was over. [now]
        """
        end_ns = time.perf_counter_ns() if end_ns is None else end_ns
        thread = threading.current_thread().name
        self._rows.append(Row(name, a, begin_ns, end_ns, thread, category))
        if len(self._rows) >= _CHUNK and self._lock.acquire(blocking=False):
            try:  # else another thread is writing them
                self._write()
            finally:
                self._lock.release()

    # ------------------------------------------------------------------ the file

    @property
    def slot_us(self) -> float:
        """Return how long forwards and backwards took in the mean, in microseconds."""
        return self._compute_ns / self._num_compute / 1e3 if self._num_compute else 1e3

    def close(self) -> None:
        """Write what is left, and end the file."""
        if self._file.closed:
            return
        with self._lock, suppress(OSError):  # what there is stays readable without its end
            self._write()
            events = []
            if (left_out := self._num_late - len(self._last)) > 0:
                at = self._micros(self._last[0].begin_ns)
                text = f"{left_out} events are left out before this one"
                events.append(moment(text, at, Place(self._process)))
            for row in self._last:
                events += self._events(row)
            self._put(events)
            self._file.write(END)
        with suppress(OSError):
            self._file.close()

    def _write(self) -> None:
        """Write what has been noted, if it is of the first; keep it, if it is of the last.

        Under the lock.
        """
        events: list[Event] = []
        while self._rows and self._num_first < MOST_FIRST:
            row = self._rows.popleft()
            events += self._events(row)
            self._num_first += 1
            self._count(row)
        self._put(events)
        while self._rows:
            self._last.append(self._rows.popleft())
            self._num_late += 1

    def _put(self, events: list[Event]) -> None:
        if not events or self.problem is not None or self._file.closed:
            return
        try:
            self._file.write(SEPARATOR + SEPARATOR.join(lines(events)))
            self._file.flush()
        except OSError as error:  # a full disk is no reason to end a training
            self.problem = error

    def _events(self, row: Row) -> Iterator[Event]:
        a, (thread, _) = row.a, LANES.get(row.thread, (MAIN, ""))
        place = Place(self._process, thread)
        times = Times(self._micros(row.begin_ns), self._micros(row.end_ns))
        name = row.name if isinstance(row.name, str) or a is None else row.name(a)
        yield span(str(name), a, times, place, row.category)
        if a is None or a.peer is None:
            return
        if a.kind is Kind.SEND:
            yield end_of_message(a, self._worker, a.peer, times.begin, place)
        elif row.category == "wait":
            at = (times.begin + times.end) / 2  # within the wait, which arrows point at
            yield end_of_message(a, a.peer, self._worker, at, place)

    def _count(self, row: Row) -> None:
        if row.a is None:
            return
        self.num_steps = max(self.num_steps, row.a.t + 1)
        if row.a.kind in (Kind.F, Kind.B) and not row.category:
            self._compute_ns += row.end_ns - row.begin_ns
            self._num_compute += 1
            if self.first is None:
                self.first = row.a, self._micros(row.begin_ns)

    def _micros(self, ns: int) -> float:
        return (ns + self._offset_ns) / 1e3


def add_updates(recorder: Recorder, t: int, stages: Sequence[int], begin_ns: int) -> None:
    """Note the update of several stages with the gradients of a step."""
    if not stages:
        return
    first = Action(kind=Kind.UPDATE, t=t, j=stages[0], v=t + 1)
    text = sentence(first)
    if len(stages) > 1:
        text = text.replace(f"stage {stages[0]}", f"stages {', '.join(map(str, stages))}")
    recorder.add(text, first, begin_ns)
