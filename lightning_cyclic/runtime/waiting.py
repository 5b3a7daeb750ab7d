"""Waiting: every wait has a limit, and one that fails says who waited for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import final

from lightning_cyclic.errors import CyclicError, PeerError, WaitTimeoutError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.plan.check.refusal import timetable_around
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport

Wait = Callable[[AbstractPending, Action], None]


@final
class Waiter:
    """Wait for messages, and name worker, action, peer and slot of those that do not come.

    Args:
        plan: whose timetable is drawn.
        transport: its limit, and the word that a failing worker left.
    """

    def __init__(self, plan: Plan, transport: AbstractTransport) -> None:
        self._plan = plan
        self._transport = transport

    def wait(self, pending: AbstractPending, action: Action) -> None:
        """Wait for a message of the program.

        Raises:
            WaitTimeoutError: it did not come within the transport's limit.
            PeerError: the connection to the peer is gone.
        """
        try:
            pending.wait()
        except TimeoutError:
            raise self._named(WaitTimeoutError, action, "it did not come in time") from None
        except ConnectionError:
            raise self._named(PeerError, action, "the connection is gone") from None

    def _named(self, kind: type[CyclicError], action: Action, what: str) -> CyclicError:
        worker, limit = self._transport.worker, self._transport.timeout_s
        waited = "to send to" if action.kind is Kind.SEND else "for"
        reason = self._transport.failure()
        drawn, shift = self._drawable(action)
        note = f", drawn {shift} steps earlier, where the timetable is the same" if shift else ""
        return kind(
            f"worker {worker} waited {waited} worker {action.peer}: action {action}, "
            f"slot {action.s}: {what}; the limit is {limit:g} s"
            + (f"\nBecause {reason}" if reason else "")
            + "\nLook at the log of that worker first; if it was only slow, raise the limit: "
            "CyclicStrategy(timeout=timedelta(minutes=...))"
            f"\nThe arrow shows the action{note}:\n"
            + timetable_around(replace(self._plan, num_steps=4, warmup_steps=0), drawn, worker)
        )

    def _drawable(self, action: Action) -> tuple[Action, int]:
        """Move an action of a late step into the first steps, where a short plan has it."""
        behind = action.t - self._plan.warmup_steps
        shift = max(action.t - 2, 0)
        if self._plan.warmup_steps > 0:  # whose steps all are like the first, but do not overlap
            shift = max(action.t - max(min(behind, 2), 0), 0)
        v = None if action.v is None else action.v - shift
        slot = action.s - self._plan.axes.schedule.slot(shift, 0)
        return replace(action, t=action.t - shift, v=v, s=slot), shift


@contextmanager
def naming_peers(transport: AbstractTransport, t: int, what: str) -> Iterator[None]:
    """Run the body, in which a worker waits for others; name them if they do not come.

    Args:
        transport: of the worker, with the word that a failing one left.
        t: step.
        what: the worker waits for.

    Raises:
        WaitTimeoutError: they did not come in time.
        PeerError: the connection is gone, or another worker has failed.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CyclicError):
            raise
        late = "timed out" in str(error).lower()
        gone = "they did not come in time" if late else f"the connection is gone ({error})"
        reason = transport.failure()
        kind = WaitTimeoutError if late and reason is None else PeerError
        raise kind(
            f"worker {transport.worker} waited for {what} in step {t}: {reason or gone}"
        ) from None
