r"""Streams: how the messages of a GPU run beside its compute, and who keeps their time limits.

    compute   ... F ----x---------------- F ...      x  event: what is to be sent is there
                         \               /
    channel              send ... o     /            o  event: the message has run
    channel   recv .............. o ---'

The host only enqueues, where one thread does. Where several do, they share the compute stream,
and would wait there for messages that depend on what another is about to enqueue behind: there
the host waits, as in the proof, and the stream never.

NCCL's own waits never end in an error, and torch's watchdog ends the process, so a thread polls
the events of those that are waited for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cyclic.plan.passes.messages import Channel
from lightning_cyclic.runtime.transport.base import AbstractPending
from lightning_cyclic.runtime.transport.line import Gone, Says

Event = Any  # torch.cuda.Event: torch gives its methods no types

_POLL_S = 0.5
_LOOK_S = 2e-5  # between looks of a host that waits
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class _Watched(NamedTuple):
    until: float  # of time.monotonic()
    event: Event
    says: Says


@final
class ChannelStreams:
    """Run the messages of each channel on a stream of its own.

    Not on fewer: on a stream that channels share a message waits for those of other channels,
    which may come from workers that wait for this one; only the order inside a channel is
    proved.

    Args:
        channels: of this worker.
        device: of all buffers.
        timeout_s: how long a message may take from the wait for it on, in seconds.
        failure: the word that a failing worker has left, or None.
        hang_up: aborts all messages of this worker, so that what waits for them runs on.
        blocks: whether a wait blocks the host, and not the current stream.
    """

    def __init__(
        self,
        channels: Iterable[Channel],
        device: torch.device,
        timeout_s: float,
        failure: Callable[[], str | None],
        hang_up: Callable[[], None],
        *,
        blocks: bool = False,
    ) -> None:
        # with the device: threads begin on device 0, whatever that of the one that made them
        self._streams = {channel: stream_on(device) for channel in channels}
        self._device = device
        self._timeout_s = timeout_s
        self._failure = failure
        self._hang_up = hang_up
        self._blocks = blocks
        self._error: OSError | None = None
        self._watched: list[_Watched] = []
        self._watching = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="cyclic-limits", daemon=True).start()

    def begin(
        self, channel: Channel, start: Callable[[], dist.Work], data: Tensor, says: Says
    ) -> AbstractPending:
        """Enqueue a message behind what the current stream and its channel have to do.

        Args:
            channel: on which it travels.
            start: begins it on the current stream.
            data: its buffer.
            says: who waits for whom.
        """
        if self._error is not None:
            return Gone(self._error)
        stream = self._streams[channel]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream):
                start().wait()  # the stream waits, and not the host
        except RuntimeError as error:
            return Gone(ConnectionError(f"{says()}: {error}"))
        data.record_stream(stream)  # or its memory may be another's while the message runs
        return _Streamed(self, stream.record_event(), says)

    def wait(self, event: Event, says: Says) -> None:
        """Make the current stream wait, or the host; and watch the time.

        Raises:
            TimeoutError: some message has not run in time.
            ConnectionError: another worker has failed.
        """
        self.check()
        if not self._blocks:
            torch.cuda.current_stream(self._device).wait_event(event)
        if not event.query():
            with self._watching:
                self._watched.append(_Watched(time.monotonic() + self._timeout_s, event, says))
        while self._blocks and not event.query():
            time.sleep(_LOOK_S)
            self.check()

    @property
    def has_failed(self) -> bool:
        """Say whether no message of this worker runs any more."""
        return self._error is not None

    def check(self) -> None:
        """Raise what has ended the messages of this worker, if anything has."""
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Block the host until the current stream has run all that it waits for."""
        torch.cuda.current_stream(self._device).synchronize()
        self.check()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        while self._error is None and not self._closed.wait(_POLL_S):
            with self._watching:
                self._watched = [w for w in self._watched if not w.event.query()]
                watched = list(self._watched)
            self._judge(watched)

    def _judge(self, watched: list[_Watched]) -> None:
        reason = self._failure() if watched else None
        late = next((w for w in watched if w.until < time.monotonic()), None)
        if reason is not None:
            self._error = ConnectionError(f"{watched[0].says()}: {reason}")
        elif late is not None:
            self._error = TimeoutError(f"{late.says()}: it has not run")
        if self._error is not None:  # known before the abort lets the host run on
            self._hang_up()


@final
class _Streamed(AbstractPending):
    def __init__(self, streams: ChannelStreams, event: Event, says: Says) -> None:
        self._streams = streams
        self._event = event
        self._says = says

    def wait(self) -> None:
        self._streams.wait(self._event, self._says)

    def is_done(self) -> bool:
        return self._streams.has_failed or bool(self._event.query())


def stream_on(device: torch.device) -> Any:
    """Return a new stream of a GPU."""
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
