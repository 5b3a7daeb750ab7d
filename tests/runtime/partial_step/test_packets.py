"""Packets and lessons: what crosses, and what is learnt of it."""

from __future__ import annotations

import json

import torch

from lightning_cyclic.runtime.partial_step.packets import Lesson, Packet
from lightning_cyclic.runtime.partial_step.tape import Event
from lightning_cyclic.runtime.values.plain import TensorSpec
from lightning_cyclic.runtime.values.trees import LEAF

A, B, C = (0, 0, 0), (0, 3, 1), (1, 0, 0)
X, Y = torch.arange(3.0), torch.ones(2)


def tape_of(*path):
    return tuple(Event(name, LEAF, (TensorSpec.of(X),)) for name in path)


def through_json(data):
    return json.loads(json.dumps(data))


def test_a_packet_is_put_together_again_from_its_tensors_and_facts():
    packet = Packet(
        tensors={A: X, B: Y},
        with_grad=frozenset({B}),
        tapes=(tape_of("a()", "relu"), tape_of("b()")),
        used={A: 2, C: 1},
        learning=True,
        shared={A: 0, B: 0},
        stale={B: "file.py:3"},
    )
    back = Packet.of([X, Y], through_json(packet.facts()), None)
    assert list(back.tensors) == [A, B]
    assert back.tensors[A] is X
    assert back.tensors[B] is Y
    for name in ("with_grad", "tapes", "used", "learning", "shared", "stale"):
        assert getattr(back, name) == getattr(packet, name), name


def test_an_empty_packet_is_put_together_again():
    assert Packet.of([], through_json(Packet().facts()), None) == Packet()


def test_tapes_that_are_known_are_taken_as_they_are():
    known = (tape_of("a()"),)
    back = Packet.of([], through_json(Packet(tapes=(tape_of("a()"),)).facts()), known)
    assert back.tapes is known


def test_a_handle_crosses_from_where_it_is_made_to_where_it_is_last_used():
    lesson = Lesson((("a()",), ("b()",), ("c()",)), {A: 3, B: 1, C: 2, (1, 1, 0): 1})
    assert lesson.wanted(0) == {A, B}
    assert lesson.wanted(1) == {A, C}
    assert lesson.wanted(2) == {A}
    assert lesson.wanted(3) == frozenset()


def test_a_lesson_survives_json():
    lesson = Lesson((("a()", "relu"), ()), {A: 2, C: 2})
    assert Lesson.from_data(through_json(lesson.to_data())) == lesson


def test_lessons_of_one_path_are_added_up():
    tapes = (tape_of("a()"), tape_of("b()", "relu"))
    first = Lesson.merge(None, tapes, {A: 1, B: 2})
    assert first == Lesson((("a()",), ("b()", "relu")), {A: 1, B: 2})
    both = Lesson.merge(first, tapes, {A: 2, B: 1, C: 2})
    assert both == Lesson(first.paths, {A: 2, B: 2, C: 2})
    assert first.last_use == {A: 1, B: 2}  # a lesson that is in use does not change


def test_of_other_paths_the_latest_holds():
    first = Lesson.merge(None, (tape_of("a()"),), {A: 1})
    other = Lesson.merge(first, (tape_of("a()", "relu"),), {B: 1})
    assert other == Lesson((("a()", "relu"),), {B: 1})


def test_a_lesson_is_independent_of_what_it_was_made_of():
    used = {A: 1}
    lesson = Lesson.merge(None, (tape_of("a()"),), used)
    used[B] = 2
    assert lesson.last_use == {A: 1}
