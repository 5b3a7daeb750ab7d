"""The named transport: torch.distributed's gloo, where messages are matched by tags."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple, final

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan.actions import Lane, Payload
from lightning_cyclic.plan.passes.messages import Ring
from lightning_cyclic.runtime.transport.base import (
    AbstractPending,
    AbstractTransport,
    Line,
    Part,
    Way,
)
from lightning_cyclic.runtime.transport.crew import Crew

_PLACES = {payload: place for place, payload in enumerate(Payload)}


class _Address(NamedTuple):
    """Say how the messages of a ring go."""

    line: Line
    rank: int
    tag: int


@final
class NamedTransport(AbstractTransport):
    """Send and receive over gloo; every worker must build it at the same time.

    One process group per lane and direction. So lanes never wait for each other to post; and no
    connection carries much both ways: while one thread writes to it, gloo's own thread cannot
    read from it, and asks again and again.

    Args:
        rank_of: worker -> rank, and rank -> worker: its own inverse. [worker w is rank w]
    """

    def __init__(
        self,
        lanes: Iterable[Lane],
        crew: Crew,
        rank_of: Callable[[int], int] = lambda w: w,
    ) -> None:
        super().__init__(rank_of(dist.get_rank()), dist.get_world_size(), crew)
        self._lines = {
            (lane, is_upward): Line(crew.timeout_s)
            for lane, is_upward in product(sorted(set(lanes)), (True, False))  # in one order
        }
        crew.names.rank_of = rank_of
        crew.hang_ups.append(self._hang_up)
        self._addresses: dict[tuple[Ring, Part], _Address] = {}

    @override
    def isend(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        return self._post("send", ring, data, part)

    @override
    def irecv(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        return self._post("recv", ring, data, part)

    def _post(self, way: Way, ring: Ring, data: Tensor, part: Part) -> AbstractPending:
        if not data.is_cpu:
            raise ConfigurationError(
                f"gloo was given {ring.payload} of stage {ring.j} on {data.device}; it takes "
                "tensors in the host's memory only; use HostStagedTransport(NamedTransport(...)),"
                " which copies, or one process per GPU with NCCL"
            )
        if (to := self._addresses.get((ring, part))) is None:
            source, target, lane, _ = ring.channel
            assert self.worker in (source, target), f"{ring.channel} of others"
            rank = self.crew.names.rank_of(target if source == self.worker else source)
            to = _Address(self._lines[lane, source < target], rank, tag_of(ring, part))
            self._addresses[ring, part] = to
        return to.line.post(way, data, to.rank, to.tag)

    @override
    def disconnect(self) -> None:
        self.crew.hang_ups.remove(self._hang_up)
        self._addresses.clear()
        for line in self._lines.values():
            line.disconnect()

    def _hang_up(self) -> None:
        for line in self._lines.values():
            line.hang_up()


def tag_of(ring: Ring, part: Part) -> int:
    """Number the messages of one payload, stage and part; gloo's tags have 32 bits.

    Example:
        >>> from lightning_cyclic.plan.passes.messages import Channel
        >>> tag_of(Ring(Channel(0, 1, Lane.MAIN), Payload.M, 9_999), Part.DESCRIBED) < 1 << 20
        True
    """
    return (ring.j * len(_PLACES) + _PLACES[ring.payload]) * len(Part) + part
