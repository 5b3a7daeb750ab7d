"""States of generators: seen without drawing, whoever draws, seeds or replaces."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lightning_cyclic.runtime import generator_state, randomness
from lightning_cyclic.runtime.generator_state import GeneratorState
from lightning_cyclic.runtime.randomness import Randomness
from tests.runtime.partial_step.hand import CPU


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    python, numpy, bits = random.getstate(), np.random.get_state(), np.random.get_bit_generator()
    yield
    random.setstate(python)
    np.random.set_bit_generator(bits)
    np.random.set_state(numpy)


@pytest.fixture(params=["seen", "not seen"])
def region(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Randomness:
    """Return what begins regions, where the states can be seen and where they cannot."""
    if request.param == "not seen":
        monkeypatch.setattr(generator_state, "_find_python", lambda: None)
    monkeypatch.setattr(randomness, "_PLAIN", randomness._PlainGenerators())
    made = Randomness(0, 0, 0, CPU)
    made.begin_region(1)
    assert (randomness._PLAIN._seeded is not None) == (request.param == "seen")
    return made


def nothing() -> None:
    pass


def python(count: int) -> Callable[[], Any]:
    return lambda: [random.getrandbits(32) for _ in range(count)]


def of_numpy(count: int) -> Callable[[], Any]:
    return lambda: np.random.bytes(4 * count)


def replaced() -> None:
    np.random.set_bit_generator(np.random.MT19937(7))


def seeded_and_restored() -> None:
    before, of_numpy = random.getstate(), np.random.get_state()
    random.seed(3), np.random.seed(3), random.random(), np.random.rand()
    random.setstate(before), np.random.set_state(of_numpy)


DRAWING = {
    "nothing": (nothing, False),
    "restored": (seeded_and_restored, False),
    "python, one": (python(1), True),
    "python, a whole turn": (python(624), True),
    "python, two turns": (python(1248), True),
    "python, seeded": (lambda: random.seed(3), True),
    "numpy, one": (of_numpy(1), True),
    "numpy, a whole turn": (of_numpy(624), True),
    "numpy, seeded": (lambda: np.random.seed(3), True),
    "numpy, normal": (np.random.standard_normal, True),
    "numpy, another generator": (replaced, True),
}


@pytest.mark.parametrize(("code", "has_drawn"), DRAWING.values(), ids=DRAWING)
def test_it_is_seen_whether_anything_has_drawn(
    region: Randomness, code: Callable[[], Any], has_drawn: bool
) -> None:
    for _ in range(2):  # behind another generator, too
        region.begin_region(1)
        code()
        assert region.has_drawn_plainly(likely=not has_drawn) is has_drawn


@pytest.mark.parametrize("code", [nothing, python(1), of_numpy(1)])
def test_to_look_leaves_the_numbers_alone(region: Randomness, code: Callable[[], Any]) -> None:
    drawn = []
    for looks in (0, 2):
        region.begin_region(1)
        for _ in range(looks):
            GeneratorState().look(np)
        code()
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_a_generator_of_another_kind_is_not_looked_at() -> None:
    state = GeneratorState()
    assert state.look(np) is not None
    np.random.set_bit_generator(np.random.PCG64(1))
    assert state.look(np) is None
    np.random.set_bit_generator(np.random.MT19937(1))
    assert state.look(np) is not None


def test_without_numpy_python_alone_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    state = GeneratorState()
    before = state.look(None)
    assert before is not None
    assert before == state.look(None)
    random.random()
    assert before != state.look(None)
    assert state.look(np) is not None  # imported meanwhile
    monkeypatch.delattr(np.random, "get_bit_generator")
    assert state.look(np) is None  # an old version


def test_where_the_words_lie_elsewhere_nothing_is_looked_at(monkeypatch: Any) -> None:
    version, words, gauss = random.getstate()
    with monkeypatch.context() as patch:
        patch.setattr(random, "getstate", lambda: (version, (*words[1:], words[0]), gauss))
        assert GeneratorState().look(None) is None
    with monkeypatch.context() as patch:
        patch.setattr(sys.implementation, "name", "another")
        assert GeneratorState().look(None) is None
    assert GeneratorState().look(None) is not None
