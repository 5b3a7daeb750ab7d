r"""Streams: how the messages of a GPU run beside its compute, and who keeps their time limits.

    compute   ... F ----x------------ . . F ...      x  event: what is to be sent is there
                         \                /
    channel              send ... o     /            o  event: the message has run
    channel   recv .............. o ---'             .  the host waits for it

Compute never waits for a message on its stream: threads share that stream (lanes, and those that
receive when they know how much), and what one of them posts would wait behind a message that
depends on it. The host waits, thread by thread, as in the proof and in its tests. NCCL's own
waits never end in an error, and torch's watchdog ends the process, so hosts keep their limits.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.plan.passes.messages import Channel
from lightning_cyclic.runtime.transport.base import AbstractPending, Gone, is_of_loader
from lightning_cyclic.runtime.transport.crew import AbstractCrew

Event = Any  # torch.cuda.Event: torch gives its methods no types

_POLL_S = 0.5  # between looks for the word of another worker that has failed
_LOOK_S = 2e-5  # between looks for the message
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@final
class ChannelStreams:
    """Run the messages of each channel on a stream of its own.

    Not on fewer: on a stream that channels share a message waits for those of other channels,
    which may come from workers that wait for this one; only the order inside a channel is
    proved.

    Args:
        crew: has the limit of a wait, and the words of a rank that has failed.
    """

    def __init__(
        self,
        channels: Iterable[Channel],
        device: torch.device,
        crew: AbstractCrew,
        hang_up: Callable[[], None],
    ) -> None:
        # with the device: threads begin on device 0, whatever that of the one that made them
        self._streams = {channel: stream_on(device) for channel in channels}
        self._device = device
        self._crew = crew
        self._hang_up = hang_up
        self._error: OSError | None = None

    def begin(
        self, channel: Channel, start: Callable[[], dist.Work], data: Tensor
    ) -> AbstractPending:
        """Enqueue a message behind what the current stream and its channel have to do."""
        if self._error is not None:
            return Gone(self._error)
        stream = self._streams[channel]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream):
                start().wait()  # the stream waits, and not the host
        except RuntimeError as error:
            if is_of_loader(error):
                raise
            return Gone(ConnectionError(str(error)))
        data.record_stream(stream)  # or its memory may be another's while the message runs
        return _Streamed(self, stream.record_event())

    def wait(self, event: Event) -> None:
        """Block the host until a message has run.

        Raises:
            TimeoutError: some message has not run in time.
            ConnectionError: another worker has failed.
        """
        self.check()
        now = time.monotonic()
        until, look_at = now + self._crew.timeout_s, now + _POLL_S
        while not event.query():
            now = time.monotonic()
            if now >= until:
                self._end(TimeoutError("it has not run"))
            elif now >= look_at:
                look_at = now + _POLL_S
                if (reason := self._crew.failure()) is not None:
                    self._end(ConnectionError(reason))
            self.check()
            time.sleep(_LOOK_S)
        self.check()  # what is aborted has run, too

    @property
    def has_failed(self) -> bool:
        """Say whether no message of this worker runs any more."""
        return self._error is not None

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def fail(self, error: OSError) -> bool:
        """Let all messages end with an error, if no other has ended them; say whether."""
        first = self._error is None
        self._error = self._error or error
        return first

    def _end(self, error: OSError) -> None:
        if self.fail(error):  # before the abort, which ends other waits
            self._hang_up()


@final
class _Streamed(AbstractPending):
    def __init__(self, streams: ChannelStreams, event: Event) -> None:
        self._streams = streams
        self._event = event

    def wait(self) -> None:
        self._streams.wait(self._event)

    def is_done(self) -> bool:
        return self._streams.has_failed or bool(self._event.query())


def stream_on(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def own_error_handling() -> Iterator[None]:
    """Make NCCL groups whose errors and aborts are left to us; torch's watchdog ends no process.

    Source: https://pytorch.org/docs/stable/torch_nccl_environment_variables.html
    """
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before


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
