from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from lightning_cyclic.runtime.transport.failure_board import FailureBoard
from tests import processes
from tests.runtime.transport.rings import join


def report_in_turn() -> tuple[str | None, str | None, float]:
    """Let rank 1 report first, then rank 0; return what is read before and after."""
    rank, _ = join()
    board = FailureBoard("board")
    before = board.read()
    dist.barrier()
    if rank == 1:
        board.report("the first reason")
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        board.report("what followed from it")
    waited = time.monotonic() - start
    after = board.read()
    board.close()
    dist.barrier()
    return before, after, waited


@pytest.mark.multi
def test_the_first_reason_stays() -> None:
    for before, after, waited in processes.run(report_in_turn, 2):
        assert before is None
        assert after == "the first reason"
        assert waited < 3


def call(watching: set[int]) -> tuple[list[int] | None, list[int] | None, float]:
    """Let ranks watch, and all call; return who is silent, before and when watching has ended."""
    rank, _ = join()
    board = FailureBoard("board")
    if rank not in watching:
        board.close()
        board._watcher.join()
    dist.barrier()
    start = time.monotonic()
    silent = board.silent()
    waited = time.monotonic() - start
    dist.barrier()
    board.close()
    behind = board.silent()
    dist.barrier()
    return silent, behind, waited


@pytest.mark.multi
def test_whoever_watches_answers() -> None:
    for silent, behind, waited in processes.run(call, 3, {0, 1, 2}):
        assert silent == behind == []
        assert waited < 1.9  # all have answered before the limit
    ends = processes.run(call, 3, {0, 2})
    assert [silent for silent, *_ in ends] == [[1], [], [1]]
    assert all(waited < 4 for *_, waited in ends)


class Counting:
    """Counts what a store is asked."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self._store, name)


def watch() -> list[str]:
    """Return what a watcher asks the store while all goes well."""
    join()
    board = FailureBoard("board")
    board._store = Counting(board._store)
    asked = board._store.asked
    while len(asked) < 3:
        time.sleep(0.05)
    board.close()
    board._watcher.join()
    dist.barrier()
    return asked


@pytest.mark.multi
def test_a_watcher_asks_one_thing_at_a_time_while_all_goes_well() -> None:
    for asked in processes.run(watch, 2):
        assert set(asked) == {"check"}


def freeze() -> None:
    """Stop rank 0, which holds the store; fail on the other with what it learns."""
    rank, _ = join()
    board = FailureBoard("board")
    board.close()  # its watcher would wait for the store, too
    board._watcher.join()
    board._closed.clear()
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)
    start = time.monotonic()
    silent = board.silent()
    raise AssertionError(f"{silent} behind {time.monotonic() - start:.0f} s")


@pytest.mark.multi
def test_a_store_that_does_not_answer_is_told_from_ranks_that_do_not() -> None:
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(freeze, 2, time_limit_s=40, after_failure_s=1)
    assert "None behind 2 s" in caught.value.errors[1]
