"""Background: what a thread writes and removes, in order, while training goes on."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

from torch import Tensor
from torch.utils._pytree import tree_leaves

# jobs that the next copy does not wait for: a file and the removal of the one before it. Behind
# a disk that is slower than training, copies of its state would fill the memory.
MOST_LEFT = 2


@final
class Background:
    """Carry out jobs one behind the other, in a thread of their own.

    The error of a job is raised where somebody waits, or closes.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # a Trainer may be pickled before
        self._jobs: deque[Future[None]] = deque()

    def add(self, job: Callable[[], None]) -> None:
        """Carry out a job behind those that were added before it."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lightning_cyclic_background")
        self._jobs.append(self._thread.submit(job))

    def wait(self, most: int = 0) -> None:
        """Wait until no more than so many jobs are left; signal handlers may do so, too.

        Raises:
            Exception: that of a job which has failed.
        """
        while self._jobs and (len(self._jobs) > most or self._jobs[0].done()):
            self._jobs.popleft().result()

    def close(self) -> None:
        """Finish all jobs, and end the thread.

        Raises:
            Exception: that of the first job which has failed.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()  # those behind one that has failed are carried out as well
        jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            job.result()


def copied(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return what training does not change any more; tensors that share values still do so."""
    memo: dict[int, Any] = {}
    for x in tree_leaves(checkpoint):
        if isinstance(x, Tensor) and not x.is_leaf:  # of a graph, which deepcopy does not take
            memo[id(x)] = copy.deepcopy(x.detach(), memo)
    return copy.deepcopy(checkpoint, memo)
