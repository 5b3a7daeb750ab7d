"""What a session tells the other ranks when it fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cyclic.errors import StepError, WaitTimeoutError
from lightning_cyclic.runtime.session import AbstractSession
from lightning_cyclic.runtime.transport.crew import Names

LATE = WaitTimeoutError("rank 1 waited 3 s for rank 0: it did not come in time.\nLook there.")


def failing(error: Exception | None, words: str | None = None) -> tuple[Any, list[str]]:
    """Return a session of rank 1 whose streams have met an error, and what it tells."""
    said: list[str] = []
    crew = SimpleNamespace(names=Names(1), tell=said.append, failure=lambda: words)
    transport = SimpleNamespace(crew=crew, error=error)
    watch = SimpleNamespace(stop=lambda: None)
    return SimpleNamespace(
        failed=False, _watch=watch, transport=transport, rank=1, when="in step 3"
    ), said


def test_what_has_not_come_is_told_before_what_came_of_it() -> None:
    session, said = failing(LATE)
    error = StepError("the loss is nan")
    AbstractSession.fail(session, error)
    assert said == [str(LATE)]
    assert error.__notes__ == [f"Before that: {LATE}"]


def test_the_words_of_another_rank_are_what_came_before() -> None:
    session, said = failing(ConnectionError("another rank has failed"), "rank 0 failed: boom")
    error = StepError("the loss is nan")
    AbstractSession.fail(session, error)
    assert error.__notes__[0].startswith("Before that: rank 0 failed: boom; this rank (1) stopped")
    assert said[0].startswith("rank 0 failed: boom; this rank (1) stopped")


@pytest.mark.parametrize(("met", "error"), [(None, StepError("the loss is nan")), (LATE, LATE)])
def test_an_error_that_is_the_first_is_told_itself(
    met: Exception | None, error: Exception
) -> None:
    session, said = failing(met)
    AbstractSession.fail(session, error)
    assert not getattr(error, "__notes__", [])
    assert len(said) == 1
    assert str(error).splitlines()[0] in said[0]
