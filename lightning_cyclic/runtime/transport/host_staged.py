"""The host-staged transport: several workers on one GPU, whose messages travel by the host.

NCCL refuses two ranks on one GPU, and gloo takes no tensor of a GPU. So what is sent is copied
to the host first, and what has come is copied back:

    isend   copy to the host (side stream) -> event -> thread: waits for it, inner.isend
    irecv   inner.irecv into the host's memory -> wait: copy back (side stream) -> event

Tensors of the host go the same way, with nothing to wait for, so that it runs without a GPU.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.plan.passes.messages import Ring
from lightning_cyclic.runtime.transport.base import AbstractPending, AbstractTransport, Part
from lightning_cyclic.runtime.transport.streams import Event, stream_on


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
    def hang_up(self) -> None:
        self._inner.hang_up()

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


class AbstractCopies(ABC):
    """Copy between buffers of one device and the host's memory."""

    @abstractmethod
    def to_host(self, data: Tensor) -> tuple[Tensor, Event | None]:
        """Begin to copy to the host.

        Returns:
            The copy, and what happens when it is complete; None where it is already.
        """

    @abstractmethod
    def room(self, data: Tensor) -> Tensor:
        """Return memory of the host for the content of a buffer."""

    @abstractmethod
    def now(self) -> Event | None:
        """Return what happens when the current stream has done what it has to do by now."""

    @abstractmethod
    def to_device(self, host: Tensor, data: Tensor, free: Event | None) -> None:
        """Copy back, and make the current stream wait for it.

        Args:
            host: what is copied.
            data: where to.
            free: when ``data`` may be written.
        """


@final
class HostCopies(AbstractCopies):
    @override
    def to_host(self, data: Tensor) -> tuple[Tensor, None]:
        return data.clone(), None

    @override
    def room(self, data: Tensor) -> Tensor:
        return torch.empty_like(data)

    @override
    def now(self) -> None:
        return None

    @override
    def to_device(self, host: Tensor, data: Tensor, free: Event | None) -> None:
        data.copy_(host)


@final
class StreamCopies(AbstractCopies):
    """Copy between a GPU and pinned memory, on a stream for each direction.

    torch keeps pinned memory until the copies from and to it have run, and reuses it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = stream_on(device)
        self._in = stream_on(device)

    @override
    def to_host(self, data: Tensor) -> tuple[Tensor, Event]:
        host = self.room(data)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(data, non_blocking=True)
        data.record_stream(self._out)
        return host, self._out.record_event()

    @override
    def room(self, data: Tensor) -> Tensor:
        with torch.cuda.device(self._device):  # threads begin on device 0, and would wake it
            return torch.empty(data.shape, dtype=data.dtype, pin_memory=True)

    @override
    def now(self) -> Event:
        return torch.cuda.current_stream(self._device).record_event()

    @override
    def to_device(self, host: Tensor, data: Tensor, free: Event | None) -> None:
        if free is not None:
            self._in.wait_event(free)
        with torch.cuda.stream(self._in):
            data.copy_(host, non_blocking=True)
        data.record_stream(self._in)
        torch.cuda.current_stream(self._device).wait_event(self._in.record_event())
