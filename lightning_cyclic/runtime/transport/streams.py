r"""Streams: how the messages of a GPU run beside its compute, and who keeps their time limits.

    host      launches all of this, and goes on
    compute   F(0) ---x------------- . ---- F(1) ...    x  what is to be sent is there
                       \            /                   .  the stream waits, and not the host
    channel             send ...   /                    o  the message has run
    channel   recv .............. o

torch has a stream for each channel, as the process group of each is its own; lanes beside compute
have one, too. A stream does what its part of the program says, in the order that has been proved;
what it needs of another stream it waits for itself, so that the host is ahead of all of them.

NCCL's own waits never end in an error, and torch's watchdog ends the process, so a thread looks
whether what streams wait for comes in time.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.runtime.moments import AbstractMoment, AbstractStreams, streams_of
from lightning_cyclic.runtime.transport.base import AbstractPending, Gone, Named, is_of_loader
from lightning_cyclic.runtime.transport.crew import AbstractCrew

Event = Any  # torch.cuda.Event: torch gives its methods no types

_POLL_S = 0.5  # between looks for the word of another worker that has failed
_LOOK_S = 2e-5  # between looks for a message, by a host that waits for it
_WATCH_S = 0.02  # between looks at what streams wait for
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@final
class MessageStreams:
    """Let the streams of a device wait for messages, and the host where it reads them.

    Args:
        crew: has the limit of a wait, and the words of a rank that has failed.
        hang_up: aborts all messages of this worker.
    """

    def __init__(
        self, streams: AbstractStreams, crew: AbstractCrew, hang_up: Callable[[], None]
    ) -> None:
        self._streams = streams
        self._aside = streams.new()
        self._crew = crew
        self._hang_up = hang_up
        self.error: Exception | None = None
        """With what all messages have ended, if they have."""
        self._watch = _Watch(crew.timeout_s, self._end)

    def begin(self, start: Callable[[], dist.Work], data: Tensor) -> AbstractPending:
        """Enqueue a message behind what the current stream and its channel have to do.

        Args:
            start: has torch do so.
            data: what is sent, or written.
        """
        if self.error is not None:
            return Gone(self.error)
        try:
            return _Streamed(self, start(), data)
        except RuntimeError as error:
            if is_of_loader(error):
                raise
            return Gone(ConnectionError(str(error)))

    def aside(self) -> AbstractContextManager[Any]:
        """Return a context in which the current stream is one that has nothing to do."""
        return self._streams.on(self._aside)

    def wait(self, work: dist.Work, *, is_watched: bool) -> None:
        """Block the host until a message has run.

        Args:
            is_watched: whether a stream waits for it, too, whose limit counts from there on: the
                host may be here long before the device.

        Raises:
            TimeoutError: some message has not run in time.
            ConnectionError: another worker has failed.
        """
        self.check()
        now = time.monotonic()
        until = math.inf if is_watched else now + self._crew.timeout_s
        look_at = now + _POLL_S
        while not work.is_completed():
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

    def join(self, work: dist.Work, data: Tensor, named: Named) -> None:
        """Let the current stream wait for a message, and have its time kept.

        Raises:
            TimeoutError: as :meth:`wait`, as ConnectionError is.
        """
        self.check()
        self._watch.put(_Wait(self._streams.now(), work, named))
        work.wait()  # the stream does
        self._streams.keep(data)

    def settle(self) -> None:
        """Block the host until all has come that streams wait for; each wait has its limit."""
        while not self._watch.is_idle():
            self.check()
            time.sleep(_LOOK_S)
        self.check()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def fail(self, error: Exception) -> bool:
        """Let all messages end with an error, if no other has ended them; say whether."""
        first = self.error is None
        self.error = self.error or error
        return first

    def close(self) -> None:
        self._watch.close()

    def _end(self, error: Exception) -> None:
        if self.fail(error):  # before the abort, which ends other waits
            self._hang_up()


@final
class _Streamed(AbstractPending):
    def __init__(self, streams: MessageStreams, work: dist.Work, data: Tensor) -> None:
        self._streams = streams
        self._work = work
        self._data = data
        self._is_watched = False

    @override
    def wait(self) -> None:
        self._streams.wait(self._work, is_watched=self._is_watched)

    @override
    def join(self, named: Named) -> None:
        self._streams.join(self._work, self._data, named)
        self._is_watched = True

    @override
    def is_done(self) -> bool:
        return self._streams.error is not None or self._work.is_completed()


@final
@dataclass(slots=True)
class _Wait:
    """Be a message for which a stream waits.

    Args:
        begins: when the stream has come to it.
        since_s: the same, on the host's clock; 0 before it was seen.
    """

    begins: AbstractMoment
    work: dist.Work
    named: Named
    since_s: float = 0.0


@final
class _Watch:
    """Look in a thread whether what streams wait for comes within a limit, each from its turn on.

    Args:
        end: is given the named error of the first that does not.
    """

    def __init__(self, limit_s: float, end: Callable[[Exception], None]) -> None:
        self._limit_s = limit_s
        self._end = end
        self._changing = threading.Lock()
        self._waits: list[_Wait] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, wait: _Wait) -> None:
        with self._changing:
            self._waits.append(wait)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="cyclic-limits", daemon=True
                )
                self._thread.start()

    def is_idle(self) -> bool:
        """Say whether all has come."""
        with self._changing:
            return all(wait.work.is_completed() for wait in self._waits)

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_WATCH_S):
            late = self._look(time.monotonic())
            if late is not None:
                error: Exception = TimeoutError("it has not run")
                try:
                    error = late.named(TimeoutError("it has not run"))
                finally:  # also where it cannot be named: hosts wait for this thread's word
                    self._end(error)
                return

    def _look(self, now_s: float) -> _Wait | None:
        """Forget what has come; return a wait that has lasted too long."""
        with self._changing:
            waits = self._waits = [wait for wait in self._waits if not wait.work.is_completed()]
        for wait in waits:
            if not wait.since_s and wait.begins.is_over():
                wait.since_s = now_s
        # the first: what is behind it on its stream has not begun
        return next((w for w in waits if w.since_s and now_s - w.since_s > self._limit_s), None)


def ask_for_queues() -> None:
    """Let a GPU have as many queues as it can, before it is first used; a user's number stays.

    Streams that share a queue wait for each other: one that waits for a message would hold up
    another, behind which others send that message. By default there are eight.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables", CUDA_DEVICE_MAX_CONNECTIONS
    """
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if torch.cuda.is_available() and not is_used:
        os.environ.setdefault(_QUEUES, "32")


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
        streams = streams_of(device)
        self._out, self._in = streams.new(), streams.new()

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
