"""Lanes: what runs beside the main thread of a worker.

The program says which lane runs an action. A lane does its actions in their order, in a thread of
its own if any of them waits for other workers, else at once. It never waits for a message that
comes behind one that it would have to pass on first: the order of its actions is proved.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import final

from lightning_cyclic.errors import CyclicError, StepError
from lightning_cyclic.plan.actions import Action


@final
class LaneThread:
    """Do actions in a thread, in their order.

    Args:
        name: of the thread.
        do: carries out an action.
    """

    def __init__(self, name: str, do: Callable[[Action], None]) -> None:
        self.error: CyclicError | None = None
        self._name = name
        self._do = do
        self._items: queue.SimpleQueue[tuple[Action | None, threading.Event] | None]
        self._items = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        """Say whether the caller runs on this lane."""
        return threading.current_thread() is self._thread

    def put(self, a: Action | None = None) -> threading.Event:
        """Queue an action, or nothing; return what is set when it and all before it are over."""
        over = threading.Event()
        self._items.put((a, over))
        return over

    def check(self) -> None:
        """Raise the error that has ended the lane, if one has."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread behind the actions it has; never wait for it."""
        self._items.put(None)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            a, over = item
            if a is not None and self.error is None:
                self._try(a)
            over.set()

    def _try(self, a: Action) -> None:
        try:
            self._do(a)
        except CyclicError as error:
            self.error = error
        except Exception as error:  # a lane that dies must say so, or others wait for nothing
            self.error = StepError(f"{self._name} failed: {type(error).__name__}: {error}")
