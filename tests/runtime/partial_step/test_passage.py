"""Habits keep what is known of a way, and let go of it where it is another."""

from __future__ import annotations

from lightning_cyclic.runtime.partial_step import passage
from lightning_cyclic.runtime.partial_step.packets import Lesson
from lightning_cyclic.runtime.partial_step.passage import Habits
from lightning_cyclic.runtime.partial_step.tape import describe
from tests.runtime.partial_step.hand import router_of
from tests.runtime.partial_step.rows import Row, X

A, B = ((describe(name, X, [], ())[0],) for name in ("a()", "b()"))


def habits() -> Habits:
    return Habits(router_of(Row(), "b", "c"))


def test_a_habit_fits_equal_tapes_and_no_others():
    habit = habits().begin("kind", 1, (A,))
    assert habit.fits((A,))
    assert habit.fits((tuple(A),))
    assert not habit.fits((B,))
    assert not habit.fits(())


def test_replays_of_the_same_tapes_are_shared_and_others_are_made():
    kept = habits()
    first, second = kept.begin("kind", 1, (A,)), kept.begin("kind", 2, (A, B))
    assert kept.get("kind", 2) is second
    assert kept.get("other", 2) is None
    assert second.replays[0] is first.replays[0]
    again = kept.begin("kind", 2, (B, B))
    assert again.replays[0] is not first.replays[0]
    assert again.replays[1].tape is B


def test_inputs_of_many_sizes_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(passage, "_MOST_HABITS", 2)
    kept = habits()
    for kind in "abc":
        kept.begin(kind, 1, (A,))
    assert [kept.get(kind, 1) is not None for kind in "abc"] == [False, True, True]


def test_a_lesson_holds_on_its_own_way_only():
    habit = habits().begin("kind", 1, (A,))
    on, off = (Lesson((names, ("b()",)), {(0, 0, 0): 2}) for names in (("a()",), ("x()",)))
    assert habit.holds(on)
    assert (habit.wanted, habit.path) == (frozenset({(0, 0, 0)}), ("b()",))
    assert not habit.holds(off)
    assert habit.holds(on)


def test_the_likely_tape_is_the_last_one_if_it_is_of_the_path():
    habit = habits().begin("kind", 1, (A,))
    assert habit.likely(None) == ()
    behind = habit.tapes_behind(B)
    assert behind == (A, B)
    assert habit.tapes_behind(tuple(B)) is behind
    assert habit.likely(None) is habit.likely(("b()",)) is B
    assert habit.likely(("x()",)) == ()
