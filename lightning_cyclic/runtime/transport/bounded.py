"""Bounded questions to the key-value store, whose own have no limit where its rank is frozen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LIMIT_S = 5.0


def within(ask: Callable[[], T], otherwise: T, limit_s: float = _LIMIT_S) -> T:
    """Return what a question gets for an answer; something else if that takes too long.

    Args:
        ask: the question; it goes on in a thread that ends with the process, if not before.
        otherwise: what is returned without an answer: it is late, or the store is gone.
        limit_s: how long the answer may take, in seconds.
    """
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError:  # rank 0, and with it the store, is gone
            return

    asking = threading.Thread(target=run, name="cyclic-asking", daemon=True)
    asking.start()
    asking.join(limit_s)
    return answers[0] if answers else otherwise
