"""Replays give the same ghosts again, but for those that somebody else has."""

from __future__ import annotations

import weakref

from lightning_cyclic.runtime.partial_step.replay import Replay
from lightning_cyclic.runtime.partial_step.tape import DRAWS, describe
from tests.runtime.partial_step.hand import router_of
from tests.runtime.partial_step.rows import Row, X

TWO = (describe("a()", X, [], ())[0], describe("split", (X, 3, X + 1), [], ())[0])


def replay_of(tape=TWO) -> Replay:
    return Replay(0, tape, router_of(Row(), "b"))


def first(replay: Replay):
    """Pass the first event, and return what it gave."""
    replay.begin()
    ghost = replay.ghost("a()")
    if ghost is None:
        assert replay.next("a()") is TWO[0]
        ghost = replay.value([])
    return ghost


def test_a_ghost_that_somebody_refers_to_or_has_written_on_is_not_given_again():
    replay = replay_of()
    reference = weakref.ref(first(replay))
    assert first(replay) is not reference()
    first(replay).mine = 1
    assert not hasattr(first(replay), "mine")
    first(replay).requires_grad_()
    assert not first(replay).requires_grad


def test_what_came_is_let_go():
    replay = replay_of()
    first(replay)
    replay.fill((0, 0, 0), X)
    assert first(replay).value is X
    replay.release()
    assert first(replay).value is None


def test_what_ghosts_cannot_see_is_always_watched():
    changes = describe("add_", X, [X], (0,))[0]
    for tape in ((*TWO[:1], DRAWS), (TWO[0], changes)):
        replay = replay_of(tape)
        first(replay)
        replay.next("add_")
        assert replay.end()
        assert replay.needs_watch
