"""Transports: point-to-point messages of flat buffers; the lines that carry them; counts."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from typing_extensions import override

from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.plan.passes.messages import Ring
from lightning_cyclic.plan.program import Program
from lightning_cyclic.runtime.transport.crew import AbstractCrew, is_late

if TYPE_CHECKING:
    from lightning_cyclic.plan.program import Program


class Part(IntEnum):
    """Say which part of a message bytes are, where it needs more than one."""

    CONTENT = 0
    HEAD = 1  # what comes, where content cannot say so itself
    DESCRIPTION = 2  # the form of what follows, as text
    DESCRIBED = 3  # the content in its new form


Named: TypeAlias = Callable[[OSError], Exception]
"""What a message is called that did not come in time, or whose peer has left."""


class AbstractPending(ABC):
    """Stand for bytes under way."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until the buffer may be read (receive) or written (send).

        Raises:
            TimeoutError: the transport's time limit passed.
            ConnectionError: the peer has left.
        """

    def join(self, named: Named) -> None:
        """Let what the current stream of the device is given from now on wait for the bytes.

        The host goes on where it can; else it waits.

        Args:
            named: makes the error of a message that does not come, which is met later then: by
                whoever uses the transport next.

        Raises:
            TimeoutError: as :meth:`wait`, as ConnectionError is.
        """
        self.wait()

    @abstractmethod
    def is_done(self) -> bool:
        """Say whether a wait would return at once; errors count as done."""


class AbstractTransport(ABC):
    """Send and receive flat buffers on the channels of a program.

    Transports with names match a receive with the send of the same ring and part; those without
    match the receives of a channel with its sends, in the order in which either were posted, so
    that only ``Part.CONTENT`` may travel on them: all other parts go by :attr:`control`.
    No call blocks. Where the host runs ahead of a device, a message is behind all that the current
    stream has been given when it is begun.

    Args:
        crew: the ranks of all workers, and the limit of every wait.
    """

    def __init__(self, worker: int, num_workers: int, crew: AbstractCrew) -> None:
        self.worker = worker
        self.num_workers = num_workers
        self.crew = crew

    @property
    def control(self) -> AbstractTransport | None:
        """Return the transport of words between hosts, where this one has no names."""
        return None

    def connect(self, program: Program) -> AbstractTransport:
        """Return what carries the messages of a program, which is known later than its workers.

        All workers call it at the same time. Who connects closes what is returned, and then
        this transport.
        """
        return self

    @abstractmethod
    def isend(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        """Begin to send ``data`` (uint8, 1-d); it must not change before the wait returns."""

    @abstractmethod
    def irecv(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        """Begin to receive into ``data`` (uint8, 1-d); its content is valid after the wait."""

    def aside(self) -> AbstractContextManager[Any]:
        """Return a context for receives that are posted late, into memory that is made in it.

        They are not behind what the device has been given since their turn in the program, which
        may wait for messages that others send only behind these.
        """
        return nullcontext()

    @property
    def error(self) -> Exception | None:
        """Return with what the messages that streams of the device wait for have ended, if so."""
        return None

    def settle(self) -> None:  # noqa: B027  # where hosts wait themselves all has come
        """Wait on the host until all has come that streams of the device wait for.

        Raises:
            CyclicError: something did not.
        """

    def close(self) -> None:  # noqa: B027  # few run anything
        """Stop what the transport runs in the background; pending messages are dropped."""

    def disconnect(self) -> None:  # noqa: B027  # some have no connections
        """Give connections up, behind :meth:`close`, when no worker needs them any longer.

        All workers call it; what they agree on beside messages still travels.
        """


Way = Literal["send", "recv"]

_UNUSED_TAG = (1 << 31) - 1  # of no message


@final
class Line:
    """Have a process group, and post messages on it, one thread at a time.

    Every rank of the default process group must make it at the same time.

    Args:
        limit_s: of every wait for another rank, in seconds.
        backend: None for that of the default process group.
        ranks: the members. [all ranks]
        by_members: whether these alone make it.
    """

    def __init__(
        self,
        limit_s: float,
        backend: str | None = "gloo",
        ranks: Sequence[int] | None = None,
        *,
        by_members: bool = False,
    ) -> None:
        members, limit = None if ranks is None else list(ranks), timedelta(seconds=limit_s)
        self.group: Any = dist.new_group(
            members, limit, backend, use_local_synchronization=by_members
        )
        self._posting = threading.Lock()  # gloo does not promise that two threads may post at once

    def post(self, way: Way, data: Tensor, rank: int, tag: int) -> AbstractPending:
        """Begin to send or receive; whoever waits is told if the peer has gone already.

        Args:
            way: whether ``data`` leaves or comes.
            data: uint8, 1-d.
            rank: of the peer, in the group.
            tag: which messages match each other.
        """
        try:
            return Work(self.start(way, data, rank, tag))
        except RuntimeError as error:
            if is_of_loader(error):
                raise
            return Gone(ConnectionError(str(error)))

    def start(self, way: Way, data: Tensor, rank: int, tag: int) -> dist.Work:
        """Begin to send or receive.

        A profiler that is on must not see it: torch notes the end of a message in the profiler's
        memory, whenever it comes, and a message that is posted early may end when that is gone.

        Raises:
            RuntimeError: the peer has gone.
        """
        is_profiled = profiler._is_profiler_enabled
        with self._posting:
            if is_profiled:
                torch._C._autograd._enable_record_function(False)  # of this thread
            try:
                work: dist.Work = getattr(self.group, way)([data], rank, tag)
            finally:
                if is_profiled:
                    torch._C._autograd._enable_record_function(True)
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
        if self.group is None:
            return
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

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        """Raise the error."""
        raise self._error

    def is_done(self) -> bool:
        return True


def is_of_loader(error: RuntimeError) -> bool:
    """Say whether a worker of a loader has died: no peer is to blame.

    torch says so by its handler of a signal, in whatever the main thread is doing, waits included.
    """
    return str(error).startswith("DataLoader worker")


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
    def aside(self) -> AbstractContextManager[Any]:
        return self._inner.aside()

    @property
    @override
    def error(self) -> Exception | None:
        return self._inner.error

    @override
    def settle(self) -> None:
        self._inner.settle()

    @override
    def close(self) -> None:
        self._inner.close()

    @override
    def disconnect(self) -> None:
        self._inner.disconnect()
