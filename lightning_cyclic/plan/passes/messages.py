"""Messages: how one is made, and the order in which they are received.

On each ordered pair of workers, messages of one payload are received in the order in which they
are sent. Transports without tags need that, and where the receiver needs them in another order,
it costs nothing to take first what was sent first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace

from lightning_cyclic.plan.actions import Action, Kind, Payload, Program

_Channels = dict[tuple[int, int | None, Payload | None], deque[Action]]  # from, to: sends


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


def in_order_of_sends(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Take, with each message, those that its sender sent before and that were not needed yet.

    A message that was sent before another has come when that one has, so nobody waits longer.

    Args:
        programs: with each receive where its message is needed first.

    Returns:
        The same actions, with receives moved forward where the order of the sends asks for it.
    """
    sent: _Channels = defaultdict(deque)
    for w, program in enumerate(programs):
        for a in program:
            if a.kind is Kind.SEND:
                sent[w, a.peer, a.payload].append(a)
    return tuple(tuple(_received(program, w, sent)) for w, program in enumerate(programs))


def _received(program: Program, w: int, sent: _Channels) -> Iterator[Action]:
    taken: set[Action] = set()
    for a in program:
        if a.kind is not Kind.RECV:
            yield a
            continue
        assert a.peer is not None  # as for every RECV
        queue = sent[a.peer, w, a.payload]
        while queue and replace(a, s=0) not in taken:
            received = replace(queue.popleft(), kind=Kind.RECV, peer=a.peer, s=a.s)
            taken.add(replace(received, s=0))
            yield received
