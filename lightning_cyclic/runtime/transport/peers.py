"""Peers: who the workers are, so that whoever waits in vain can be told for whom."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import final

import torch.distributed as dist

from lightning_cyclic.plan.passes.messages import Channel, Ring
from lightning_cyclic.runtime.transport.base import Part


@final
class Peers:
    """Know rank and host of every worker; every worker must build it at the same time.

    The hosts are read at once, not when they are asked for: then the store may be gone.

    Args:
        worker: this worker.
        rank_of: worker -> rank, and rank -> worker: its own inverse.
        timeout_s: limit of every wait, in seconds.
        key: where in the key-value store of the default process group the hosts are written.
    """

    def __init__(
        self, worker: int, rank_of: Callable[[int], int], timeout_s: float, key: str
    ) -> None:
        self.worker = worker
        self.rank_of = rank_of
        self._timeout_s = timeout_s
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}/{dist.get_rank()}", socket.gethostname())
        ranks = range(dist.get_world_size())
        self._hosts = [store.get(f"{key}/{rank}").decode() for rank in ranks]

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
            f"{self.name(self.worker)} waited {way} {what} {direction} "
            f"{self.name(self.other(channel))}; the limit is {self._timeout_s:g} s"
        )

    def name(self, worker: int) -> str:
        """Name a worker with its rank and its host."""
        rank = self.rank_of(worker)
        return f"worker {worker} (rank {rank} on {self._hosts[rank]})"


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
