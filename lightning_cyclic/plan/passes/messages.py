"""Messages: how one is made, to which step it belongs, and on which channel it travels.

A channel is what leaves one worker for another on one lane. It is one queue: its messages are
received in the order in which they are sent, whatever they carry, as transports without tags
(NCCL) need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from lightning_cyclic.plan.actions import Action, Kind, Lane, Payload, Program

if TYPE_CHECKING:
    from lightning_cyclic.plan.plan import Plan


class Channel(NamedTuple):
    """Name what leaves one worker for another on one lane.

    Start signals, and the metrics of an epoch, have channels of their own: they are words between
    hosts, and belong to no program's steady state.
    """

    source: int
    target: int
    lane: Lane
    is_control: bool = False


class Ring(NamedTuple):
    """Name the messages that share buffers: those of one payload and stage on one channel."""

    channel: Channel
    payload: Payload
    j: int


def ring_of(a: Action, w: int) -> Ring:
    """Name the ring of a message of worker ``w``."""
    assert a.payload is not None
    return Ring(channel_of(a, w), a.payload, a.j)


def channel_of(a: Action, w: int) -> Channel:
    """Name the channel of a message of worker ``w``."""
    assert a.peer is not None  # as for every message
    source, target = (w, a.peer) if a.kind is Kind.SEND else (a.peer, w)
    return Channel(source, target, a.lane, a.payload in (Payload.K, Payload.M))


def message(
    kind: Kind,
    payload: Payload,
    at: Action,
    peer: int,
    *,
    t: int | None = None,
    i: int | None = None,
    j: int | None = None,
    v: int | None = None,
) -> Action:
    """Make a message that belongs to an action, with that action's numbers where none given."""
    return Action(
        kind=kind,
        payload=payload,
        t=at.t if t is None else t,
        j=at.j if j is None else j,
        i=i,
        v=v,
        peer=peer,
        s=at.s,
    )


def is_for_one_use(a: Action) -> bool:
    """Say whether a message brings parameters, or their description, for one F or B alone.

    It has a lane, as its channel is one of its own, but runs on the main one: who computes with
    parameters waits for them, and hands them on.
    """
    return a.lane is Lane.WEIGHTS and a.i is not None


def step_of(a: Action) -> int:
    """Give the step without which an action would not be.

    That of a version is the one of its update, or the one of the micro-batch that it is fetched
    for; that of relayed buffers the one whose forward has left them. A flush ends all actions of
    the steps that have begun.
    """
    if a.payload in (Payload.P, Payload.V) and a.v is not None and a.i is None:
        return a.v - 1
    return a.t - 1 if a.payload is Payload.R and a.i == 0 else a.t


def begins_of_steps(program: Sequence[Action]) -> list[int]:
    """Return where each step begins: at the first action that is not of a step before."""
    begins: list[int] = []
    for n, a in enumerate(program):
        begins += [n] * (step_of(a) + 1 - len(begins))
    return begins


_WITHOUT_FORM = frozenset({Payload.K, Payload.X})


def description_of(a: Action) -> Action:
    """Give the message that describes the one of an action.

    Sender and receiver remember the form of the last message of a kind. Every message begins with
    a word that says whether it has that form; if not, another message with its description and
    content (X) follows on the same channel. It is in every program that is proved, and it is left
    out of what is run where forms stay as they are: to leave out both ends of a message changes no
    order.
    """
    return replace(a, payload=Payload.X)


def described(program: Iterable[Action]) -> Iterator[Action]:
    """Put a description behind each message.

    Args:
        program: of one worker.
    """
    for a in program:
        yield a
        if a.kind in (Kind.SEND, Kind.RECV) and a.payload not in _WITHOUT_FORM:
            yield description_of(a)


def lanes(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Put actions on lanes, and what is handed on where it can come first.

        sums      gradients are added to the sum that has come, and it is passed on
        weights   a version that has come is passed on at once, wherever the compute is

    An owner sends a version itself: behind others on a lane it would wait for what comes later.

    Args:
        plan: whose workers run whole micro-batches, or single stages, which have one lane.
        programs: with all messages, each receive right before its first reader.
    """
    if not plan.axes.placement.runs_whole_micro or plan.num_workers == 1:
        return programs
    return tuple(_handed_on_early(plan, program, w) for w, program in enumerate(programs))


def _lane(plan: Plan, a: Action, w: int) -> Lane:
    if a.kind is Kind.ADD or a.payload in (Payload.S, Payload.T):
        return Lane.SUMS
    sender = w if a.kind is Kind.SEND else a.peer
    is_handed_on = a.payload is Payload.P and sender != plan.owner(a.j)
    return Lane.WEIGHTS if is_handed_on else Lane.MAIN


def _handed_on_early(plan: Plan, program: Program, w: int) -> Program:
    """Move the handing on of versions to where there is room for them.

    There is behind the last read of the version two before, as buffers come in pairs, and not
    before the step of the update begins.
    """
    marked = [replace(a, lane=lane) if (lane := _lane(plan, a, w)) else a for a in program]
    begins, numbers = begins_of_steps(marked), range(len(marked))
    last_read = {(a.j, a.v): n for n, a in enumerate(marked) if a.kind in (Kind.F, Kind.B)}
    handed_on = [n for n in numbers if marked[n].lane is Lane.WEIGHTS and _sends(marked[n])]
    places, moved, least = list(numbers), [], 0
    for n in handed_on:
        j, v = marked[n].j, marked[n].v or 0
        room = last_read.get((j, v - 2), -1) + 1
        least = min(max(least, room, begins[v - 1]), n)
        places[n] = least
        moved.append(n)
    rank = {n: k for k, n in enumerate(moved)}
    order = sorted(numbers, key=lambda n: (places[n], n not in rank, rank.get(n, n)))
    return tuple(marked[n] for n in order)


def _sends(a: Action) -> bool:
    return a.kind is Kind.SEND
