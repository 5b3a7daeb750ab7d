"""Replays give fresh ghosts in each run; who has kept one has it, with its value."""

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


def test_what_is_kept_of_a_run_keeps_its_value_and_is_not_given_again():
    replay = replay_of()
    kept = first(replay)
    kept.mine = 1
    kept.requires_grad_()
    replay.fill(kept.handle, X)
    replay.release()
    other = first(replay)
    assert (kept.mine, kept.value, other.value) == (1, X, None)
    assert not hasattr(other, "mine")
    assert not other.requires_grad


def test_what_nobody_keeps_is_let_go():
    replay, x = replay_of(), X.clone()
    reference, came = weakref.ref(ghost := first(replay)), weakref.ref(x)
    replay.fill(ghost.handle, x)
    del ghost, x
    assert came() is not None
    replay.release()
    assert reference() is None
    assert came() is None


def test_what_ghosts_cannot_see_is_always_watched():
    changes = describe("add_", X, [X], (0,))[0]
    for tape in ((*TWO[:1], DRAWS), (TWO[0], changes)):
        replay = replay_of(tape)
        first(replay)
        replay.next("add_")
        assert replay.end()
        assert replay.needs_watch
