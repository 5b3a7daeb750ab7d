"""Messages: how one is made, to which step it belongs, and on which channel it travels.

A channel is what leaves one worker for another on one lane. It is one queue: its messages are
received in the order in which they are sent, whatever they carry, as transports without tags
(NCCL) need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_cyclic.plan.actions import Action, Kind, Lane, Payload


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
    assert a.payload is not None
    return Ring(channel_of(a, w), a.payload, a.j)


def channel_of(a: Action, w: int) -> Channel:
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
    is_version = a.payload in (Payload.P, Payload.V) and a.i is None
    if is_version and a.peer is not None and a.v is not None:
        return a.v - 1
    return a.t - 1 if a.payload is Payload.R and a.i == 0 else a.t


def begins_of_steps(program: Sequence[Action]) -> list[int]:
    """Return where each step begins: at the first action that is not of a step before."""
    begins: list[int] = []
    for n, a in enumerate(program):
        begins += [n] * (step_of(a) + 1 - len(begins))
    return begins
