from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from lightning_cyclic.errors import WaitTimeoutError
from lightning_cyclic.runtime.transport.names import Names, exchange_names, tell_all
from tests import processes
from tests.runtime.transport.rings import backwards, join


def test_stages_stand_behind_rank_and_host() -> None:
    names = Names(0, lambda w: 2 - w, ["x", "y", "z"])
    assert names.own == "rank 2 on z"
    names.know_stages({0: (0,), 1: (1, 2), 2: (0, 1, 2)})
    assert names.own == "rank 2 on z (stage 0)"
    assert names.of(1) == "rank 1 on y (stages 1 and 2)"
    assert names.of(2) == "rank 0 on x (stages 0, 1 and 2)"
    assert names.rows(range(3)) == "w0 is rank 2, w1 is rank 1, w2 is rank 0"


def meet() -> tuple[list[str], list[int], list[str]]:
    """Let rank 1 stay away from the second meeting; return names, and who is missing there."""
    rank, num = join()
    names = exchange_names("names", 20.0, lambda w: backwards(num, w))
    names.come("to dine")
    dist.barrier()
    if rank != 1:
        names.come("to dine")
    dist.barrier()
    missing = names.missing("to dine")
    dist.barrier()
    if rank == 0:
        names.go()
    dist.barrier()
    at = [names.meeting_of(backwards(num, r)) for r in range(num)]
    dist.barrier()
    return [names.of(w) for w in range(num)], missing, at


@pytest.mark.multi
def test_ranks_learn_each_others_hosts_and_who_is_missing() -> None:
    here = socket.gethostname()
    for rank, (names, missing, at) in enumerate(processes.run(meet, 3)):
        assert names == [f"rank {backwards(3, w)} on {here}" for w in range(3)]
        assert missing == ([] if rank == 1 else [backwards(3, 1)])
        assert at == ["", "to dine", "to dine"]


def test_whoever_tells_nothing_is_named() -> None:
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", processes.free_port(), is_master=True, wait_for_workers=False
    )
    store.set("places/1", "there")
    here = socket.gethostname()
    waited = f"rank 0 on {here} waited 0.2 s for rank 2 to come to the start of training"
    with pytest.raises(WaitTimeoutError, match=waited):
        tell_all(store, "places", "here", 0, 3, 0.2)
    store.set("places/2", "elsewhere")
    assert tell_all(store, "places", "here", 0, 3, 0.2) == ["here", "there", "elsewhere"]
