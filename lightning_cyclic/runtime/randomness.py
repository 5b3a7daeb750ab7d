"""Randomness keyed by seed, step, micro-batch and stage, so that it does not depend on placement.

A stage draws from a stream of its own. Code between units is run by several workers; what it
draws is keyed by its place, so that all of them draw the same.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch

from lightning_cyclic.runtime import generators

_NONE: Mapping[str, Any] = {}


@final
class Randomness:
    """Seed what one micro-batch of one step draws."""

    def __init__(
        self, seed: int, t: int, i: int, device: torch.device, held: Mapping[str, Any] = _NONE
    ) -> None:
        self._key = hashlib.blake2b(f"{seed},{t},{i},".encode(), digest_size=8)
        self._of_torch = generators.of_torch(device)
        self._draws = 0
        self._held = held

    @property
    def num_draws(self) -> int:
        """Return how many draws between units there have been."""
        return self._draws

    @property
    def has_held(self) -> bool:
        """Say whether the module keeps generators of its own."""
        return bool(self._held)

    def begin_stage(self, j: int) -> None:
        self._seed(f"stage {j}")

    def begin_region(self, j: int) -> None:
        """Begin what generators outside of torch, and the module's own, draw in stage ``j``.

        That code is run by the workers of later stages, too, who are to draw the same.
        """
        _PLAIN.seed(self, self._value(f"region {j}"))
        for name, generator in self._held.items():
            generators.seed(generator, self._value(f"region {j} {name}"))

    def has_drawn_plainly(self, *, likely: bool) -> bool:
        """Say, at the end of a region, whether anything has drawn from these generators in it.

        Args:
            likely: what is said where another thread, a worker too, has seeded them meanwhile.
        """
        has_drawn = _PLAIN.has_drawn(self)
        return likely if has_drawn is None else has_drawn

    @contextmanager
    def of_glue(self) -> Iterator[None]:
        """Run the body with randomness keyed by its place among the draws between units."""
        with generators.untouched(self._of_torch):
            self._seed(f"draw {self._draws}")
            self._draws += 1
            yield

    def skip_glue(self) -> None:
        """Count a draw that another worker makes."""
        self._draws += 1

    def _seed(self, what: str) -> None:
        value = self._value(what)
        for generator in self._of_torch:
            generator.manual_seed(value)

    def _value(self, what: str) -> int:
        key = self._key.copy()
        key.update(what.encode())
        return int.from_bytes(key.digest(), "big") >> 1  # torch takes signed 64-bit seeds


@final
class _PlainGenerators:
    """Seed Python's and numpy's own generators, which all threads of a process share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seeded_for: object = None
        self._value = 0

    def seed(self, who: object, value: int) -> None:
        with self._lock:
            self._seeded_for, self._value = who, value
            _seed_python(value)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(value % 2**32)

    def states_of(self, every: Iterable[Any]) -> generators.States:
        with self._lock:
            return generators.states_of(every)

    def restore(self, states: generators.States) -> None:
        """Let them be as they were: seeded for nobody that another thread may seed them for."""
        with self._lock:
            self._seeded_for = None
            generators.put(states)

    def has_drawn(self, who: object) -> bool | None:
        """Say whether anything has drawn since; None if others have seeded them, or restored them.

        They are to be seeded again behind it, as it draws itself.
        """
        with self._lock:
            if self._seeded_for is not who:
                return None
            self._seeded_for = None
            return self._would_draw_else(sys.modules.get("numpy"))

    def _would_draw_else(self, numpy: Any) -> bool:
        """Say whether the next numbers are others than the first ones."""
        drawn = random.getrandbits(32)
        random.seed(self._value)
        if drawn != random.getrandbits(32):
            return True
        if numpy is None:
            return False
        drawn = numpy.random.random_sample()
        numpy.random.seed(self._value % 2**32)
        return bool(drawn != numpy.random.random_sample())


def _seed_python(value: int) -> None:
    _seed_words(value)
    _PYTHON.gauss_next = None


_PYTHON: Any = random._inst
_seed_words = super(random.Random, _PYTHON).seed
_PLAIN = _PlainGenerators()


@contextmanager
def undisturbed(device: torch.device, held: Mapping[str, Any] = _NONE) -> Iterator[None]:
    """Run the body; leave all generators of random numbers behind it as they were."""
    states = _PLAIN.states_of([*generators.of_process(device).values(), *held.values()])
    try:
        yield
    finally:
        _PLAIN.restore(states)
