"""Meetings to which all have come, and one of them is killed there: the others name it."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_cyclic.errors import PeerError, WaitTimeoutError
from lightning_cyclic.runtime.meetings import Meetings
from lightning_cyclic.runtime.transport import processes as lives
from tests import processes
from tests.runtime.transport.rings import join

pytestmark = pytest.mark.multi
HERE = 3.0  # how long a rank stays that says nothing itself, in seconds


def meet(victim: int, alone: bool) -> None:
    """Kill a rank at a meeting; fail with what the others learn.

    Args:
        victim: that is killed.
        alone: whether rank 2 is of another host, and no rank says why it fails.
    """
    rank, num = join()
    if alone and rank == 2:
        lives._kernel = lambda: "another boot"
    meetings, store = Meetings(20.0), dist.distributed_c10d._get_default_store()
    began = time.monotonic()
    try:
        with meetings.naming("in step 3", "to meet"):
            store.add("come", 1)
            while rank == victim:
                if store.add("come", 0) == num:
                    os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    except PeerError as error:
        waited = time.monotonic() - began
        if alone:
            time.sleep(HERE)
        else:
            meetings.fail(error)
        raise AssertionError(f"{waited:.1f} s: {error}") from None


@pytest.mark.parametrize(("victim", "alone"), [(0, False), (1, False), (2, False), (1, True)])
def test_a_rank_that_is_killed_where_all_have_come_is_named(victim: int, alone: bool) -> None:
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(meet, 3, victim, alone, time_limit_s=40, after_failure_s=15)
    errors = caught.value.errors
    assert errors.pop(victim) == processes.WORDLESS
    assert len(errors) == 2
    for rank, text in errors.items():
        said = re.search(r"AssertionError: (\d+\.\d) s: (.*)", text)
        assert said is not None, text
        assert float(said[1]) < 4, text
        assert re.match(rf"rank {victim} on \S+ ended without a word of why", said[2]), text
        assert f"rank {rank} " in said[2] or f"this rank ({rank})" in said[2], text
        assert f"Look at the log of rank {victim}." in text


def part() -> None:
    """Kill rank 1 while rank 2 is on the way to a meeting; fail with what rank 0 learns."""
    rank, _ = join()
    meetings = Meetings(20.0)
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        time.sleep(HERE)
        return
    with meetings.naming("in step 3", "to meet"):
        dist.barrier()


def test_whoever_is_on_the_way_is_not_named() -> None:
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(part, 3, time_limit_s=40)
    said = re.search(r"PeerError: (.*)", caught.value.errors[0])
    assert said is not None, caught.value.errors[0]
    assert said[1].startswith("rank 1 on ")
    assert "rank 2" not in said[1]


def stop(victim: int, alone: bool) -> None:
    """Stop a rank where all have come; fail with what the others learn.

    Args:
        victim: that is stopped.
        alone: whether it is of another host.
    """
    rank, num = join()
    if alone and rank == victim:
        lives._kernel = lambda: "another boot"
    meetings, store = Meetings(3.0), dist.distributed_c10d._get_default_store()
    group = dist.new_group(timeout=timedelta(seconds=3), backend="gloo")
    try:
        with meetings.naming("in step 3", "to meet"):
            store.add("come", 1)
            while rank == victim:
                if store.add("come", 0) == num:
                    os.kill(os.getpid(), signal.SIGSTOP)
            dist.barrier(group)
    except WaitTimeoutError as error:
        time.sleep(HERE)  # the other finds out by itself
        raise AssertionError(f"{error}") from None


@pytest.mark.parametrize(
    ("alone", "why"), [(False, "was stopped by a signal, as SIGSTOP"), (True, "did not answer")]
)
def test_a_rank_that_is_stopped_where_all_have_come_is_named(alone: bool, why: str) -> None:
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(stop, 3, 1, alone, time_limit_s=40, after_failure_s=5)
    errors = caught.value.errors
    del errors[1]
    for rank, text in errors.items():
        assert re.search(rf"rank {rank} on \S+ waited 3 s for rank 1 on \S+ to meet", text), text
        assert re.search(rf"; rank 1 on \S+ {why}\.", text), text
    assert len(errors) == 2
