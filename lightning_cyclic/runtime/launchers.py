"""Launchers: what torchrun, SLURM and terminals do to ranks, and torch does not see to.

**Restarts.** torchrun's agent has one store for all attempts, in torch 2.13 without a prefix for
each, and the addresses of ranks that are gone still stand in it. (Counts of restarts differ from
node to node.) So the ranks of an attempt agree on a prefix, which rank 0 draws:

    rank R  ->  attempt/rankR = its token           of which an older one may be there
    rank 0  ->  attempt/TOKEN = the prefix          for each token that it sees, until all have it
    rank R  ->  attempt/PREFIX/joined, one more

**Signals.** Ctrl-C in a terminal, torchrun's agent, and SLURM send a signal to stop to whatever a
rank has started, too. A worker of a loader that ends by it takes the next batch with it, so that
its rank fails in the middle of a step, before all ranks could stop behind one.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.utils.data import DataLoader

from lightning_cyclic.runtime.transport.crew import is_in_agent

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_POLL_S = 0.05
_MAKES_STORE = "_create_c10d_store"
_LEAVING_S = 10.0
_heard: set[int] = set()  # signals, by a worker


def end_with_agent() -> None:
    """Ask the kernel for SIGTERM where torchrun's agent, which may be killed, ends before us."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


@contextmanager
def apart_from_earlier_attempts() -> Iterator[None]:
    """Give the process group that the body makes a part of the agent's store for itself."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # not its function
    make = getattr(rendezvous, _MAKES_STORE)
    if not is_in_agent():
        yield
        return

    def made(
        host: str, port: int, rank: int, num_ranks: int, limit: timedelta, *more: Any
    ) -> Store:
        store, mine = make(host, port, rank, num_ranks, limit, *more), secrets.token_hex(8)
        if rank > 0:
            return PrefixStore(_welcomed(store, rank, mine, limit), store)
        # by a connection of its own: on the other one rank 0 waits for those who are welcomed, or,
        # where a group is made without all of its ranks (NCCL), goes on before they are
        arguments = (make(host, port, rank, num_ranks, limit, *more), num_ranks, mine, limit)
        threading.Thread(target=_welcome, args=arguments, name="attempt", daemon=True).start()
        return PrefixStore(mine, store)

    setattr(rendezvous, _MAKES_STORE, made)
    try:
        yield
    finally:
        setattr(rendezvous, _MAKES_STORE, make)


def _welcomed(store: Store, rank: int, mine: str, limit: timedelta) -> str:
    store.set(f"attempt/rank{rank}", mine)
    store.wait([f"attempt/{mine}"], limit)
    prefix: str = store.get(f"attempt/{mine}").decode()
    store.add(f"attempt/{prefix}/joined", 1)
    return prefix


def _welcome(store: Store, num_ranks: int, mine: str, limit: timedelta) -> None:
    seen: set[bytes] = set()
    end = time.monotonic() + limit.total_seconds()
    with suppress(dist.DistError):  # the agent has ended, which the main thread sees, too
        while store.add(f"attempt/{mine}/joined", 0) < num_ranks - 1 and time.monotonic() < end:
            for key in (f"attempt/rank{rank}" for rank in range(1, num_ranks)):
                if store.check([key]) and (token := store.get(key)) not in seen:
                    store.set(f"attempt/{token.decode()}", mine)
                    seen.add(token)
            time.sleep(_POLL_S)


def shelter(loader: object, signals: frozenset[int]) -> Callable[[], None]:
    """Let workers that a loader starts leave signals to the rank; return what ends that."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return lambda: None
    _end_workers_at_exit()
    own = loader.worker_init_fn
    loader.worker_init_fn = sheltered = partial(_begin_worker, own, signals)

    def restore() -> None:
        if loader.worker_init_fn is sheltered:
            loader.worker_init_fn = own

    return restore


def _begin_worker(own: Callable[[int], Any] | None, signals: frozenset[int], worker: int) -> None:
    for number in signals:
        signal.signal(number, _leave_to_rank)
    if own is not None:
        own(worker)


@cache
def _end_workers_at_exit() -> None:
    atexit.register(_end_workers)


def _end_workers() -> None:
    # an error may end a rank while loaders have workers: Python sends SIGTERM, which they leave to
    # the rank the first time, and waits without limit
    left = [child for child in multiprocessing.active_children() if child.daemon]
    if left and hasattr(signal, "SIGCHLD"):
        # torch answers it with an error: a worker that had not yet begun ends by the first one
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    until = time.monotonic() + _LEAVING_S
    while left and time.monotonic() < until:  # again: signals that come at once are one
        for child in left:
            child.terminate()
        for child in left:
            child.join(_POLL_S)
        left = [child for child in left if child.is_alive()]


def _leave_to_rank(number: int, frame: Any) -> None:
    # a loader ends workers by a message, and by SIGTERM only those that do not listen
    if number == signal.SIGTERM and number in _heard:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _heard.add(number)
