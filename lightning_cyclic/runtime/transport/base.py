"""The transport interface: point-to-point messages of flat buffers between workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_cyclic.plan.passes.messages import Ring
from lightning_cyclic.runtime.transport.crew import AbstractCrew

if TYPE_CHECKING:
    from lightning_cyclic.plan.program import Program
import threading
from collections import Counter
from typing import final

from typing_extensions import override

from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.plan.program import Program


class Part(IntEnum):
    """Say which part of a message bytes are, where it needs more than one."""

    CONTENT = 0
    HEAD = 1  # what comes, where content cannot say so itself
    DESCRIPTION = 2  # the form of what follows, as text
    DESCRIBED = 3  # the content in its new form


class AbstractPending(ABC):
    """Stand for bytes under way."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the buffer may be read (receive) or written (send).

        What comes behind it on any stream of the device sees the content.

        Raises:
            TimeoutError: the transport's time limit passed.
            ConnectionError: the peer has left.
        """

    @abstractmethod
    def is_done(self) -> bool:
        """Say whether a wait would return at once; errors count as done."""


class AbstractTransport(ABC):
    """Send and receive flat buffers on the channels of a program.

    Transports with names match a receive with the send of the same ring and part; those without
    match the receives of a channel with its sends, in the order in which either were posted, so
    that only ``Part.CONTENT`` may travel on them: all other parts go by :attr:`control`.
    No call blocks.
    """

    def __init__(self, worker: int, num_workers: int, crew: AbstractCrew) -> None:
        self.worker = worker
        self.num_workers = num_workers
        self.crew = crew

    @property
    def control(self) -> AbstractTransport | None:
        """Return the transport of words between hosts, where this one has no names."""
        return None

    def connect(self, program: Program) -> AbstractTransport:
        """Return what carries the messages of a program, which is known later than its workers.

        All workers call it at the same time. Who connects closes what is returned, and then
        this transport.
        """
        return self

    @abstractmethod
    def isend(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        """Begin to send ``data`` (uint8, 1-d); it must not change before the wait returns."""

    @abstractmethod
    def irecv(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        """Begin to receive into ``data`` (uint8, 1-d); its content is valid after the wait."""

    def hang_up(self) -> None:  # noqa: B027  # some have no connections
        """Close all connections of this worker, so that nobody waits for it any longer."""

    def close(self) -> None:  # noqa: B027  # few run anything
        """Stop what the transport runs in the background; pending messages are dropped."""

    def disconnect(self) -> None:  # noqa: B027  # some have no connections
        """Give connections up, behind :meth:`close`, when no worker needs them any longer.

        All workers call it; what they agree on beside messages still travels.
        """


@final
class Counts:
    """Count messages and bytes sent, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # lanes send from threads of their own
        self.messages: Counter[Payload] = Counter()
        self.num_bytes: Counter[Payload] = Counter()

    def add(self, payload: Payload, num_bytes: int) -> None:
        with self._lock:
            self.messages[payload] += 1
            self.num_bytes[payload] += num_bytes


@final
class CountingTransport(AbstractTransport):
    """Count messages and bytes sent, by payload, and pass everything on.

    Args:
        counts: where to count. [counts of its own]
        route: how messages travel, for those who ask.
    """

    def __init__(
        self, inner: AbstractTransport, counts: Counts | None = None, route: str = ""
    ) -> None:
        super().__init__(inner.worker, inner.num_workers, inner.crew)
        self.route = route
        self._inner = inner
        self.counts = counts or Counts()
        control = inner.control
        self._control = None if control is None else CountingTransport(control, self.counts)

    @override
    def connect(self, program: Program) -> AbstractTransport:
        return CountingTransport(self._inner.connect(program), self.counts)

    @property
    def messages(self) -> Counter[Payload]:
        return self.counts.messages

    @property
    def num_bytes(self) -> Counter[Payload]:
        return self.counts.num_bytes

    @property
    @override
    def control(self) -> AbstractTransport | None:
        return self._control

    @override
    def isend(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        self.counts.add(ring.payload, data.numel())
        return self._inner.isend(ring, data, part)

    @override
    def irecv(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        return self._inner.irecv(ring, data, part)

    @override
    def hang_up(self) -> None:
        self._inner.hang_up()

    @override
    def close(self) -> None:
        self._inner.close()

    @override
    def disconnect(self) -> None:
        self._inner.disconnect()
