"""Totals: the summed gradients of a step, on their way to the worker that updates with them."""

from __future__ import annotations

from typing import final

from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport
from lightning_cyclic.runtime.waiting import Waiter
from lightning_cyclic.runtime.whole_step.flat import FlatBuffer
from lightning_cyclic.runtime.whole_step.lanes import Ledger, SumLane
from lightning_cyclic.runtime.whole_step.script import Script


@final
class Totals:
    """Take totals of owned stages: from another worker (T), or from this worker's own sum lane.

    Args:
        script: of this worker.
        transport: how messages travel.
        sums: the lane that ends here where this worker is the last of the ring.
        ledger: where that lane puts totals down.
        waiter: names what does not come.
    """

    def __init__(
        self,
        script: Script,
        transport: AbstractTransport,
        sums: SumLane,
        ledger: Ledger,
        waiter: Waiter,
    ) -> None:
        self._script = script
        self._transport = transport
        self._sums = sums
        self._ledger = ledger
        self._waiter = waiter
        self._posted: dict[int, tuple[AbstractPending, FlatBuffer]] = {}

    def comes_from_afar(self, j: int) -> bool:
        """Say whether another worker sends the total of a stage."""
        return self._script.stages[j].total_from is not None

    def post(self, j: int, buffer: FlatBuffer) -> None:
        """Post the receive of a stage's next total."""
        peer = self._script.stages[j].total_from
        assert peer is not None
        self._posted[j] = (self._transport.irecv(Payload.T, j, peer, buffer.data), buffer)

    def take(self, t: int, j: int) -> FlatBuffer:
        """Wait for the total of step ``t``."""
        if not self.comes_from_afar(j):
            return self._ledger.take(
                "total", t, j, lambda: self._waiter.late(Payload.S, t, j, None)
            )
        pending, buffer = self._posted.pop(j)
        self._waiter.wait(pending, self._script.action(Kind.RECV, Payload.T, t=t, j=j, v=None))
        return buffer

    def give_back(self, j: int, buffer: FlatBuffer) -> None:
        """Let the buffer of a total that was used take the next."""
        if self.comes_from_afar(j):
            self.post(j, buffer)
        else:
            self._sums.give_back(j, buffer)
