"""Waiting: every wait has a limit, and one that fails says who waited for whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, final

from lightning_cyclic.errors import CyclicError, PeerError, WaitTimeoutError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.clock import rows_around, timetable_around
from lightning_cyclic.runtime.failure_words import LATE, heard, look_at
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport
from lightning_cyclic.runtime.transport.line import is_late, is_of_loader
from lightning_cyclic.runtime.transport.names import Names

Wait = Callable[[AbstractPending, Action], None]

SLOW = (
    "Possible causes: it computes, compiles or loads data for longer than that, waits itself for "
    "another rank, hangs, or cannot be reached. If it was only slow, raise the limit: "
    "timeout=timedelta(minutes=...)"
)
GONE = (
    "Possible causes: it was killed (out of memory, or by whoever started it), it crashed, or its "
    "machine or the network went down."
)
_PLAIN = {
    Payload.A: "activations",
    Payload.G: "gradients of activations",
    Payload.S: "its sum of the gradients",
    Payload.T: "the whole sum of the gradients",
    Payload.H: "its gradients",
    Payload.P: "new weights",
    Payload.R: "buffers",
    Payload.C: "buffers",
    Payload.W: "gradients of tied parameters",
    Payload.V: "new values of tied parameters",
    Payload.D: "the batch",
    Payload.L: "the loss and what was logged",
    Payload.N: "norms of the gradients",
    Payload.K: "the signal to start",
    Payload.X: "the form of what comes next",
    Payload.M: "a metric's state",
}
_LAST_WORDS_S = 2.0
_NO_WORD = "ended without a word of why"
_OF_NO_STAGE = {Payload.D, Payload.L, Payload.K}


class Watch(Protocol):
    """Know whether a rank has failed, and which are there."""

    def failure(self) -> str | None:
        """Return the words that a failing rank left, or None."""

    def silent(self) -> list[int] | None:
        """Call all ranks; return those that do not answer, None where the store does not."""


class Crew(Watch, Protocol):
    """Be who joins the ranks: know their names, how long to wait, and why one has failed."""

    names: Names

    @property
    def timeout_s(self) -> float:
        """Return the limit of a wait that begins now, in seconds."""


@final
class Waiter:
    """Wait for messages; of those that do not come, say from whom, what, and in which step.

    Args:
        plan: whose timetable is drawn.
        transport: its limit, names, and the words that a failing rank left.
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
            WaitTimeoutError: it did not come within the transport's limit.
            PeerError: another rank has failed, or its connection is gone.
        """
        try:
            pending.wait()
        except TimeoutError:
            raise self._named(action, late=True) from None
        except ConnectionError:
            raise self._named(action, late=False) from None

    def _named(self, action: Action, *, late: bool) -> CyclicError:
        names, worker, peer = self._transport.names, self._transport.worker, action.peer
        assert peer is not None
        it, me, todo = names.of(peer), names.own, look_at([names.rank_of(peer)])
        words, ended = _last_words(self._transport, late=late)
        if words is not None:
            return PeerError(heard(words, names, it, todo))
        do, limit_s = f"{_plainly(action)}, {self._when(action.t)}", self._transport.timeout_s
        if late:
            first = f"{me} waited {limit_s:g} s for {it} {do}: {LATE}{_why(names)}."
            first += self._other_wait(peer)
            todo = look_at(map(names.rank_of, names.stopped() or [peer]))
        elif ended and peer not in ended:  # it has closed its connections because of these
            todo = look_at(map(names.rank_of, ended))
            first = f"{_all(names, ended)} {_NO_WORD}: {me} waited for {it} {do}."
        else:
            first = f"{it} {_NO_WORD}: {me} waited for it {do}."
        drawn, shift = self._drawable(action)
        note = f", drawn {shift} steps earlier, where the timetable is the same" if shift else ""
        short = replace(self._plan, num_steps=4)
        return (WaitTimeoutError if late else PeerError)(
            f"{first}\n{todo}\n{SLOW if late else GONE}\n"
            f"The arrow shows the action, {action} in slot {action.s}{note}; "
            f"{names.rows(rows_around(short, worker))}:\n" + timetable_around(short, drawn, worker)
        )

    def _other_wait(self, peer: int) -> str:
        """Say for what a worker waits itself that has left the program for a meeting of all."""
        names = self._transport.names
        what = names.meeting_of(peer)
        return f"\n{names.of(peer)} waits itself for all ranks {what}." if what else ""

    def _drawable(self, action: Action) -> tuple[Action, int]:
        """Move an action of a late step into the first steps, where a short plan has it."""
        shift = max(action.t - 2, 0)
        v = None if action.v is None else action.v - shift
        slot = action.s - self._plan.axes.schedule.slot(shift, 0)
        return replace(action, t=action.t - shift, v=v, s=slot), shift


def _plainly(a: Action) -> str:
    """Say what the other end of an action was to do.

    Example:
        >>> from lightning_cyclic.plan.actions import parse
        >>> _plainly(parse("1SEND_A3>2#4")), _plainly(parse("2RECV_P@3<0#4"))
        ('to take activations of micro-batch 3', 'to send new weights of stage 2')
    """
    assert a.payload is not None
    of = f" of micro-batch {a.i}" if a.i is not None else f" of stage {a.j}"
    way = "take" if a.kind is Kind.SEND else "send"
    return f"to {way} {_PLAIN[a.payload]}{'' if a.payload in _OF_NO_STAGE else of}"


@contextmanager
def naming_peers(crew: Crew, when: str, what: str, peer: int | None = None) -> Iterator[None]:
    """Run the body, in which a rank waits for others; name them if they do not come.

    Args:
        crew: has their names, and the words that a failing one left.
        when: it waits, as "in step 12".
        what: they were to do, as "to finish".
        peer: the worker that is waited for. [all ranks, which all run the body]

    Raises:
        WaitTimeoutError: they did not come in time.
        PeerError: the connection is gone, or another rank has failed.
    """
    if peer is None:
        crew.names.come(what)
    limit_s = crew.timeout_s
    try:
        yield
        if peer is None:
            crew.names.go()
    except RuntimeError as error:
        if isinstance(error, CyclicError) or is_of_loader(error):
            raise
        raise _waited_in_vain(crew, limit_s, f"{what}, {when}", what, peer, error) from None


def _last_words(crew: Crew, *, late: bool) -> tuple[str | None, list[int]]:
    """Return what a failing rank left, and else which workers have ended without a word.

    Who sees a closed connection gives others time for both. A meeting that waits in vain breaks
    the connections of its group before it says so.
    """
    end = time.monotonic() + (0 if late else _LAST_WORDS_S)
    while (words := crew.failure()) is None and time.monotonic() < end:
        if ended := crew.names.ended():
            return crew.failure(), ended  # words are written before the end
        time.sleep(0.02)
    return words, []


def _waited_in_vain(
    crew: Crew, limit_s: float, said: str, what: str, peer: int | None, error: RuntimeError
) -> CyclicError:
    names, late = crew.names, is_late(str(error))
    words, missing = _last_words(crew, late=late)
    why = ""
    if words is None and not missing:
        missing, why = ([peer], "") if peer is not None else _not_there(crew, what, late=late)
        words = crew.failure()  # others may have learned more, and the store ends with rank 0
    if words is not None:
        return PeerError(heard(words, names))
    them, todo = _all(names, missing), look_at(map(names.rank_of, missing))
    if late:
        return WaitTimeoutError(
            f"{names.own} waited {limit_s:g} s for {them or 'all ranks'} {said}: {LATE}"
            f"{why or _why(names)}.\n{todo}\n{SLOW}"
        )
    it = "it" if missing == [peer] else names.of(peer) if peer is not None else "all ranks"
    return PeerError(
        f"{them or 'another rank'} {_NO_WORD}: {names.own} waited for {it} {said}.\n{todo}\n"
        f"{GONE} Its connection says: {error}"
    )


def _not_there(crew: Crew, what: str, *, late: bool) -> tuple[list[int], str]:
    """Return the workers for which a meeting of all waits, as far as that is known, and why.

    They have not come, or are stopped; where all have come, they do not answer.
    """
    names = crew.names
    live = [] if late else names.live()  # who is on the way has not closed the connection
    if missing := [w for w in names.missing(what) or names.stopped() if w not in live]:
        return missing, ""
    silent = crew.silent()
    if silent is None and names.rank != 0:  # which holds the store
        keeper = names.rank_of(0)
        way = f"{names.of(keeper)}, through which ranks find each other, cannot be reached"
        return [keeper], f"; {way} from {names.own}"
    missing = [w for w in map(names.rank_of, silent or []) if w not in live]
    return missing, f"; {_all(names, missing)} did not answer" if missing else ""


def _why(names: Names) -> str:
    """Name who cannot come, whoever is waited for: others wait for them in turn."""
    stopped = names.stopped()
    return f"; {_all(names, stopped)} was stopped by a signal, as SIGSTOP" if stopped else ""


def _all(names: Names, workers: Iterable[int]) -> str:
    return " and ".join(map(names.of, workers))
