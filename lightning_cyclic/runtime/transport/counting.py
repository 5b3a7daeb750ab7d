"""A transport that counts what passes through it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import final

from torch import Tensor
from typing_extensions import override

from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.runtime.transport.base import AbstractPending, AbstractTransport


@final
class CountingTransport(AbstractTransport):
    """Count messages and bytes sent, by payload, and pass everything on.

    Args:
        inner: the transport that does the work.
    """

    def __init__(self, inner: AbstractTransport) -> None:
        super().__init__(inner.worker, inner.num_workers, inner.timeout_s)
        self._inner = inner
        self._lock = threading.Lock()  # lanes send from threads of their own
        self.messages: Counter[Payload] = Counter()
        self.num_bytes: Counter[Payload] = Counter()

    @override
    def isend(self, payload: Payload, channel: int, peer: int, data: Tensor) -> AbstractPending:
        with self._lock:
            self.messages[payload] += 1
            self.num_bytes[payload] += data.numel()
        return self._inner.isend(payload, channel, peer, data)

    @override
    def irecv(self, payload: Payload, channel: int, peer: int, data: Tensor) -> AbstractPending:
        return self._inner.irecv(payload, channel, peer, data)

    @override
    def report_failure(self, text: str) -> None:
        self._inner.report_failure(text)

    @override
    def failure(self) -> str | None:
        return self._inner.failure()

    @override
    def close(self) -> None:
        self._inner.close()
