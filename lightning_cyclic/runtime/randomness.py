"""Randomness keyed by seed, step, micro-batch and stage, so that it does not depend on placement.

A stage draws from a stream of its own. Code between units is run by several workers; what it
draws is keyed by its place, so that all of them draw the same.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch

from lightning_cyclic.runtime.snapshot import (
    put_generator,
    seed_generator,
    state_of_generator,
)

_NONE: Mapping[str, Any] = {}


@final
class Randomness:
    """Seed what one micro-batch of one step draws."""

    def __init__(
        self, seed: int, t: int, i: int, device: torch.device, held: Mapping[str, Any] = _NONE
    ) -> None:
        self._key = hashlib.blake2b(f"{seed},{t},{i},".encode(), digest_size=8)
        self._on_cuda = device.type == "cuda"
        self._device = device
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
            seed_generator(generator, self._value(f"region {j} {name}"))

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
        state = torch.get_rng_state()
        on_device = torch.cuda.get_rng_state(self._device) if self._on_cuda else None
        self._seed(f"draw {self._draws}")
        self._draws += 1
        try:
            yield
        finally:
            torch.set_rng_state(state)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, self._device)

    def skip_glue(self) -> None:
        """Count a draw that another worker makes."""
        self._draws += 1

    def _seed(self, what: str) -> None:
        value = self._value(what)
        torch.default_generator.manual_seed(value)
        if self._on_cuda:
            torch.cuda.manual_seed(value)

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

    def state(self) -> tuple[Any, Any]:
        with self._lock:
            numpy = sys.modules.get("numpy")
            return random.getstate(), numpy.random.get_state() if numpy else None

    def restore(self, state: tuple[Any, Any]) -> None:
        """Let them be as they were: seeded for nobody that another thread may seed them for."""
        with self._lock:
            self._seeded_for = None
            random.setstate(state[0])
            if state[1] is not None:
                sys.modules["numpy"].random.set_state(state[1])

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
    state, plain_state = torch.get_rng_state(), _PLAIN.state()
    states = [(x, state_of_generator(x)) for x in held.values()]
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        _PLAIN.restore(plain_state)
        for x, held_state in states:
            put_generator(x, held_state)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
