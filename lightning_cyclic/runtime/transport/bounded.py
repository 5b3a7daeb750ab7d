"""Bounded questions to the key-value store, whose own have no limit where its rank is frozen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LIMIT_S = 1.5
_SILENT_S = 0.1  # while an earlier question is not answered: the store is frozen, or cut off

_asking: list[threading.Thread] = []


def within(ask: Callable[[], T], otherwise: T, limit_s: float = _LIMIT_S) -> T:
    """Return what a question gets for an answer; something else if that takes too long.

    Who ends asks several, and all of them together are to take little longer than one.

    Args:
        ask: the question; it goes on in a thread that ends with the process, if not before.
        otherwise: what is returned without an answer: it is late, or the store is gone.
        limit_s: how long the answer may take, in seconds, where those before were answered.
    """
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError:  # rank 0, and with it the store, is gone
            return

    _asking[:] = [thread for thread in _asking if thread.is_alive()]
    asking = threading.Thread(target=run, name="cyclic-asking", daemon=True)
    try:
        asking.start()
    except RuntimeError:  # no memory for a thread: who ends so is to say it, and not this
        return otherwise
    asking.join(_SILENT_S if _asking else limit_s)
    _asking.append(asking)
    return answers[0] if answers else otherwise
