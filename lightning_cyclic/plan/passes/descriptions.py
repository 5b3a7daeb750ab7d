"""descriptions: let a message say what it looks like where that is not what it was.

Sender and receiver remember the form of the last message of a kind. Every message begins with a
word that says whether it has that form; if not, another message with its description and content
(X) follows on the same channel. It is in every program that is proved, and it is left out of what
is run where forms stay as they are: to leave out both ends of a message changes no order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightning_cyclic.plan.actions import Action, Kind, Payload

_WITHOUT_FORM = frozenset({Payload.K, Payload.X})


def description_of(a: Action) -> Action:
    """Give the message that describes the one of an action."""
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
