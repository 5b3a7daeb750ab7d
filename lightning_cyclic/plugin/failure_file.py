"""The failure file: what a rank did last, for whoever looks at a run that failed overnight.

    <default_root_dir>/lightning_cyclic_failures/failure-rank3.txt

Each rank writes its own, whatever it fails with, also one that stops because of another. Another
attempt, of ranks that torchrun starts again, adds to it. Nothing here hides or holds up the error:
what cannot be written in time is not written.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, final

from lightning_cyclic.compat import logger
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.presets import AXES
from lightning_cyclic.runtime.failure_words import reason_of
from lightning_cyclic.runtime.flight_recorder import FlightRecorder, lines

FOLDER = "lightning_cyclic_failures"
_MOST_REPORTS = 16  # of a file: the first, which may have caused the others, and the last
_LIMIT_S = 2.0  # for a disk that hangs
_RULE = "=" * 80 + "\n"
_LEGEND = """\
What this worker did last, the newest last; seconds before it failed, and seconds that it took.
> was not over. Between actions a rank runs what is yours: training_step and its backward, hooks,
callbacks, loaders.
"""

# below Lightning's, which is printed
_log = logger()


@final
class Place(NamedTuple):
    """Say who fails, where in the run."""

    name: str  # of the rank, as other ranks call it
    worker: int
    plan: Plan
    when: str  # as "in step 12"


def report(
    error: BaseException, find_place: Callable[[], Place], flight: FlightRecorder | None
) -> Callable[[], str]:
    """Return what makes the text about a failure, of what has been done until now.

    Args:
        error: with which the rank ends.
        find_place: says who it is.
        flight: what it did last; None where it has not begun.
    """
    rows, at_ns = flight.take() if flight is not None else [], time.monotonic_ns()
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")

    def text() -> str:
        place = find_place()
        did = _LEGEND + "\n".join(lines(rows, at_ns)) if rows else "It had begun no action."
        return (
            f"{now}: {place.name} ended {place.when}\n"
            f"{reason_of(error)}\n"
            f"worker {place.worker}, process {os.getpid()}, {_in_a_line(place.plan)}\n\n"
            f"{did}\n"
        )

    return text


@contextmanager
def written(path: Path, text: Callable[[], str], error: BaseException) -> Iterator[None]:
    """Add a text to a file while the body runs; let the error say where, or the log why not.

    Args:
        path: of the file.
        text: makes what is added.
        error: of which it tells.
    """
    problems: list[Exception | None] = []  # none, once it is written

    def write() -> None:
        try:
            _add(path, text())
            problems.append(None)
        except Exception as problem:  # whatever it is, the error is what matters
            problems.append(problem)

    writing = threading.Thread(target=write, name="cyclic-failure-file", daemon=True)
    try:
        writing.start()
    except RuntimeError as problem:  # as where memory lacks
        problems.append(problem)
    try:
        yield
    finally:
        if not problems:
            writing.join(_LIMIT_S)
        late = TimeoutError(f"it takes longer than {_LIMIT_S:g} s")
        problem_with_it = problems[0] if problems else late
        if problem_with_it is None:
            error.add_note(f"What this rank did last is in {path}")
        else:
            _log.warning(f"{path} is not written: {reason_of(problem_with_it)}")


def _add(path: Path, text: str) -> None:
    """Put a file in the place of the one before, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text("utf-8", "replace").split(_RULE)[1:] if path.exists() else []
    kept = [*before[:1], *before[1:][2 - _MOST_REPORTS :], text]
    whole = path.with_suffix(f".{os.getpid()}")
    try:
        whole.write_text("".join(_RULE + part for part in kept), "utf-8", "replace")
        whole.replace(path)
    finally:
        with suppress(OSError):
            whole.unlink(missing_ok=True)


def _in_a_line(plan: Plan) -> str:
    names = ("num_workers", "num_stages", "num_microbatches", "replicas", *AXES)
    return f"{plan.preset}: {', '.join(f'{name}={getattr(plan, name)}' for name in names)}"
