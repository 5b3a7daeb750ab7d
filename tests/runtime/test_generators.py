"""Generators of random numbers of all kinds are read, put back and seeded alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_cyclic.runtime import generators

CPU = torch.device("cpu")
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "torch": (torch.Generator, lambda x: float(torch.rand((), generator=x))),
    "Python": (random.Random, lambda x: x.random()),
    "numpy": (np.random.default_rng, lambda x: x.random()),
    "numpy, the old way": (np.random.RandomState, lambda x: x.random()),
    "numpy, bits": (np.random.PCG64, lambda x: x.random_raw()),
}


@pytest.mark.parametrize(("make", "draw"), KINDS.values(), ids=KINDS)
def test_all_kinds(make: Callable[[], Any], draw: Callable[[Any], float]) -> None:
    x, other = make(), make()
    assert generators.is_generator(x)
    with generators.untouched([x]):
        drawn = draw(x)
    assert draw(x) == drawn
    generators.seed(x, 2**40 + 7)
    generators.seed(other, 2**40 + 7)
    assert draw(x) == draw(other)


def test_those_of_the_process_are_what_functions_draw_from() -> None:
    own = generators.of_process(CPU)
    assert [*own] == ["torch", "random", "numpy.random"]
    with generators.untouched(own.values()):
        drawn = torch.rand(1).item(), random.random(), np.random.rand()
    assert drawn == (torch.rand(1).item(), random.random(), np.random.rand())


def test_what_is_none() -> None:
    assert not any(map(generators.is_generator, (torch.ones(1), np.ones(1), random, iter([]), 1)))
