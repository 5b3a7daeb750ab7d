"""Randomness keyed by seed, step and micro-batch, so that it does not depend on placement."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def key(seed: int, t: int, i: int) -> int:
    """Derive the seed of micro-batch ``i`` of step ``t``.

    Example:
        >>> key(0, 0, 0) == key(0, 0, 0), key(0, 0, 0) == key(0, 0, 1)
        (True, False)
    """
    digest = hashlib.blake2b(f"{seed},{t},{i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes signed 64-bit seeds


@contextmanager
def keyed(seed: int, t: int, i: int, device: torch.device) -> Iterator[None]:
    """Run the body with torch's generators seeded for (t, i); restore them behind it."""
    cpu_state = torch.get_rng_state()
    on_cuda = device.type == "cuda"
    cuda_state = torch.cuda.get_rng_state(device) if on_cuda else None
    value = key(seed, t, i)
    torch.default_generator.manual_seed(value)
    if on_cuda:
        torch.cuda.manual_seed(value)
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
