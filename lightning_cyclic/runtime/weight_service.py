"""The weight service: every worker gives its weights to any other that asks, at any time.

What workers do together needs all of them in the same place of the code. But a hook may read the
module on one rank alone, while the others are anywhere. So each worker has a listener, in a
thread beside its training; whoever asks connects to it.

asker      (stamp, names)  ->
owner      waits until its weights are those of the stamp, or can never be   ->  head, tensors

A stamp says how far training is. The owner's weights stay as they are meanwhile: no worker ends
the next step before the asker takes part in it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cyclic.errors import PeerError, StepError, WaitTimeoutError
from lightning_cyclic.runtime.failure_words import look_at
from lightning_cyclic.runtime.transport.limit import Limit

Stamp = tuple[int, ...]  # batches begun, steps updated, loads of weights since
Give = Callable[[Sequence[str]], Sequence[Tensor]]
_POLL_S = 0.01  # how often an owner looks whether it has come as far as an asker
_MOST_NAMED = 3
_LONGEST = 1 << 24  # bytes of what is asked
_LAST_S = 60.0  # how long a process that ends lets others read what it has
_GONE = (EOFError, OSError)


class Address(NamedTuple):
    """Say where a worker listens."""

    host: str
    port: int
    machine: str


@final
class WeightService:
    """Give this worker's weights to others, and get theirs.

    All workers must build it at the same time; it listens until it is closed.

    Args:
        key: where in the key-value store of the default process group addresses are written.
        stamp: returns that of this worker's weights; None while they change.
        give: names -> their tensors, detached.
        limit: of every wait, which may change.
    """

    def __init__(
        self, key: str, stamp: Callable[[], Stamp | None], give: Give, limit: Limit
    ) -> None:
        self._stamp = stamp
        self._give = give
        self._limit = limit
        self._rank = dist.get_rank()
        self._closed = threading.Event()
        self._end: Finalize | None = None
        self._key = key
        self._store = store = dist.distributed_c10d._get_default_store()
        if self._rank == 0:
            store.set(f"{key}/secret", secrets.token_hex(16))
        self._secret = store.get(f"{key}/secret").decode()
        kind, host = _interface()
        self._listener = socket.create_server((host, 0), family=kind, backlog=64)
        port = self._listener.getsockname()[1]
        store.set(f"{key}/{self._rank}", json.dumps([host, port, socket.gethostname()]))
        self._addresses = [
            Address(*json.loads(store.get(f"{key}/{rank}")))
            for rank in range(dist.get_world_size())
        ]
        self._thread = threading.Thread(target=self._listen, name="cyclic-weights", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ asking

    def ask(self, rank: int, stamp: Stamp, names: Sequence[str], into: Sequence[Tensor]) -> None:
        """Fill tensors of the host's memory with the weights that another rank has.

        Args:
            rank: of the worker that updates them.
            stamp: how far they must be.
            names: which.
            into: as many tensors, contiguous.

        Raises:
            StepError: the owner's weights have changed since.
            WaitTimeoutError: it did not answer in time.
            PeerError: it has gone.
        """
        asked = json.dumps([self._secret, self._rank, stamp, list(names)])
        with self._naming(rank, names), self._connected(rank) as line:
            line.send_bytes(asked.encode())
            refusal = line.recv_bytes().decode()
            if refusal:
                raise StepError(refusal)
            for x in into:
                line.recv_bytes_into(_bytes_of(x))

    def _connected(self, rank: int) -> Connection:
        host, port, _ = self._addresses[rank]
        return self._limited(socket.create_connection((host, port), self._limit.seconds))

    def _limited(self, connected: socket.socket) -> Connection:
        """Return a connection of whose waits each has the limit."""
        connected.setblocking(True)  # but for the limits that follow
        limit = struct.pack("ll", max(int(self._limit.seconds), 1), 0)
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, direction, limit)
        return Connection(connected.detach())

    @contextmanager
    def _naming(self, rank: int, names: Sequence[str]) -> Iterator[None]:
        listed = ", ".join(names[:_MOST_NAMED]) + ", ..." * (len(names) > _MOST_NAMED)
        says = (
            f"{self._name(self._rank)} waited for weights ({listed}) from {self._name(rank)}; the "
            f"limit is {self._limit.seconds:g} s"
        )
        todo = look_at([rank])
        try:
            yield
        except (TimeoutError, BlockingIOError):
            raise WaitTimeoutError(f"{says}: they did not come in time\n{todo}") from None
        except _GONE as error:
            raise PeerError(f"{says}: the connection is gone ({error!r})\n{todo}") from None

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._addresses[rank].machine}"

    # ------------------------------------------------------------------ giving

    def _listen(self) -> None:
        with self._listener:
            while True:
                line = self._limited(self._listener.accept()[0])
                if self._closed.is_set():
                    line.close()
                    return
                # one may wait for what another, answered, lets this worker come to
                threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: Connection) -> None:
        with line, suppress(*_GONE, ValueError, TypeError):  # who asks has gone, or is a stranger
            secret, rank, stamp, names = json.loads(line.recv_bytes(_LONGEST))
            if not secrets.compare_digest(secret, self._secret):
                return
            refusal = self._wait_for(tuple(map(int, stamp)), rank)
            line.send_bytes(refusal.encode())
            for x in () if refusal else self._give(names):
                line.send_bytes(_bytes_of(x.to("cpu").contiguous()))

    def _wait_for(self, stamp: Stamp, rank: int) -> str:
        """Wait until the weights are those of a stamp; return why they never will be, or ""."""
        end = time.monotonic() + 2 * self._limit.seconds  # who asks gives up first, and says so
        while (mine := self._stamp()) != stamp:
            if mine is not None and mine > stamp:
                return (
                    f"rank {rank} reads weights of step {stamp[1]}, but {self._name(self._rank)} "
                    f"has updated its stages up to step {mine[1]}; allowed: between steps, as in "
                    "on_train_batch_end, and behind validation and epochs; read them there"
                )
            if self._closed.wait(_POLL_S) or time.monotonic() > end:
                raise ConnectionError
        return ""

    def stay(self) -> None:
        """Give until the process ends, which waits there for those that may still ask."""
        self._end = Finalize(None, self._wait_for_ends, exitpriority=100)

    def _wait_for_ends(self) -> None:
        end = time.monotonic() + _LAST_S
        with suppress(RuntimeError):  # the store is gone, and with it rank 0
            self._store.add(f"{self._key}/ends", 1)
            while self._store.add(f"{self._key}/ends", 0) < len(self._addresses):
                if time.monotonic() > end:
                    return
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Listen no more."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
        if not self._closed.is_set():
            self._closed.set()
            with suppress(OSError):  # it has ended by itself
                self._connected(self._rank).close()  # which wakes it
            self._thread.join()


def _interface() -> tuple[socket.AddressFamily, str]:
    """Return family and address by which this host reaches the one of rank 0."""
    main, port = os.environ.get("MASTER_ADDR", "localhost"), os.environ.get("MASTER_PORT", "1")
    kind, *_, address = socket.getaddrinfo(main, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:  # which sends nothing
        probe.connect(address)
        return kind, probe.getsockname()[0]


def _bytes_of(x: Tensor) -> Any:
    """Return the bytes of a contiguous tensor of the host's memory, as they lie there."""
    return x.detach().reshape(-1).view(torch.uint8).numpy().data
