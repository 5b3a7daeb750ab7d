"""A transport that counts what passes through it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import final

from torch import Tensor
from typing_extensions import override

from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.plan.passes.messages import Ring
from lightning_cyclic.plan.program import Program
from lightning_cyclic.runtime.transport.base import (
    AbstractPending,
    AbstractTransport,
    Part,
)


@final
class Counts:
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
        """Return how many were sent, each part as one, those by control too."""
        return self.counts.messages

    @property
    def num_bytes(self) -> Counter[Payload]:
        """Return how many bytes were sent, those by control too."""
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
