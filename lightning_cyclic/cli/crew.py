"""A crew: the processes of one trial, which end with it, whatever becomes of it."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cyclic.cli.trial import Came, Trial, train

_PRELOAD = [
    "torch",
    "lightning.pytorch",
    "lightning_cyclic.strategy",
    "lightning_cyclic.cli.trial",
]
_AFTER_FAILURE_S = 5.0  # for the others to say more
_TOLD_BY_OTHERS = ("PeerError", "WaitTimeoutError")


class Ended(NamedTuple):
    """Hold how a trial ended.

    Args:
        came: of each worker, if all have ended well.
        error: else the first line of the one that tells most.
        seconds: how long it took.
    """

    came: Sequence[Came]
    error: str
    seconds: float


def run(trial: Trial, folder: Path, limit_s: float) -> Ended:
    """Run a trial; behind it none of its processes is left.

    Args:
        trial: what its workers run.
        folder: for what they write.
        limit_s: when it has passed all are killed, in seconds.
    """
    processes, ends, port = [], [], _free_port()
    try:
        for rank in range(trial.num_workers):
            end, child_end = _context().Pipe(duplex=False)
            args = (child_end, trial, rank, port, str(folder), limit_s)
            processes.append(_context().Process(target=_work, args=args, daemon=True))
            processes[-1].start()
            child_end.close()
            ends.append(end)
        began = time.monotonic()  # the first process has waited for what all of them import
        told = _collect(ends, began + limit_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    seconds = time.monotonic() - began
    errors = [error for _, error in told.values() if error]
    if errors:
        errors.sort(key=lambda error: error.startswith(_TOLD_BY_OTHERS))
        return Ended([], errors[0], seconds)
    if len(told) < len(ends):
        return Ended([], f"did not end within {limit_s:g} s", seconds)
    return Ended([told[rank][0] for rank in range(len(ends))], "", seconds)


@cache
def _context() -> multiprocessing.context.ForkServerContext:
    """Return what forks processes that have imported everything, and started no GPU."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _collect(ends: Sequence[Connection], until: float) -> dict[int, tuple[Any, str]]:
    """Return rank -> what came, or the first line of an error, of those that ended in time."""
    told: dict[int, tuple[Any, str]] = {}
    while len(told) < len(ends):
        left = [end for rank, end in enumerate(ends) if rank not in told]
        ready = wait(left, max(0.0, until - time.monotonic()))
        if not ready:
            break
        for rank in [ends.index(end) for end in ready]:
            told[rank] = _received(ends[rank])
            if told[rank][1]:
                until = min(until, time.monotonic() + _AFTER_FAILURE_S)
    return told


def _received(end: Connection) -> tuple[Any, str]:
    try:
        received: tuple[Any, str] = end.recv()
    except EOFError:
        return None, "a worker died without a word"
    return received


def _free_port() -> int:
    with closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _work(
    end: Connection, trial: Trial, rank: int, port: int, folder: str, limit_s: float
) -> None:
    """Be the process of one worker; what it writes goes into a file of its own."""
    log = open(f"{folder}/worker{rank}.log", "w")  # noqa: SIM115  (open to the end)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log.fileno(), stream.fileno())
    faulthandler.dump_traceback_later(0.9 * limit_s, file=log)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(_place(trial, rank, port))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        end.send((train(trial, rank, folder), ""))
    except BaseException as error:  # handed to the table
        traceback.print_exc()
        log.flush()
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        end.send((None, line))
    end.close()
    os._exit(0)  # no clean-up of process groups: peers may be gone


def _place(trial: Trial, rank: int, port: int) -> dict[str, str]:
    """Return the variables from which Lightning reads where a worker is."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(trial.num_workers),
        "NODE_RANK": str(rank),
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without which torch knows no deterministic matmul
    }


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
