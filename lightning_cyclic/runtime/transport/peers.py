"""Peers: who is at the other end of a channel, for whoever waits there in vain."""

from __future__ import annotations

from typing import final

from lightning_cyclic.plan.passes.messages import Channel, Ring
from lightning_cyclic.runtime.transport.base import Part
from lightning_cyclic.runtime.transport.limit import Limit
from lightning_cyclic.runtime.transport.names import Names


@final
class Peers:
    """Say who waited for what of whom.

    Args:
        worker: this worker.
        names: of all workers.
        limit: of every wait.
    """

    def __init__(self, worker: int, names: Names, limit: Limit) -> None:
        self.worker = worker
        self._names = names
        self._limit = limit

    def rank_of(self, worker: int) -> int:
        """Return the rank of a worker, or the worker of a rank."""
        return self._names.rank_of(worker)

    def other(self, channel: Channel) -> int:
        """Return the worker at the other end of a channel."""
        assert self.worker in (channel.source, channel.target), f"{channel} of others"
        return channel.target if channel.source == self.worker else channel.source

    def waits(self, ring: Ring, part: Part = Part.CONTENT) -> str:
        """Say who waited for what of whom."""
        return self._waits(ring.channel, name_of(ring, part))

    def first_contact(self, channel: Channel) -> str:
        """Say who waited for whom before there were messages."""
        return self._waits(channel, "the first byte" + _lane_of(channel))

    def _waits(self, channel: Channel, what: str) -> str:
        sends = channel.source == self.worker
        way, direction = ("to send", "to") if sends else ("for", "from")
        return (
            f"{self._names.own} waited {way} {what} {direction} "
            f"{self._names.of(self.other(channel))}; the limit is {self._limit.seconds:g} s"
        )


def name_of(ring: Ring, part: Part = Part.CONTENT) -> str:
    """Name the messages of a ring, without the workers.

    Example:
        >>> from lightning_cyclic.plan.actions import Lane, Payload
        >>> name_of(Ring(Channel(0, 1, Lane.SUMS), Payload.S, 2))
        'S of stage 2 on lane sums'
    """
    what = "" if part is Part.CONTENT else f"{part.name.lower()} of "
    return f"{what}{ring.payload} of stage {ring.j}{_lane_of(ring.channel)}"


def _lane_of(channel: Channel) -> str:
    return f" on lane {channel.lane}" if channel.lane else ""
