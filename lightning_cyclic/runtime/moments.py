"""Moments: in which order a device works that its host runs ahead of.

    stream         does what it is given in its order, beside the host and other streams
    now()          the moment at which the current stream will have done all that it has by now
    moment.join()  what the current stream is given from now on comes behind that moment

Nobody but whoever reads a value on the host waits there. On a CPU all of this is over at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

Stream = Any  # torch.cuda.Stream: torch gives its methods no types


class AbstractMoment(ABC):
    """Be what a stream has done at some time."""

    @abstractmethod
    def join(self) -> None:
        """Let what the current stream is given from now on come behind this."""

    @abstractmethod
    def wait(self) -> None:
        """Let the host wait until it has come."""

    @abstractmethod
    def is_here(self) -> bool:
        """Say whether it is one of the current stream, which has its order already."""

    @abstractmethod
    def is_over(self) -> bool:
        """Say whether it has come; the host asks, and does not wait."""


class AbstractStreams(ABC):
    """Be the streams of a device."""

    @abstractmethod
    def new(self) -> Stream:
        """Make a stream."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context in which a stream is the current one of this thread."""

    @abstractmethod
    def now(self) -> AbstractMoment:
        """Return the moment that follows what the current stream has by now."""

    @abstractmethod
    def keep(self, x: Tensor) -> None:
        """Keep the memory of a tensor, should it go, until the current stream is done with it.

        Memory belongs to the stream on which it was made, and is used again in its order.
        """


def streams_of(device: torch.device) -> AbstractStreams:
    return _gpu(device) if device.type == "cuda" else HOST


def keep(tensors: Iterable[Tensor | None]) -> None:
    """Keep the memory of tensors for the current stream; see :meth:`AbstractStreams.keep`."""
    for x in tensors:
        if x is not None and x.layout is torch.strided:  # others do not travel
            streams_of(x.device).keep(x)


@final
class _Past(AbstractMoment):
    """Be over."""

    @override
    def join(self) -> None:
        pass

    @override
    def wait(self) -> None:
        pass

    @override
    def is_here(self) -> bool:
        return True

    @override
    def is_over(self) -> bool:
        return True


PAST = _Past()


@final
class _Host(AbstractStreams):
    """Have none: the host does all by itself, before it goes on."""

    @override
    def new(self) -> None:
        return None

    @override
    def on(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def now(self) -> AbstractMoment:
        return PAST

    @override
    def keep(self, x: Tensor) -> None:
        pass


HOST = _Host()


@final
class _Moment(AbstractMoment):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._event = stream.record_event()

    @override
    def join(self) -> None:
        if not self.is_here():
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    @override
    def wait(self) -> None:
        self._event.synchronize()

    @override
    def is_here(self) -> bool:
        here: bool = torch.cuda.current_stream(self._stream.device) == self._stream
        return here

    @override
    def is_over(self) -> bool:
        return bool(self._event.query())


@final
class _Gpu(AbstractStreams):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    @override
    def new(self) -> Stream:
        # with the device: threads begin on device 0, whatever that of the one that made them
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @override
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    @override
    def now(self) -> AbstractMoment:
        return _Moment(torch.cuda.current_stream(self._device))

    @override
    def keep(self, x: Tensor) -> None:
        x.record_stream(torch.cuda.current_stream(self._device))


_gpu = cache(_Gpu)
