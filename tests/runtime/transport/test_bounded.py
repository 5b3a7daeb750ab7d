from __future__ import annotations

import threading
import time

from lightning_cyclic.runtime.transport.bounded import within


def test_an_answer_is_waited_for() -> None:
    assert within(lambda: 7, 0) == 7


def test_a_question_without_an_answer_ends() -> None:
    frozen, began = threading.Event(), time.monotonic()
    assert within(frozen.wait, False, limit_s=0.1) is False
    assert time.monotonic() - began < 2
    frozen.set()


def test_a_store_that_is_gone_answers_nothing() -> None:
    def gone() -> int:
        raise RuntimeError("Connection reset by peer")

    assert within(gone, 0) == 0
