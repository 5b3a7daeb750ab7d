"""The edge transport: a process group of two for every channel, as NCCL needs it.

NCCL knows no tags and runs the operations of a group one after the other, so channels that
shared one would wait for each other, and meet in an order that nobody has proved. With gloo
as backend the same code runs without a GPU.

    worker 0 --main--> worker 1      group 0 of ranks 0, 1
    worker 0 --sums--> worker 1      group 1 of ranks 0, 1
    worker 1 --main--> worker 0      group 2 of ranks 0, 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.plan.passes.messages import Channel, Ring
from lightning_cyclic.plan.program import Program
from lightning_cyclic.runtime.moments import streams_of
from lightning_cyclic.runtime.transport.base import (
    AbstractPending,
    AbstractTransport,
    Line,
    Part,
    Way,
)
from lightning_cyclic.runtime.transport.named import NamedTransport
from lightning_cyclic.runtime.transport.streams import MessageStreams, own_error_handling

Backend = Literal["nccl", "gloo"]

_NEVER = timedelta(days=365)  # at its own limit torch's watchdog would end the process


@final
class EdgeTransport(AbstractTransport):
    """Send and receive in the order of each channel; every worker must build it at the same time.

    Args:
        channels: all of the program, in one order for all workers: ``Program.channels``.
        control: carries words between hosts, and the limit of every wait; whoever made it closes
            it, behind this transport.
        backend: "nccl" for tensors on GPUs, one per worker; "gloo" for those of the host.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        control: NamedTransport,
        device: torch.device,
        backend: Backend = "nccl",
    ) -> None:
        super().__init__(control.worker, control.num_workers, control.crew)
        self._control = control
        self._device = device
        self._streams: MessageStreams | None = None
        with own_error_handling() if backend == "nccl" else nullcontext():
            self._lines = dict(self._connect(channels, backend))
        if backend == "nccl":
            self._streams = MessageStreams(streams_of(device), self.crew, self._hang_up)
        self.crew.hang_ups.append(self._hang_up)
        self._warm_up()

    @property
    @override
    def control(self) -> NamedTransport:
        return self._control

    @override
    def isend(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        if ring.channel.is_control:
            return self._control.isend(ring, data, part)
        assert part is Part.CONTENT, f"{part.name} of {ring} has to go by control: no names here"
        return self._post("send", ring.channel, data)

    @override
    def irecv(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        if ring.channel.is_control:
            return self._control.irecv(ring, data, part)
        assert part is Part.CONTENT, f"{part.name} of {ring} has to go by control: no names here"
        return self._post("recv", ring.channel, data)

    @override
    def aside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._streams is None else self._streams.aside()

    @property
    @override
    def error(self) -> Exception | None:
        return None if self._streams is None else self._streams.error

    @override
    def settle(self) -> None:
        if self._streams is not None:
            self._streams.settle()

    @override
    def close(self) -> None:
        if self._streams is not None:
            self._streams.close()

    @override
    def disconnect(self) -> None:
        self.crew.hang_ups.remove(self._hang_up)
        for line in self._lines.values():  # in one order for all workers
            line.disconnect()

    def _hang_up(self) -> None:
        if self._streams is not None:  # what is aborted looks as if it had run
            self._streams.fail(ConnectionError("another rank has failed"))
        for line in self._lines.values():
            line.hang_up()

    def _connect(
        self, channels: Sequence[Channel], backend: Backend
    ) -> Iterator[tuple[Channel, Line]]:
        """Make the groups of all channels, which takes all workers, and yield this worker's."""
        for channel in channels:
            if not channel.is_control:
                ranks = list(map(self.crew.names.rank_of, channel[:2]))
                line = Line(self.crew.timeout_s, backend, ranks)
                if self.worker in (channel.source, channel.target):
                    if backend == "nccl":  # whose limits MessageStreams keeps from now on
                        _set_timeout(_NEVER, line.group)
                    yield channel, line

    def _warm_up(self) -> None:
        """Send one byte on every channel: the first contact of two blocks both their hosts.

        No circle can form: all workers go through the channels in one order.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for channel in self._lines:
            way: Way = "send" if channel.source == self.worker else "recv"
            peer = channel.target if way == "send" else channel.source
            try:
                self._post(way, channel, byte).wait()
            except (TimeoutError, ConnectionError) as error:
                rank = self.crew.names.rank_of(peer)
                raise self.crew.failed("to connect", error, rank) from None

    def _post(self, way: Way, channel: Channel, data: Tensor) -> AbstractPending:
        line = self._lines[channel]
        peer = 1 - line.group.rank()
        if self._streams is None:
            return line.post(way, data, peer, 0)
        return self._streams.begin(partial(line.start, way, data, peer, 0), data)


@final
class LateEdges(AbstractTransport):
    """Stand for edges until a program says which there are; till then words go by control.

    Args:
        control: as in :class:`EdgeTransport`; closed with this transport.
        device: as in :class:`EdgeTransport`, as is the backend.
    """

    def __init__(self, control: NamedTransport, device: torch.device, backend: Backend) -> None:
        super().__init__(control.worker, control.num_workers, control.crew)
        self._control = control
        self._device = device
        self._backend = backend
        self._made: list[EdgeTransport] = []

    @override
    def connect(self, program: Program) -> EdgeTransport:
        made = EdgeTransport(program.channels, self._control, self._device, self._backend)
        self._made.append(made)
        return made

    @override
    def isend(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        return self._control.isend(ring, data, part)

    @override
    def irecv(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        return self._control.irecv(ring, data, part)

    @property
    @override
    def error(self) -> Exception | None:
        return next((made.error for made in self._made if made.error is not None), None)

    @override
    def close(self) -> None:
        self._control.close()

    @override
    def disconnect(self) -> None:
        for made in self._made:
            made.disconnect()
        self._made.clear()
        self._control.disconnect()


def _set_timeout(limit: timedelta, group: Any) -> None:
    public = getattr(dist, "set_timeout", None)  # torch 2.15 has it, and warns of the other
    (public or dist.distributed_c10d._set_pg_timeout)(limit, group)
