"""The local transport: all workers of a plan in one process, for tests and as the oracle."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import final

from torch import Tensor
from typing_extensions import override

from lightning_cyclic.plan.passes.messages import Ring
from lightning_cyclic.runtime.transport.base import (
    AbstractPending,
    AbstractTransport,
    Part,
)
from lightning_cyclic.runtime.transport.crew import AbstractCrew, Names

_Address = tuple[Ring, Part]


@final
class PostOffice:
    """Hold the messages and the failure note that the workers of one process share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[_Address, deque[Tensor]] = defaultdict(deque)
        self._receives: dict[_Address, deque[_Awaited]] = defaultdict(deque)
        self.failure: str | None = None

    def send(self, address: _Address, message: Tensor) -> None:
        """Hand a message to the receive that has waited longest, or keep it for the next."""
        with self._lock:
            if receives := self._receives[address]:
                receives.popleft().deliver(message)
            else:
                self._messages[address].append(message)

    def receive(self, address: _Address, awaited: _Awaited) -> None:
        """Hand the oldest message to a receive, or keep the receive for the next."""
        with self._lock:
            if messages := self._messages[address]:
                awaited.deliver(messages.popleft())
            else:
                self._receives[address].append(awaited)
            if self.failure is not None:
                awaited.wake()

    def fail(self, text: str) -> None:
        """Leave word unless another worker was first, and wake all who wait."""
        with self._lock:
            self.failure = self.failure or text
            for receives in self._receives.values():
                for awaited in receives:
                    awaited.wake()


@final
class LocalCrew(AbstractCrew):
    """Be the workers of one process, all of which answer.

    Args:
        timeout_s: limit of every wait, in seconds.
    """

    def __init__(self, office: PostOffice, worker: int, timeout_s: float) -> None:
        super().__init__(Names(worker), timeout_s)
        self._office = office

    @override
    def failure(self) -> str | None:
        return self._office.failure

    @override
    def tell(self, words: str) -> None:
        self._office.fail(words)
        self.hang_up()

    @override
    def call(self) -> dict[int, str]:
        return {}


@final
class LocalTransport(AbstractTransport):
    """Pass messages between threads of one process.

    Args:
        office: what the workers share; one per plan that runs.
        timeout_s: limit of every wait, in seconds.
    """

    def __init__(
        self, office: PostOffice, worker: int, num_workers: int, timeout_s: float = 60.0
    ) -> None:
        super().__init__(worker, num_workers, LocalCrew(office, worker, timeout_s))
        self._office = office

    @override
    def isend(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        assert ring.channel.source == self.worker, f"worker {self.worker} sends on {ring}"
        self._office.send((ring, part), data.clone())
        return _Sent()

    @override
    def irecv(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        assert ring.channel.target == self.worker, f"worker {self.worker} receives on {ring}"
        awaited = _Awaited(self._office, data, self.crew.timeout_s)
        self._office.receive((ring, part), awaited)
        return awaited


@final
class _Sent(AbstractPending):
    def wait(self) -> None:
        """Return at once: the message was copied when it was sent."""

    def is_done(self) -> bool:
        return True


@final
class _Awaited(AbstractPending):
    """Wait for a message in the thread of its receiver, which also copies it.

    Args:
        office: whose failure note ends the wait.
        timeout_s: limit of the wait, in seconds.
    """

    def __init__(self, office: PostOffice, data: Tensor, timeout_s: float) -> None:
        self._office = office
        self._data = data
        self._timeout_s = timeout_s
        self._message: Tensor | None = None
        self._has_come = False
        self._woken = threading.Event()

    def deliver(self, message: Tensor) -> None:
        self._message = message
        self._has_come = True
        self._woken.set()

    def wake(self) -> None:
        """End the wait: no message will come."""
        self._woken.set()

    def wait(self) -> None:
        self._woken.wait(self._timeout_s)
        if not self._has_come:
            if self._office.failure is not None:
                raise ConnectionError(self._office.failure)
            raise TimeoutError(f"no message within {self._timeout_s:g} s")
        if self._message is not None:  # or a second wait would undo what was written since
            self._data.copy_(self._message)
            self._message = None

    def is_done(self) -> bool:
        return self._woken.is_set()
