"""The flight recorder: what a worker did last, kept in memory for the day on which a run fails.

    Worker.flight    every action and every wait as it begins, and whether it is over
    take()           the last of them, when the run fails
    lines            the same as text:

      before    taken  action          what it is
      0.0312   0.0021  0F0@2#3         forward, stage 0, micro-batch 0, of step 3, on version 2 ...
    > 0.0290           1RECV_A0<1#3    wait for activations, stage 1, micro-batch 0, ...

It is always on, so it makes no text and takes no lock: a list and two looks at the clock for each
action. Times are the host's: on a GPU, when work was handed to the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, final

from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.runtime.recorder import LANES
from lightning_cyclic.viz.words import sentence, waiting

MOST = 256  # actions and waits that are kept: some steps of a small plan, part of one of a large
# [begin, end (0: it is not over), action or lane, what makes its words]; in nanoseconds
Row: TypeAlias = list[Any]
_now_ns = time.monotonic_ns


@final
class FlightRecorder:
    """Keep what one worker did last, in the order in which it began; any of its threads notes."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=MOST)

    # ------------------------------------------------------------------ what a worker calls

    def recorded(self, kind: Kind, do: Callable[[Action], None]) -> Callable[[Action], None]:
        """Return what carries out an action of a kind, noted."""
        note = self._rows.append

        def noted(a: Action) -> None:
            row = [_now_ns(), 0, a, sentence]
            note(row)
            do(a)
            row[1] = _now_ns()

        return noted

    def awaited(self, receive: Callable[[Action, Any], None]) -> Callable[[Action, Any], None]:
        """Return what waits for a message and takes it in, noted."""
        note = self._rows.append

        def noted(a: Action, incoming: Any) -> None:
            row = [_now_ns(), 0, a, waiting]
            note(row)
            receive(a, incoming)
            row[1] = _now_ns()

        return noted

    def joined(self, wait: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        """Return what waits until a lane has done a number of actions, noted if it has not yet."""
        note = self._rows.append

        def noted(lane: Any, number: int) -> None:
            row = [_now_ns(), 0, lane.name, _joining]
            if lane.num_over < number:
                note(row)
            wait(lane, number)
            row[1] = _now_ns()

        return noted

    # ------------------------------------------------------------------ what others call

    def note(self, actions: Iterable[Action]) -> None:
        """Note actions that have been carried out outside of the worker: updates, all at once."""
        now_ns = _now_ns()
        self._rows.extend([now_ns, now_ns, a, sentence] for a in actions)

    def take(self) -> list[Row]:
        """Return what was done last, and forget it; lanes may go on meanwhile."""
        return [self._rows.popleft() for _ in range(len(self._rows))]


def lines(rows: Sequence[Row], at_ns: int) -> list[str]:
    """Return a line for each thing that was done before a time, with a mark if it was not over.

    Args:
        rows: that were taken.
        at_ns: when, on the clock of time.monotonic_ns.

    Example:
        >>> from lightning_cyclic.plan.actions import parse
        >>> a, b = parse("0F0@2#3"), parse("0RECV_G0<1#3")
        >>> ms = 1_000_000
        >>> print(*lines([[2 * ms, 4 * ms, a, sentence], [5 * ms, 0, b, waiting]], 10 * ms), sep=chr(10))
              0.0080    0.0020  0F0@2#3             forward, stage 0, micro-batch 0, of step 3, on version 2 of the weights
        >     0.0050            0RECV_G0<1#3        wait for gradients of activations, stage 0, micro-batch 0, of step 3, from worker 1
    """  # noqa: E501  (as they are)
    return [_line(row, at_ns) for row in rows if row[0] <= at_ns]


def _line(row: Row, at_ns: int) -> str:
    begin_ns, end_ns, what, words = row
    is_over = 0 < end_ns <= at_ns
    mark, taken = (" ", f"{(end_ns - begin_ns) / 1e9:.4f}") if is_over else (">", "")
    action = str(what) if isinstance(what, Action) else ""
    return f"{mark} {(at_ns - begin_ns) / 1e9:>10.4f}{taken:>10}  {action:<18}  {words(what)}"


def _joining(lane: str) -> str:
    return f"wait for {LANES[lane][1]}, beside the compute"
