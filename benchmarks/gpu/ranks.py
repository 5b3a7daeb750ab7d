"""Processes on the GPU: what they say comes back line by line, and none of them is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeAlias

import torch

from benchmarks.pipeline.teams import fork_server
from benchmarks.rounds import environment, free_port, quiet

Say: TypeAlias = Callable[[str], None]
_MORE_S = 20.0  # for what was begun in time


class FailedError(Exception):
    """Say in a line why a part of the session failed."""


class Place(NamedTuple):
    """Say which process of how many this is.

    Args:
        rank: of this process.
        num_ranks: how many there are.
        device: "cuda" or "cpu".
        until: when nothing more should be begun, on the clock of `time.monotonic`.
    """

    rank: int
    num_ranks: int
    device: str
    until: float

    def has_time(self) -> bool:
        """Return whether there is time left, as rank 0 sees it; all ranks must ask."""
        left = torch.tensor([time.monotonic() < self.until], dtype=torch.int, device=self.device)
        if self.num_ranks > 1:
            torch.distributed.broadcast(left, 0)
        return bool(left)


def run(
    work: Callable[..., None], num_ranks: int, device: str, until: float, *args: Any
) -> Iterator[str]:
    """Yield what processes say, while they run.

    Args:
        work: called with a place, what a line is said by, and the arguments.
        num_ranks: how many processes.
        device: "cuda", which they share, or "cpu".
        until: when nothing more should be begun; what has begun has some seconds more.
        args: of `work`.

    Raises:
        FailedError: a process failed, or did not end in time.
    """
    processes, ends, port = [], [], free_port()
    try:
        for rank in range(num_ranks):
            end, theirs = fork_server().Pipe(duplex=False)
            place = Place(rank, num_ranks, device, until)
            env = environment(rank, num_ranks, "127.0.0.1", port, "lo")
            processes.append(
                fork_server().Process(
                    target=_be, args=(theirs, env, work, place, *args), daemon=True
                )
            )
            processes[-1].start()
            theirs.close()  # so that reading from a process that has died ends
            ends.append(end)
        yield from _lines(ends, until + _MORE_S)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _lines(ends: list[Connection], limit: float) -> Iterator[str]:
    left = list(ends)
    while left:
        ready = wait(left, max(0.0, limit - time.monotonic()))
        if not ready:
            raise FailedError(f"rank {ends.index(left[0])} did not end in time")
        for end in [each for each in left if each in ready]:
            try:
                kind, text = end.recv()
            except EOFError:
                kind, text = "failed", "died without a word"
            if kind == "failed":
                raise FailedError(f"rank {ends.index(end)}: {text}")
            if kind == "ended":
                left.remove(end)
            else:
                yield text


def _be(
    pipe: Connection, env: dict[str, str], work: Callable[..., None], place: Place, *args: Any
) -> None:
    os.environ.update(env)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if not os.environ.get("SHOW_ERRORS"):
            os.dup2(nowhere, stream)
    quiet(max(1, (os.cpu_count() or 1) // place.num_ranks) if place.device == "cuda" else 1)
    try:
        work(place, lambda text: pipe.send(("line", text)), *args)
        pipe.send(("ended", ""))
    except BaseException as error:
        pipe.send(("failed", last_line(error)))
        if os.environ.get("SHOW_ERRORS"):
            raise
    os._exit(0)  # no clean-up of process groups: peers may be gone


def last_line(error: BaseException) -> str:
    """Return the kind of an error, and the last line of what it says."""
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[-1]}"
