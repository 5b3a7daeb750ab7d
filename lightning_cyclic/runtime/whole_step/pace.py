"""Pace: bring the workers into the stagger of the timetable when they start together.

Behind the first step and behind every flush all workers stand at the same place. Nothing in the
data they exchange makes them stagger as wide as the timetable has it, so in that one step worker
w+1 waits for a signal that worker w sends when it is as far into its step as the timetable says.
In all other steps nothing is sent and nobody waits: there the stagger holds by itself, and gives
way where messages need longer.
"""

from __future__ import annotations

from typing import final

import torch

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport
from lightning_cyclic.runtime.waiting import Wait
from lightning_cyclic.runtime.whole_step.script import Script


@final
class Pace:
    """Signal the worker behind, and wait for the one before, in the first step of a run.

    Args:
        plan: its timetable says how far apart workers start.
        script: slots of this worker's forwards.
        transport: how the signal travels.
        wait: waits for a message and names it if it does not come.
        wanted: False where updates make all workers meet inside their forwards (the exact norm
            under freshest weights): a worker that waits to begin would never get there.
    """

    def __init__(
        self,
        plan: Plan,
        script: Script,
        transport: AbstractTransport,
        wait: Wait,
        *,
        wanted: bool,
    ) -> None:
        staggered = wanted and plan.schedule == "cyclic" and plan.num_workers > 1
        self._behind = transport.worker + 1 if transport.worker + 1 < plan.num_workers else None
        self._before = transport.worker - 1 if transport.worker > 0 else None
        # 2S/N slots into its step, a worker begins this stage (or its backward, if S is reached)
        self._signal_at = min(2 * plan.num_stages // plan.num_workers, plan.num_stages)
        self._script = script
        self._transport = transport
        self._wait = wait
        self._staggered = staggered
        self._starting = staggered
        self._sent: tuple[AbstractPending, torch.Tensor, Action] | None = None

    def restart(self) -> None:
        """Stagger again in the next step."""
        self._starting = self._staggered

    def begin(self, t: int) -> None:
        """Wait until the worker before is far enough into step ``t``."""
        if self._starting and self._before is not None:
            action = self._action(Kind.RECV, t, self._before)
            signal = torch.zeros(1, dtype=torch.uint8)
            self._wait(self._transport.irecv(Payload.K, 0, self._before, signal), action)

    def reached(self, t: int, j: int) -> None:
        """Signal the worker behind when stage ``j`` (or, for S, the backward) begins."""
        if not self._starting or j < self._signal_at:
            return
        self._starting = False
        if self._behind is not None:
            if self._sent is not None:
                self._wait(self._sent[0], self._sent[2])
            action = self._action(Kind.SEND, t, self._behind)
            signal = torch.ones(1, dtype=torch.uint8)
            pending = self._transport.isend(Payload.K, 0, self._behind, signal)
            self._sent = (pending, signal, action)

    def _action(self, kind: Kind, t: int, peer: int) -> Action:
        slot = self._script.action(Kind.F, None, t=t, j=0, v=None).s
        return Action(kind=kind, payload=Payload.K, t=t, j=0, peer=peer, s=slot)
