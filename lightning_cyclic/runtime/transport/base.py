"""The transport interface: point-to-point messages of flat buffers between workers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from lightning_cyclic.plan.actions import Payload


class AbstractPending(ABC):
    """Stand for a message under way."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the buffer may be read (receive) or written (send).

        Raises:
            TimeoutError: the transport's time limit passed.
            ConnectionError: the peer has left.
        """


class AbstractTransport(ABC):
    """Send and receive flat buffers, each kind of payload on a channel of its own.

    Messages of one payload, stage and pair of workers arrive in the order in which they were
    sent. Neither call blocks; a receive should be posted before its message is sent.

    Args:
        worker: this worker.
        num_workers: how many there are.
        timeout_s: limit of every wait, in seconds.
    """

    def __init__(self, worker: int, num_workers: int, timeout_s: float) -> None:
        self.worker = worker
        self.num_workers = num_workers
        self.timeout_s = timeout_s

    @abstractmethod
    def isend(self, payload: Payload, channel: int, peer: int, data: Tensor) -> AbstractPending:
        """Begin to send ``data`` (uint8, 1-d); it must not change before the wait returns."""

    @abstractmethod
    def irecv(self, payload: Payload, channel: int, peer: int, data: Tensor) -> AbstractPending:
        """Begin to receive into ``data`` (uint8, 1-d); its content is valid after the wait."""

    @abstractmethod
    def report_failure(self, text: str) -> None:
        """Leave word, for the other workers, of why this one fails."""

    @abstractmethod
    def failure(self) -> str | None:
        """Return the word that a failing worker left, or None."""

    @abstractmethod
    def close(self) -> None:
        """Stop what the transport runs in the background; pending messages are dropped."""
