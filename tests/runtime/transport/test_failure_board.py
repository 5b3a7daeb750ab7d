from __future__ import annotations

import time

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
