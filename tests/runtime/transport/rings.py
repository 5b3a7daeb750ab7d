"""What the tests of transports share: rings, bytes, and a process group for each rank."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cyclic.plan import make_plan, program_of
from lightning_cyclic.plan.actions import Lane, Payload
from lightning_cyclic.plan.passes.messages import Channel, Ring
from lightning_cyclic.runtime.transport.crew import AbstractCrew
from tests.harness import processes

THERE = Channel(0, 1, Lane.MAIN)
BACK = Channel(1, 0, Lane.MAIN)
SUMS = Channel(0, 1, Lane.SUMS)
START = Channel(0, 1, Lane.MAIN, is_control=True)


def ring(channel: Channel = THERE, payload: Payload = Payload.A, j: int = 0) -> Ring:
    return Ring(channel, payload, j)


def some(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def room(size: int = 1) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def channels_of(preset: str, num_workers: int) -> tuple[Channel, ...]:
    return program_of(make_plan(preset, num_stages=num_workers, num_workers=num_workers)).channels


def join() -> tuple[int, int]:
    """Enter the default process group; return the rank and how many there are."""
    place = processes.here()
    dist.init_process_group("gloo", rank=place.rank, world_size=place.num_ranks)
    return place.rank, place.num_ranks


def reason_of(crew: AbstractCrew) -> str | None:
    """Return the words of a rank that fails, which its others see a little later."""
    end = time.monotonic() + 3
    while crew.failure() is None and time.monotonic() < end:
        time.sleep(0.02)
    return crew.failure()


def backwards(num_ranks: int, rank: int) -> int:
    """Return the worker of a rank, or the rank of a worker, where they are counted down."""
    return num_ranks - 1 - rank
