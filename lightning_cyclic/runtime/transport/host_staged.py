"""The host-staged transport: several workers on one GPU, whose messages travel by the host.

NCCL mostly refuses two ranks on one GPU, and gloo takes no tensor of a GPU. So what is sent is
copied to the host first, and what has come is copied back:

    isend   copy to the host (side stream) -> event -> thread: waits for it, inner.isend
    irecv   inner.irecv into the host's memory -> wait: copy back (side stream) -> event

Tensors of the host go the same way, with nothing to wait for, so that it runs without a GPU.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.plan.passes.messages import Ring
from lightning_cyclic.runtime.transport.base import (
    AbstractPending,
    AbstractTransport,
    Part,
)
from lightning_cyclic.runtime.transport.streams import (
    AbstractCopies,
    Event,
    HostCopies,
    StreamCopies,
)


@final
class HostStagedTransport(AbstractTransport):
    """Copy tensors of a GPU to and from the host, and let another transport carry them.

    A wait blocks the host until the message has travelled; the copy back is left to the
    current stream to wait for.
    """

    def __init__(self, inner: AbstractTransport) -> None:
        super().__init__(inner.worker, inner.num_workers, inner.crew)
        self._inner = inner
        self._copies: dict[torch.device, AbstractCopies] = {}
        self._copying = threading.Lock()
        # one thread: messages of a channel are passed on in the order in which they were sent
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="cyclic-staging")

    @override
    def isend(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        with self._copying:  # the order of the copies is that of the messages, in all threads
            host, copied = self._copies_of(data.device).to_host(data)
            begun = self._sender.submit(self._send, ring, host, part, copied)
        return _Sent(begun, self.crew.timeout_s)

    @override
    def irecv(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        with self._copying:
            copies = self._copies_of(data.device)
        host = copies.room(data)
        return _Received(self._inner.irecv(ring, host, part), copies, host, data)

    @override
    def close(self) -> None:
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._inner.close()

    @override
    def disconnect(self) -> None:
        self._inner.disconnect()

    def _copies_of(self, device: torch.device) -> AbstractCopies:
        if device not in self._copies:
            on_gpu = device.type == "cuda"
            self._copies[device] = StreamCopies(device) if on_gpu else HostCopies()
        return self._copies[device]

    def _send(self, ring: Ring, host: Tensor, part: Part, copied: Event | None) -> AbstractPending:
        if copied is not None:
            copied.synchronize()
        return self._inner.isend(ring, host, part)


@final
class _Sent(AbstractPending):
    def __init__(self, begun: Future[AbstractPending], timeout_s: float) -> None:
        self._begun = begun
        self._timeout_s = timeout_s

    def wait(self) -> None:
        try:
            sent = self._begun.result(self._timeout_s)
        except CancelledError:
            raise ConnectionError("the transport is closed") from None
        sent.wait()

    def is_done(self) -> bool:
        if not self._begun.done():
            return False
        failed = self._begun.cancelled() or self._begun.exception() is not None
        return failed or self._begun.result().is_done()


@final
class _Received(AbstractPending):
    def __init__(
        self, pending: AbstractPending, copies: AbstractCopies, host: Tensor, data: Tensor
    ) -> None:
        self._pending = pending
        self._copies = copies
        self._host: Tensor | None = host
        self._data = data
        self._free = copies.now()

    def wait(self) -> None:
        self._pending.wait()
        if self._host is not None:  # or a second wait would undo what was written since
            self._copies.to_device(self._host, self._data, self._free)
            self._host = None

    def is_done(self) -> bool:
        return self._pending.is_done()
