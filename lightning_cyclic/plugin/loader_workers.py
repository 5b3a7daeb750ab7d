"""Workers of loaders leave signals to the rank that they load for.

A signal to stop often reaches all processes at once: Ctrl-C in a terminal, torchrun's agent, and
SLURM send it to whatever a rank has started, too. A worker that ends by it takes the next batch
with it, so that its rank fails in the middle of a step, before all ranks could stop behind one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import cache
from typing import Any, final

from torch.utils.data import DataLoader

_heard: set[int] = set()  # by a worker
_LEAVING_S = 1.0


@final
class Sheltered:
    """Begin a loader's worker so that signals do not end it; one that is sent twice does.

    Args:
        own: what else it begins with. [nothing]
        signals: that a rank answers itself.
    """

    def __init__(self, own: Callable[[int], Any] | None, signals: frozenset[int]) -> None:
        self._own = own
        self._signals = signals

    def __call__(self, worker: int) -> None:
        """Begin it; in its own process."""
        for number in self._signals:
            signal.signal(number, _leave_to_rank)
        if self._own is not None:
            self._own(worker)


def shelter(loader: object, signals: frozenset[int]) -> Callable[[], None]:
    """Let the workers that a loader starts from now on leave these signals to the rank.

    Args:
        loader: of any kind; only torch's have workers of this kind.
        signals: their numbers.

    Returns:
        What gives the loader back what it had.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return lambda: None
    _end_workers_at_exit()
    if isinstance(loader.worker_init_fn, Sheltered):  # it is used twice
        return lambda: None
    own = loader.worker_init_fn
    loader.worker_init_fn = sheltered = Sheltered(own, signals)

    def restore() -> None:
        if loader.worker_init_fn is sheltered:
            loader.worker_init_fn = own

    return restore


@cache
def _end_workers_at_exit() -> None:
    """Let a rank end that an error ends while its loaders still have workers."""
    atexit.register(_end_workers)


def _end_workers() -> None:
    # Python sends SIGTERM, which they leave to the rank the first time, and waits without limit
    left = [child for child in multiprocessing.active_children() if child.daemon]
    if left and hasattr(signal, "SIGCHLD"):
        # torch answers it with an error: a worker that had not yet begun ends by the first one
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in left:
        child.terminate()
    until = time.monotonic() + _LEAVING_S  # signals that come at once are one
    for child in left:
        child.join(max(0.0, until - time.monotonic()))


def _leave_to_rank(number: int, frame: Any) -> None:
    # a loader ends workers by a message, and by SIGTERM only those that do not listen
    if number == signal.SIGTERM and number in _heard:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _heard.add(number)
