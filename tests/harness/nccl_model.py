"""A model of how NCCL carries unbatched point-to-point messages on one group per channel.

* There are no names: the n-th send of a channel meets the n-th receive, whatever was meant.
* The operations of a channel run one after the other, each when both sides have reached it: a
  send is done only when its receive has run.
* The host goes on at once; but the first contact of two workers blocks it, so a channel that
  was not warmed up is an error.

It is stricter than NCCL where that shows faults: it carries along what each message is and
compares; buffers of receives hold NaNs (bytes 0xFF) until the message has run; what is sent is
compared with what it was when the send was posted; sends under way are counted against
``Program.depths``. And simpler: a wait blocks the host.

A control transport with names has all that is not ``Part.CONTENT``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.plan.passes.messages import Channel, Ring
from lightning_cyclic.runtime.transport.base import (
    AbstractPending,
    AbstractTransport,
    Line,
    Part,
    Way,
)
from lightning_cyclic.runtime.transport.crew import Crew
from lightning_cyclic.runtime.transport.named import NamedTransport
from tests.runtime.transport.rings import reason_of

_HEAD_BYTES = 32
_NOT_YET = 0xFF  # four of which are a NaN


class ModelError(AssertionError):
    """Say how a program or a runtime breaks a rule that NCCL sets."""


@dataclass(eq=False)
class Operation:
    """Hold one send or receive of one worker."""

    way: Way
    ring: Ring
    data: Tensor
    posted: Tensor | None  # a send's content when it was posted
    ran: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def __str__(self) -> str:
        source, target, *_ = self.ring.channel
        lane = f" on lane {self.ring.channel.lane}" if self.ring.channel.lane else ""
        name = f"{self.ring.payload} of stage {self.ring.j}{lane}"
        return f"{self.way} of {name}, worker {source} -> worker {target}"

    @property
    def head(self) -> str:
        """Say what the message is: its channel is known."""
        return f"{self.ring.payload}/{self.ring.j}/{self.data.numel()}"

    def end(self, error: Exception | None = None) -> None:
        """Let whoever waits go on."""
        self.error = self.error or error
        self.ran.set()


@dataclass
class Rules:
    """Hold what a model checks.

    Args:
        channels: that are warmed up, in one order for all workers.
        depths: how many sends of each ring may be under way; None for no limit.
    """

    channels: Iterable[Channel]
    depths: Mapping[Ring, int] | None = None


@final
class GlooModel(AbstractTransport):
    """Be a worker that is a process; every worker must build it at the same time.

    A thread for each channel of this worker runs its operations over gloo, whose sends wait for
    their receives: one is posted there when it is at the head of its queue.

    Args:
        timeout_s: limit of every wait, in seconds.
        rules: what is checked.
        rank_of: worker -> rank, and rank -> worker: its own inverse. [worker w is rank w]
    """

    def __init__(
        self, timeout_s: float, rules: Rules, rank_of: Callable[[int], int] = lambda w: w
    ) -> None:
        channels = tuple(rules.channels)
        control = NamedTransport({c.lane for c in channels}, Crew(timeout_s), rank_of)
        super().__init__(control.worker, control.num_workers, control.crew)
        self._warm = {c for c in channels if self.worker in (c.source, c.target)}
        self._depths, self._control, self._rank_of = rules.depths, control, rank_of
        self._posting = threading.Lock()
        self._under_way: list[Operation] = []
        self.mismatches: list[str] = []
        # an operation may be posted long before it can run: waits have limits of their own
        self._line = Line(86400.0)
        self.crew.hang_ups.append(self._line.hang_up)
        self._queues: dict[Channel, queue.SimpleQueue[Operation | None]] = {}
        for tag, channel in enumerate(channels):
            if channel in self._warm and not channel.is_control:
                self._queues[channel] = queue.SimpleQueue()
                args = (self._queues[channel], tag)
                threading.Thread(target=self._run_all, args=args, daemon=True).start()

    @property
    @override
    def control(self) -> AbstractTransport:
        return self._control

    @override
    def isend(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        if ring.channel.is_control:
            return self._control.isend(ring, data, part)
        return self._post(Operation("send", ring, data, data.clone()), part)

    @override
    def irecv(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        if ring.channel.is_control:
            return self._control.irecv(ring, data, part)
        return self._post(Operation("recv", ring, data, None), part)

    def pending(self) -> int:
        """Count the operations of this worker that have not run."""
        return len(self._not_run())

    def assert_idle(self, within_s: float = 1.0) -> None:
        """Check that all operations of this worker run.

        Args:
            within_s: how long the last ones may take: nobody waits for some sends, in seconds.

        Raises:
            ModelError: some have not run; names them.
        """
        until = time.monotonic() + within_s
        left = self._not_run()
        if not all(o.ran.wait(max(0.0, until - time.monotonic())) for o in left):
            names = [str(o) for o in self._not_run()]
            raise ModelError(f"worker {self.worker} leaves {len(names)} pending: {names}")

    def _post(self, operation: Operation, part: Part) -> AbstractPending:
        with self._posting:
            self._check(operation, part)
            self._under_way = [*self._not_run(), operation]
            if operation.way == "recv":
                operation.data.fill_(_NOT_YET)
            self._queues[operation.ring.channel].put(operation)
        return _Pending(operation, self)

    def _check(self, operation: Operation, part: Part) -> None:
        ring, sends = operation.ring, operation.way == "send"
        said = f"worker {self.worker}, {operation}"
        if part is not Part.CONTENT:
            raise ModelError(f"{said}: {part.name} has to go by control: no names here")
        if (ring.channel.source if sends else ring.channel.target) != self.worker:
            raise ModelError(f"{said}: the channel is of other workers, or goes the other way")
        if ring.channel not in self._warm:
            raise ModelError(f"{said}: first contact on {ring.channel}, which blocks the host")
        others = [o for o in self._not_run() if o.way == "send" and o.ring == ring]
        if sends and self._depths is not None and len(others) >= self._depths[ring]:
            raise ModelError(f"{said}: {len(others)} are under way, as many as its depth")

    def _not_run(self) -> list[Operation]:
        return [o for o in self._under_way if not o.ran.is_set()]

    def record(self, mismatch: str) -> ModelError:
        """Note that two operations met that do not belong together."""
        self.mismatches.append(mismatch)
        return ModelError(mismatch)

    @override
    def close(self) -> None:
        for waiting in self._queues.values():
            waiting.put(None)
        if self.pending():  # threads that wait for peers end only so
            self._line.hang_up()
        self._control.close()

    def _run_all(self, operations: queue.SimpleQueue[Operation | None], tag: int) -> None:
        while (operation := operations.get()) is not None:
            try:
                run = self._send if operation.way == "send" else self._receive
                operation.end(run(operation, tag))
            except RuntimeError as error:
                reason = reason_of(self.crew) or str(error)
                operation.end(ConnectionError(f"worker {self.worker}, {operation}: {reason}"))

    def _send(self, send: Operation, tag: int) -> ModelError | None:
        rank = self._rank_of(send.ring.channel.target)
        self._line.start("send", _encoded(send.head), rank, tag).wait()
        self._line.start("send", send.data, rank, tag).wait()
        if _has_changed(send):
            return self.record(f"{send}: its content changed while it was under way")
        return None

    def _receive(self, recv: Operation, tag: int) -> ModelError | None:
        rank = self._rank_of(recv.ring.channel.source)
        head = _encoded("")
        self._line.start("recv", head, rank, tag).wait()
        came = bytes(head.tolist()).decode().rstrip()
        fits = came == recv.head
        size = int(came.split("/")[-1])
        room = recv.data if fits else torch.empty(size, dtype=torch.uint8)  # the next may be right
        self._line.start("recv", room, rank, tag).wait()
        return None if fits else self.record(f"{recv} of {recv.head} met a send of {came}")


@final
class _Pending(AbstractPending):
    def __init__(self, operation: Operation, model: GlooModel) -> None:
        self._operation = operation
        self._model = model

    def wait(self) -> None:
        if not self._operation.ran.wait(self._model.crew.timeout_s):
            limit = f"not run within {self._model.crew.timeout_s:g} s"
            raise TimeoutError(f"worker {self._model.worker}, {self._operation}: {limit}")
        if self._operation.error is not None:
            raise self._operation.error

    def is_done(self) -> bool:
        return self._operation.ran.is_set()


def _has_changed(send: Operation) -> bool:
    return send.posted is not None and not torch.equal(send.posted, send.data)


def _encoded(head: str) -> Tensor:
    return torch.tensor(list(head.ljust(_HEAD_BYTES).encode()), dtype=torch.uint8)
