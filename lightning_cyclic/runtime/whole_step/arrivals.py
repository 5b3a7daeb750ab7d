"""Arrivals: versions of the stages that other workers own, from the posted receive to the store.

post        receive the next version into the buffer that the last read freed
expect      it is due before the next step: the relay lane may pass it on
arrive      wait for it, and put it into the store
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport
from lightning_cyclic.runtime.waiting import Waiter
from lightning_cyclic.runtime.whole_step.flat import FlatBuffer
from lightning_cyclic.runtime.whole_step.lanes import Ledger, RelayLane
from lightning_cyclic.runtime.whole_step.script import Script
from lightning_cyclic.runtime.whole_step.versions import VersionStore

_Arrival = tuple[int, AbstractPending, FlatBuffer]  # version, message, where it comes to lie


@final
class Arrivals:
    """Receive parameters (P) from the worker before this one.

    Args:
        script: of this worker.
        stores: of each stage.
        transport: how messages travel.
        relay: passes versions on, and says when a buffer has left.
        ledger: where the relay puts down what has come.
        waiter: names what does not come.
    """

    def __init__(
        self,
        script: Script,
        stores: Sequence[VersionStore],
        transport: AbstractTransport,
        relay: RelayLane,
        ledger: Ledger,
        waiter: Waiter,
    ) -> None:
        self._script = script
        self._stores = stores
        self._transport = transport
        self._relay = relay
        self._ledger = ledger
        self._waiter = waiter
        # under way to this worker: posted ahead, expected (handed to the lane) once it is due
        self._posted: dict[int, _Arrival] = {}
        self._expected: dict[int, _Arrival] = {}
        self._last_posted: dict[int, int] = {}

    def post(self, j: int, *, needed: bool = False) -> None:
        """Post the receive of the next version into the buffer that the last read freed.

        Args:
            j: stage.
            needed: whether to make a buffer if none is free.
        """
        stage, store = self._script.stages[j], self._stores[j]
        if stage.owned or stage.parameters_from is None or j in self._posted:
            return
        v = store.newest + 1
        if j in self._expected or v <= self._last_posted.get(j, -1):
            return
        if not (store.has_free or needed):
            return  # behind a flush two versions are kept: post once the older one is free
        self._relay.reclaim(j, v - 2)
        buffer = store.take_free()
        pending = self._transport.irecv(Payload.P, j, stage.parameters_from, buffer.data)
        self._posted[j] = (v, pending, buffer)
        self._last_posted[j] = v

    def expect_step(self, t: int) -> None:
        """Hand the lane what the program receives before step ``t``'s forwards, in its order."""
        for j, stage in enumerate(self._script.stages):
            if not stage.owned:
                self.expect(j, max(t - stage.lag, 0))

    def expect(self, j: int, v: int) -> None:
        """Hand the lane version ``v`` of a stage, or an older one that is under way."""
        if j in self._posted and self._posted[j][0] <= v:
            item = self._posted.pop(j)
            if self._relay.passes_on:
                self._relay.put((item[0], j, item[1], item[2]))
            else:
                self._expected[j] = item

    def arrive(self, t: int, j: int, v: int) -> None:
        """Wait, in step ``t``, for version ``v`` of a stage that another worker owns."""
        if self._relay.passes_on:
            buffer = self._ledger.take(
                "version", v, j, lambda: self._waiter.late(Payload.P, t, j, v)
            )
        else:
            _, pending, buffer = self._expected.pop(j)
            self._waiter.wait(pending, self._script.action(Kind.RECV, Payload.P, t=t, j=j, v=v))
        self._stores[j].put(v, buffer)
