"""The flight recorder: what a worker did last, for when a run fails; and names for profilers.

    Worker.flight    every action and every wait as it begins, and whether it is over
    take()           the last of them, when the run fails
    write_down       the same as text, in a file of each rank, behind those of earlier attempts:

      before    taken  action          what it is
      0.0312   0.0021  0F0@2#3         forward, stage 0, micro-batch 0, of step 3, on version 2 ...
    > 0.0290           1RECV_A0<1#3    wait for activations, stage 1, micro-batch 0, ...

It is always on, so it makes no text and takes no lock: a list and two looks at the clock for each
action. Times are the host's: on a GPU, when work was handed to the device. While a profiler of
torch runs, each is a ``torch.profiler.record_function`` of the same words, too.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias, final

from torch.autograd import profiler

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action
from lightning_cyclic.plan.presets import AXES
from lightning_cyclic.runtime.failure_words import reason_of
from lightning_cyclic.viz.words import sentence

MOST = 256  # actions and waits that are kept: some steps of a small plan, part of one of a large
FOLDER = "lightning_cyclic_failures"  # in the Trainer's default_root_dir
_LEGEND = """\
What this worker did last, the newest last; seconds before it failed, and seconds that it took.
> was not over. Between actions a rank runs what is yours: training_step and its backward, hooks,
callbacks, loaders.
"""
_LANES = {  # name of a thread -> what it does
    "cyclic-sums": "sums of gradients",
    "cyclic-weights": "new weights that are passed on",
    "cyclic-tiers": "optimizer state that is read or written",
}
# [begin, end (0: it is not over), action or lane, what makes its words]; in nanoseconds
Row: TypeAlias = list[Any]
Words: TypeAlias = Callable[[Any], str]
_now_ns = time.monotonic_ns


@final
class FlightRecorder:
    """Keep what one worker did last, in the order in which it began; any of its threads notes."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=MOST)

    def noted(self, do: Callable[..., None], words: Words) -> Callable[..., None]:
        """Return what acts, or waits, noted.

        Args:
            do: given an action, or a lane that is waited for, and more.
            words: what it does, of the same.
        """
        note = self._rows.append

        def noted(what: Any, *more: Any) -> None:
            row = [_now_ns(), 0, what, words]
            note(row)
            with _profiled(words, what):
                do(what, *more)
            row[1] = _now_ns()

        return noted

    def note(self, actions: Iterable[Action]) -> None:
        """Note actions that have been carried out outside of the worker: updates, all at once."""
        now_ns = _now_ns()
        for a in actions:
            self._rows.append([now_ns, now_ns, a, sentence])
            with _profiled(sentence, a):
                pass  # a mark behind the optimizer's own step

    def take(self) -> list[Row]:
        """Return what was done last, and forget it; lanes may go on meanwhile."""
        return [self._rows.popleft() for _ in range(len(self._rows))]


def write_down(
    path: Path, error: BaseException, rank: str, worker: int, plan: Plan, rows: Sequence[Row]
) -> None:
    """Add to a file what a worker did until it failed; the error says where, or why not."""
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    numbers = ("num_workers", "num_stages", "num_microbatches", "replicas", *AXES)
    chosen = ", ".join(f"{name}={getattr(plan, name)}" for name in numbers)
    did = _LEGEND + "\n".join(lines(rows, _now_ns())) if rows else "It had begun no action."
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(
                f"{'=' * 80}\n{now}: {rank}\n{reason_of(error)}\n"
                f"worker {worker}, process {os.getpid()}, {plan.preset}: {chosen}\n\n{did}\n"
            )
    except OSError as problem:  # the error is what matters
        error.add_note(f"{path} is not written: {problem}")
    else:
        error.add_note(f"What this rank did last is in {path}")


def lines(rows: Sequence[Row], at_ns: int) -> list[str]:
    """Return a line for each thing that was done before a time, with a mark if it was not over.

    Args:
        rows: that were taken.
        at_ns: when, on the clock of time.monotonic_ns.

    Example:
        >>> from lightning_cyclic.plan.actions import parse
        >>> from lightning_cyclic.viz.words import waiting
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


def joining(lane: Any) -> str:
    """Say what a worker waits for that needs what a lane makes."""
    return f"wait for {_LANES[lane.name]}, beside the compute"


_NOT_PROFILED = nullcontext()


def _profiled(words: Words, what: Any) -> AbstractContextManager[object]:
    """Return what shows the body in profiles; words are made only while there is one."""
    if not profiler._is_profiler_enabled:
        return _NOT_PROFILED
    return profiler.record_function(words(what))
