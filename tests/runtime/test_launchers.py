"""Ranks that torchrun has started again meet each other, and not what is left of those before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_cyclic.runtime.launchers import _welcome, _welcomed, apart_from_earlier_attempts
from tests.harness.processes import free_port

LIMIT = timedelta(seconds=20)


@pytest.fixture
def connect() -> Iterator[Any]:
    """Connect to the store of an agent."""
    port = free_port()
    agents = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=LIMIT
    )
    yield lambda: dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=False, timeout=LIMIT
    )
    del agents


def attempt(
    connect: Any, prefix: str, ranks: dict[int, str], limit: timedelta = LIMIT
) -> dict[int, str]:
    """Let rank 0 welcome others, by their tokens."""
    found: dict[int, str] = {}

    def join(store: Store, rank: int, token: str) -> None:
        found[rank] = _welcomed(store, rank, token, LIMIT)

    door = threading.Thread(target=_welcome, args=(connect(), 3, prefix, limit))
    joining = [threading.Thread(target=join, args=(connect(), *x)) for x in ranks.items()]
    for thread in (*joining, door):  # rank 0 is late
        thread.start()
    for thread in (*joining, door):  # which closes behind the last one, or when time is over
        thread.join()
    return found


def test_each_attempt_has_a_prefix_of_its_own(connect: Any) -> None:
    assert attempt(connect, "first", {1: "a", 2: "b"}) == {1: "first", 2: "first"}
    assert attempt(connect, "second", {1: "c", 2: "d"}) == {1: "second", 2: "second"}


def test_an_attempt_to_which_not_all_came_is_nothing_to_the_next(connect: Any) -> None:
    assert attempt(connect, "first", {2: "b"}, timedelta(seconds=1)) == {2: "first"}
    assert attempt(connect, "second", {1: "c", 2: "d"}) == {1: "second", 2: "second"}


def test_a_rank_does_not_wait_for_ever(connect: Any) -> None:
    with pytest.raises(dist.DistStoreError):
        _welcomed(connect(), 1, "a", timedelta(seconds=0.2))


def test_without_an_agents_store_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    before = dist.distributed_c10d.rendezvous.__globals__["_create_c10d_store"]
    with apart_from_earlier_attempts():
        assert dist.distributed_c10d.rendezvous.__globals__["_create_c10d_store"] is before


def test_ranks_are_welcomed_that_come_when_rank_0_has_gone_on(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where NCCL's group is there at once."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    torchs = dist.distributed_c10d.rendezvous.__globals__
    monkeypatch.setitem(torchs, "_create_c10d_store", lambda *_: connect())
    with apart_from_earlier_attempts():
        of_rank_0 = torchs["_create_c10d_store"]("127.0.0.1", 0, 0, 2, LIMIT)
    with apart_from_earlier_attempts():
        of_rank_1 = torchs["_create_c10d_store"]("127.0.0.1", 0, 1, 2, timedelta(seconds=5))
    of_rank_0.set("key", "value")
    assert of_rank_1.get("key") == b"value"
