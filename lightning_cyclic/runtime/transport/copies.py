"""Copies between the buffers of a GPU and the host's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.runtime.transport.streams import Event, stream_on


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
    """Copy inside the host's memory, at once."""

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

    Args:
        device: the GPU.
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
