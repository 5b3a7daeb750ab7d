"""A line: one process group of torch.distributed that messages are posted on."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cyclic.runtime.transport.base import AbstractPending
from lightning_cyclic.runtime.transport.crew import is_late

Way = Literal["send", "recv"]

_UNUSED_TAG = (1 << 31) - 1  # of no message


@final
class Line:
    def __init__(self, group: Any) -> None:
        self.group = group
        self._posting = threading.Lock()  # gloo does not promise that two threads may post at once

    def post(self, way: Way, data: Tensor, rank: int, tag: int) -> AbstractPending:
        """Begin to send or receive; whoever waits is told if the peer has gone already."""
        try:
            return Work(self.start(way, data, rank, tag))
        except RuntimeError as error:
            if is_of_loader(error):
                raise
            return Gone(ConnectionError(str(error)))

    def start(self, way: Way, data: Tensor, rank: int, tag: int) -> dist.Work:
        with self._posting:
            work: dist.Work = getattr(self.group, way)([data], rank, tag)
            return work

    def disconnect(self) -> None:
        """End the group, of which no member needs anything any longer; all members call it.

        An idle group of gloo has threads that wake a hundred times a second, as long as anybody
        holds it: no message may be posted behind this.
        """
        dist.destroy_process_group(self.group)
        self.group = None

    def hang_up(self) -> None:
        """Close all connections of this worker, so that nobody waits for it any longer.

        gloo cannot abort a wait, but one that times out closes every connection of its group;
        the default group stays as it is.
        """
        peer = (self.group.rank() + 1) % self.group.size()
        with contextlib.suppress(RuntimeError):  # which all may be closed
            if dist.get_backend(self.group) != "gloo":
                self.group.abort()
                return
            nothing = torch.zeros(1, dtype=torch.uint8)
            self.start("recv", nothing, peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


@final
class Work(AbstractPending):
    """Wait for what torch.distributed has begun, as long as its group says."""

    def __init__(self, work: dist.Work) -> None:
        self._work: dist.Work | None = work
        self._error: OSError | None = None
        self._waiting = threading.Lock()  # a lane and the main thread may need the same buffer

    def wait(self) -> None:
        """Block the host; a second wait ends as the first did, which gloo's own would not."""
        with self._waiting:
            if self._work is not None:
                try:
                    self._work.wait()
                except RuntimeError as error:
                    if is_of_loader(error):
                        raise
                    kind = TimeoutError if is_late(str(error)) else ConnectionError
                    self._error = kind(str(error))
                self._work = None
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        """Say whether a wait has ended: gloo does not know sooner."""
        work = self._work
        return work is None or work.is_completed()


@final
class Gone(AbstractPending):
    """Stand for a message that cannot begin."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def is_done(self) -> bool:
        return True


def is_of_loader(error: RuntimeError) -> bool:
    """Say whether a worker of a loader has died: no peer is to blame.

    torch says so by its handler of a signal, in whatever the main thread is doing, waits included.
    """
    return str(error).startswith("DataLoader worker")
