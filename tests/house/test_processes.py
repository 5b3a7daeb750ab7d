"""The harness itself: results, errors and time limits of several ranks."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tests.harness import processes

pytestmark = pytest.mark.multi


def add(x: torch.Tensor) -> tuple[int, int, torch.Tensor]:
    place = processes.here()
    return place.rank, place.num_ranks, x + place.rank


def fail_on_rank_1() -> None:
    if processes.here().rank == 1:
        raise ValueError("this one")


def sleep_on_rank_1() -> None:
    if processes.here().rank == 1:
        time.sleep(100)


def die_on_rank_1() -> None:
    if processes.here().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_results_come_back_in_the_order_of_ranks() -> None:
    results = processes.run(add, 3, torch.ones(2))
    assert [(rank, num) for rank, num, _ in results] == [(0, 3), (1, 3), (2, 3)]
    assert all(torch.equal(x, torch.full((2,), 1.0 + rank)) for rank, _, x in results)


def test_an_exception_comes_back_with_its_traceback() -> None:
    with pytest.raises(processes.RanksFailedError, match="in fail_on_rank_1") as caught:
        processes.run(fail_on_rank_1, 2)
    assert list(caught.value.errors) == [1]
    assert "ValueError: this one" in caught.value.errors[1]


def test_a_rank_that_does_not_end_is_killed() -> None:
    start = time.monotonic()
    with pytest.raises(processes.RanksFailedError, match="did not end in time"):
        processes.run(sleep_on_rank_1, 2, time_limit_s=2.0)
    assert time.monotonic() - start < 20


def test_a_rank_that_dies_is_noticed() -> None:
    with pytest.raises(processes.RanksFailedError, match="rank 1: died without a word"):
        processes.run(die_on_rank_1, 2)
