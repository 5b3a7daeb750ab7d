"""Attempts: ranks that torchrun starts again read nothing that those before them have written.

torchrun's agent has one store for all attempts, in torch 2.13 without a prefix for each, and the
addresses of ranks that are gone still stand in it. So the ranks of an attempt agree on a prefix,
which rank 0 draws:

    rank R  ->  attempt/rankR = its token           of which an older one may be there
    rank 0  ->  attempt/TOKEN = the prefix          for each token that it sees, until all have it
    rank R  ->  attempt/PREFIX/joined, one more
"""

from __future__ import annotations

import importlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

_POLL_S = 0.05
_MAKES_STORE = "_create_c10d_store"


@contextmanager
def apart_from_earlier_attempts() -> Iterator[None]:
    """Give the process group that the body makes a part of the agent's store for itself.

    Where no agent of torchrun shares its store, nothing is changed.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # not its function
    make = getattr(rendezvous, _MAKES_STORE)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield
        return

    agreed: list[str] = []  # the prefix of this attempt, for all stores that are made in the body

    def made(
        host: str, port: int, rank: int, num_ranks: int, limit: timedelta, *more: Any
    ) -> Store:
        store = make(host, port, rank, num_ranks, limit, *more)
        mine = secrets.token_hex(8)
        if agreed:
            return PrefixStore(agreed[0], store)
        if rank > 0:
            agreed.append(_welcomed(store, rank, mine, limit))
            return PrefixStore(agreed[0], store)
        # by a connection of its own: on the other one rank 0 waits for those who are welcomed, or,
        # where a group is made without all of its ranks (NCCL), goes on before they are
        doors = make(host, port, rank, num_ranks, limit, *more)
        arguments = (doors, num_ranks, mine, limit)
        threading.Thread(target=_welcome, args=arguments, name="attempt", daemon=True).start()
        agreed.append(mine)
        return PrefixStore(mine, store)

    setattr(rendezvous, _MAKES_STORE, made)
    try:
        yield
    finally:
        setattr(rendezvous, _MAKES_STORE, make)


def _welcomed(store: Store, rank: int, mine: str, limit: timedelta) -> str:
    """Return the prefix that rank 0 has drawn.

    Raises:
        DistStoreError: rank 0 is not there in time.
    """
    store.set(_of_rank(rank), mine)
    end = time.monotonic() + limit.total_seconds()
    while not store.check([_of_token(mine)]):
        if time.monotonic() > end:
            raise dist.DistStoreError("rank 0 did not come to the store of torchrun's agent")
        time.sleep(_POLL_S)
    prefix: str = store.get(_of_token(mine)).decode()
    store.add(_joined(prefix), 1)
    return prefix


def _welcome(store: Store, num_ranks: int, mine: str, limit: timedelta) -> None:
    """Tell the prefix to all other ranks, as they come."""
    seen: set[bytes] = set()
    end = time.monotonic() + limit.total_seconds()
    with suppress(dist.DistError):  # the agent has ended, which the main thread sees, too
        while store.add(_joined(mine), 0) < num_ranks - 1 and time.monotonic() < end:
            for key in map(_of_rank, range(1, num_ranks)):
                if store.check([key]) and (token := store.get(key)) not in seen:
                    store.set(_of_token(token.decode()), mine)
                    seen.add(token)
            time.sleep(_POLL_S)


def _of_rank(rank: int) -> str:
    return f"attempt/rank{rank}"


def _of_token(token: str) -> str:
    return f"attempt/{token}"


def _joined(prefix: str) -> str:
    return f"attempt/{prefix}/joined"
