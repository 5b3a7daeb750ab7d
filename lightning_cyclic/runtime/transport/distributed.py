"""The distributed transport: torch.distributed point-to-point (gloo, NCCL).

One process group per kind of payload, so that messages of different kinds never wait for each
other; the channel (stage) is the tag. NCCL ignores tags and matches in order, which the program
guarantees per pair of workers and payload.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.runtime.transport.base import AbstractPending, AbstractTransport
from lightning_cyclic.runtime.transport.failure_board import FailureBoard

_UNUSED_TAG = 1 << 20  # of no stage


@final
class DistributedTransport(AbstractTransport):
    """Send and receive over torch.distributed; every worker must build it at the same time.

    Args:
        payloads: the kinds of messages that the program has.
        timeout_s: limit of every wait, in seconds.
        rank_of: worker -> rank, and rank -> worker: its own inverse. [worker w is rank w]
    """

    def __init__(
        self,
        payloads: tuple[Payload, ...],
        timeout_s: float,
        rank_of: Callable[[int], int] = lambda w: w,
    ) -> None:
        super().__init__(rank_of(dist.get_rank()), dist.get_world_size(), timeout_s)
        self._rank_of = rank_of
        limit = timedelta(seconds=timeout_s)
        self._groups: dict[Payload, Any] = {p: dist.new_group(timeout=limit) for p in payloads}
        # gloo does not promise that two threads may post on one group at the same moment
        self._posting = {p: threading.Lock() for p in payloads}
        # a group's name is the same on every worker and new with every transport
        self._board = FailureBoard(f"lightning_cyclic/{self._groups[payloads[0]].group_name}")

    @property
    def group(self) -> Any:
        """Return a group of all workers that breaks when one of them fails."""
        return next(iter(self._groups.values()))

    @override
    def isend(self, payload: Payload, channel: int, peer: int, data: Tensor) -> AbstractPending:
        return self._post(payload, "send", channel, peer, data)

    @override
    def irecv(self, payload: Payload, channel: int, peer: int, data: Tensor) -> AbstractPending:
        return self._post(payload, "recv", channel, peer, data)

    def _post(
        self, payload: Payload, way: str, channel: int, peer: int, data: Tensor
    ) -> AbstractPending:
        rank = self._rank_of(peer)
        with self._posting[payload]:
            try:
                return _Work(getattr(self._groups[payload], way)([data], rank, channel))
            except RuntimeError as error:  # the peer has gone: whoever waits for it says so
                return _Gone(str(error))

    @override
    def report_failure(self, text: str) -> None:
        self._board.report(text)
        for group in self._groups.values():
            _hang_up(group)

    @override
    def failure(self) -> str | None:
        return self._board.read()

    @override
    def close(self) -> None:
        self._board.close()


@final
class _Gone(AbstractPending):
    def __init__(self, text: str) -> None:
        self._text = text

    def wait(self) -> None:
        raise ConnectionError(self._text)


@final
class _Work(AbstractPending):
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            text = str(error)
            if "Timed out" in text or "timeout" in text.lower():
                raise TimeoutError(text) from None
            raise ConnectionError(text) from None


def _hang_up(group: Any) -> None:
    """Close all connections of this worker, so that nobody waits for it any longer.

    gloo cannot abort a wait, but one that times out closes every connection of its group; the
    default group stays as it is.
    """
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    with contextlib.suppress(RuntimeError):
        if dist.get_backend(group) != "gloo":
            group.abort()
            return
        nothing = torch.zeros(1, dtype=torch.uint8)
        group.recv([nothing], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
