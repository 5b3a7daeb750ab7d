"""Generators are where they were, also in the middle of a pair of normal numbers."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lightning_cyclic.runtime.randomness import undisturbed
from lightning_cyclic.runtime.saved_generators import put_states, states_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    with undisturbed(CPU):
        yield


def drawn() -> list[float]:
    plain = [random.gauss(0.0, 1.0), random.random(), np.random.randn(), np.random.rand()]
    return [*plain, float(torch.rand(()))]


@pytest.mark.parametrize("half", [False, True])
def test_they_draw_the_same_again_from_a_file(half: bool) -> None:
    for _ in range(1 + half):
        drawn()
    file = io.BytesIO()
    torch.save(states_of(CPU), file)
    expected = drawn()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert drawn() != expected
    file.seek(0)
    put_states(torch.load(file, weights_only=True), CPU)
    assert drawn() == expected


def test_a_file_of_which_torch_alone_is_known_leaves_the_others() -> None:
    state = torch.get_rng_state()
    expected = drawn()
    python, numpy = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    put_states({"torch": state}, CPU)
    assert random.getstate() == python
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == numpy
    assert float(torch.rand(())) == expected[-1]


def test_a_generator_that_replaces_numpys_is_left_alone() -> None:
    usual, saved = np.random.get_bit_generator(), states_of(CPU)
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        assert "numpy" not in states_of(CPU)
        expected = np.random.PCG64(3).random_raw()
        put_states(saved, CPU)
        assert np.random.get_bit_generator().random_raw() == expected
    finally:
        np.random.set_bit_generator(usual)


def test_where_numpy_is_not_loaded_nothing_is_known_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = states_of(CPU)
    monkeypatch.delitem(sys.modules, "numpy")
    assert "numpy" not in states_of(CPU)
    put_states(saved, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_own_generator_is_where_it_was() -> None:
    device = torch.device("cuda", 0)
    saved = states_of(device)
    expected = torch.rand(3, device=device)
    assert not torch.equal(torch.rand(3, device=device), expected)
    put_states(saved, device)
    assert torch.equal(torch.rand(3, device=device), expected)
