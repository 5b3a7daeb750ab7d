"""Generators of random numbers: torch's, Python's and numpy's own, and those that modules keep."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

States = list[tuple[Any, Any]]
"""Of generators, with these."""


def is_generator(x: Any) -> bool:
    if isinstance(x, torch.Generator | random.Random):
        return True
    kind = type(x)
    return kind.__module__.startswith("numpy.random") and (
        hasattr(x, "bit_generator") or hasattr(x, "get_state") or hasattr(x, "random_raw")
    )


def of_torch(device: torch.device) -> list[torch.Generator]:
    """Return those that functions of torch draw from."""
    if device.type != "cuda":
        return [torch.default_generator]
    current = torch.cuda.current_device()  # which lets CUDA begin
    on_device = torch.cuda.default_generators[current if device.index is None else device.index]
    return [torch.default_generator, on_device]


def of_process(device: torch.device) -> dict[str, Any]:
    """Return those that functions of torch, Python and numpy draw from, by name."""
    found: dict[str, Any] = dict(zip(("torch", "torch.cuda"), of_torch(device), strict=False))
    found["random"] = random._inst
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy.random"] = numpy.random.mtrand._rand
    return found


def seed(x: Any, value: int) -> None:
    if isinstance(x, torch.Generator):
        x.manual_seed(value)
    elif hasattr(x, "bit_generator"):
        x.bit_generator.state = type(x.bit_generator)(value).state
    elif hasattr(x, "seed"):  # Python's; numpy's old ones take 32 bits
        x.seed(value if isinstance(x, random.Random) else value % 2**32)
    else:
        x.state = type(x)(value).state


def state_of(x: Any) -> Any:
    if isinstance(x, random.Random):
        return x.getstate()
    return x.get_state() if hasattr(x, "get_state") else getattr(x, "bit_generator", x).state


def put(states: States) -> None:
    """Let generators be as they were."""
    for x, state in states:
        if isinstance(x, random.Random):
            x.setstate(state)
        elif hasattr(x, "set_state"):
            x.set_state(state)
        else:
            bits: Any = getattr(x, "bit_generator", x)
            bits.state = state


def states_of(generators: Iterable[Any]) -> States:
    return [(x, state_of(x)) for x in generators]


@contextmanager
def untouched(generators: Iterable[Any]) -> Iterator[None]:
    """Leave generators behind the body as they were."""
    states = states_of(generators)
    try:
        yield
    finally:
        put(states)
