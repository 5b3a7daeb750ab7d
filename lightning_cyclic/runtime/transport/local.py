"""The local transport: all workers of a plan in one process, for tests and as the oracle."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from typing import final

from torch import Tensor
from typing_extensions import override

from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.runtime.transport.base import AbstractPending, AbstractTransport

_Address = tuple[Payload, int, int, int]  # payload, channel, sender, receiver


@final
class PostOffice:
    """Hold the mailboxes and the failure notes that the workers of one process share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boxes: dict[_Address, queue.Queue[Tensor]] = defaultdict(queue.Queue)
        self.failure: str | None = None

    def box(self, address: _Address) -> queue.Queue[Tensor]:
        """Return the mailbox of an address."""
        with self._lock:
            return self._boxes[address]


@final
class LocalTransport(AbstractTransport):
    """Pass messages between threads of one process.

    Args:
        office: what the workers share; one per plan that runs.
        worker: this worker.
        num_workers: how many there are.
        timeout_s: limit of every wait, in seconds.
    """

    def __init__(
        self, office: PostOffice, worker: int, num_workers: int, timeout_s: float = 60.0
    ) -> None:
        super().__init__(worker, num_workers, timeout_s)
        self._office = office

    @override
    def isend(self, payload: Payload, channel: int, peer: int, data: Tensor) -> AbstractPending:
        self._office.box((payload, channel, self.worker, peer)).put(data.clone())
        return _Sent()

    @override
    def irecv(self, payload: Payload, channel: int, peer: int, data: Tensor) -> AbstractPending:
        box = self._office.box((payload, channel, peer, self.worker))
        return _Awaited(box, data, self.timeout_s)

    @override
    def report_failure(self, text: str) -> None:
        self._office.failure = self._office.failure or text

    @override
    def failure(self) -> str | None:
        return self._office.failure

    @override
    def close(self) -> None:
        """Do nothing: nothing runs in the background."""


@final
class _Sent(AbstractPending):
    def wait(self) -> None:
        """Return at once: the message was copied when it was sent."""


@final
class _Awaited(AbstractPending):
    def __init__(self, box: queue.Queue[Tensor], data: Tensor, timeout_s: float) -> None:
        self._box = box
        self._data = data
        self._timeout_s = timeout_s

    def wait(self) -> None:
        try:
            self._data.copy_(self._box.get(timeout=self._timeout_s))
        except queue.Empty:
            raise TimeoutError(f"no message within {self._timeout_s:g} s") from None
