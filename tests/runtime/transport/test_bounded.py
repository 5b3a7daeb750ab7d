from __future__ import annotations

import threading
import time

import pytest

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


def test_many_questions_to_a_frozen_store_take_little_longer_than_one() -> None:
    frozen, began = threading.Event(), time.monotonic()
    answers = [within(frozen.wait, False, limit_s=1.0) for _ in range(6)]
    assert answers == [False] * 6
    assert 1.0 <= time.monotonic() - began < 4.0  # not 6
    frozen.set()


def test_a_store_that_answers_again_is_waited_for_again() -> None:
    frozen = threading.Event()
    assert within(frozen.wait, False, limit_s=0.1) is False
    frozen.set()
    while any(t.name == "cyclic-asking" for t in threading.enumerate()):
        time.sleep(0.01)
    assert within(lambda: time.sleep(0.5) or 7, 0) == 7  # longer than a silent one has


def test_where_no_thread_can_be_had_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert within(lambda: 7, 0) == 0
