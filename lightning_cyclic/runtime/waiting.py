"""Waiting for messages: one that does not come is named, and drawn in the timetable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias, final

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.plan.clock import rows_around, timetable_around
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport
from lightning_cyclic.viz.words import title

Wait: TypeAlias = Callable[[AbstractPending, Action], None]


@final
class Waiter:
    """Wait for messages; of those that do not come, say from whom, what, and in which step.

    Args:
        plan: whose timetable is drawn.
        transport: carries them.
        when: step -> how to say it. ["in step 12"]
    """

    def __init__(
        self, plan: Plan, transport: AbstractTransport, when: Callable[[int], str] | None = None
    ) -> None:
        self._plan = plan
        self._transport = transport
        self._when = when or "in step {}".format

    def follow(self, plan: Plan) -> None:
        """Draw another plan from now on."""
        self._plan = plan

    def wait(self, pending: AbstractPending, action: Action) -> None:
        """Wait for a message of the program.

        Raises:
            WaitTimeoutError: it did not come in time.
            PeerError: another rank has failed, or its connection is gone.
        """
        try:
            pending.wait()
        except (TimeoutError, ConnectionError) as error:
            crew, (kind, peer) = self._transport.crew, (action.kind, action.peer)
            assert peer is not None
            theirs = replace(action, kind=Kind.RECV if kind is Kind.SEND else Kind.SEND)
            what = f"to {title(theirs)}, {self._when(action.t)}"
            late = isinstance(error, TimeoutError)
            failed = crew.failed(what, crew.names.rank_of(peer), late=late)
            drawn = "" if crew.failure() is not None else self._drawn(action)
            raise type(failed)(f"{failed}{drawn}") from None

    def _drawn(self, action: Action) -> str:
        names, worker = self._transport.crew.names, self._transport.worker
        short, (moved, shift) = replace(self._plan, num_steps=4), self._drawable(action)
        note = f", drawn {shift} steps earlier, where the timetable is the same" if shift else ""
        rows = ", ".join(f"w{w} is rank {names.rank_of(w)}" for w in rows_around(short, worker))
        return (
            f"\nThe arrow shows the action, {action} in slot {action.s}{note}; {rows}:\n"
            f"{timetable_around(short, moved, worker)}"
        )

    def _drawable(self, action: Action) -> tuple[Action, int]:
        """Move an action of a late step into the first steps, where a short plan has it."""
        shift = max(action.t - 2, 0)
        v = None if action.v is None else action.v - shift
        slot = action.s - self._plan.axes.schedule.slot(shift, 0)
        return replace(action, t=action.t - shift, v=v, s=slot), shift
