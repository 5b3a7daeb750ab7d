"""Lanes: what runs beside the main thread of a worker.

The program says which lane runs an action. A lane does its actions in their order, in a thread of
its own if any of them waits for other workers, else at once. It never waits for a message that
comes behind one that it would have to pass on first: the order of its actions is proved.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, final

from lightning_cyclic.errors import CyclicError, StepError

T = TypeVar("T")


@final
class LaneThread(Generic[T]):
    """Do actions in a thread, in their order.

    Args:
        name: of the thread.
        do: carries out an action, as it was put: alone, or with what belongs to it.
    """

    def __init__(self, name: str, do: Callable[[T], None]) -> None:
        self.error: CyclicError | None = None
        self.name = name
        self._do = do
        self._batches: queue.SimpleQueue[Sequence[T] | None] = queue.SimpleQueue()
        self._over = threading.Condition(threading.Lock())
        self.num_put = self.num_over = 0  # of actions
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, actions: Sequence[T]) -> None:
        """Queue actions; only one thread does."""
        self.num_put += len(actions)
        self._batches.put(actions)

    def wait_for(self, number: int) -> None:
        """Wait until as many actions are over, in all; each of the lane's own waits has a limit.

        Raises:
            CyclicError: the one that has ended the lane.
        """
        with self._over:
            self._over.wait_for(lambda: self.num_over >= number)
        self.check()

    def check(self) -> None:
        """Raise the error that has ended the lane, if one has."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread behind the actions it has; never wait for it."""
        self._batches.put(None)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            for a in batch:
                if self.error is None:
                    self._try(a)
                with self._over:
                    self.num_over += 1
                    self._over.notify_all()

    def _try(self, a: T) -> None:
        try:
            self._do(a)
        except CyclicError as error:
            self.error = error
        except Exception as error:  # a lane that dies must say so, or others wait for nothing
            self.error = StepError(f"{self.name} failed: {type(error).__name__}: {error}")
            self.error.__cause__ = error
