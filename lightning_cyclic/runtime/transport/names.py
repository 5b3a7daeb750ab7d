"""Names: what people know a worker by. That is its rank, its host, and its stages.

Rank and host stand in logs and in what starts processes; a worker's number is our own, and in a
pipeline it counts the other way round.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist

from lightning_cyclic.errors import PeerError, WaitTimeoutError
from lightning_cyclic.runtime.transport import processes
from lightning_cyclic.runtime.transport.bounded import within
from lightning_cyclic.runtime.transport.processes import Processes

NOT_THERE = (
    "It may have ended before training began, as when a download or an import fails there, or "
    "have been started late or not at all. If it was only slow, raise the limit: "
    "timeout=timedelta(minutes=...)"
)


@final
class Names:
    """Know rank, host and stages of every worker.

    Args:
        worker: this worker.
        rank_of: worker -> rank, and rank -> worker: its own inverse. [worker w is rank w]
        hosts: of each rank. [none are named]
        roll: which ranks have come to a meeting. [none is called]
        processes: which ranks have ended. [nobody knows]
    """

    def __init__(
        self,
        worker: int,
        rank_of: Callable[[int], int] = lambda w: w,
        hosts: Sequence[str] = (),
        roll: Roll | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.rank_of = rank_of
        self.rank = rank_of(worker)
        self._worker = worker
        self.hosts = hosts
        self._roll = roll
        self._processes = processes
        self._stages: Mapping[int, Sequence[int]] = {}

    def know_stages(self, stages: Mapping[int, Sequence[int]]) -> None:
        """Name the stages of workers, too: worker -> stages."""
        self._stages = stages

    @property
    def own(self) -> str:
        """Name this worker."""
        return self.of(self._worker)

    def of(self, worker: int) -> str:
        """Name a worker.

        Example:
            >>> names = Names(0, lambda w: 1 - w, ["left", "right"])
            >>> names.know_stages({0: (0, 2), 1: (1,)})
            >>> names.own, names.of(1)
            ('rank 1 on right (stages 0 and 2)', 'rank 0 on left (stage 1)')
        """
        rank = self.rank_of(worker)
        host = f" on {self.hosts[rank]}" if rank < len(self.hosts) else ""
        return f"rank {rank}{host}{_in_brackets(self._stages.get(worker, ()))}"

    def rows(self, workers: Sequence[int]) -> str:
        """Say which rank each row of a timetable is."""
        return ", ".join(f"w{w} is rank {self.rank_of(w)}" for w in workers)

    # ------------------------------------------------------------------ meetings of all ranks

    def come(self, what: str) -> None:
        """Let the others know that this rank has come to a meeting, to do something."""
        if self._roll is not None:
            self._roll.come(what)

    def go(self) -> None:
        """Let the others know that the meeting is over for this rank."""
        if self._roll is not None:
            self._roll.go()

    def meeting_of(self, worker: int) -> str:
        """Return what the meeting is for at which a worker waits for all others; "" for none."""
        return "" if self._roll is None else self._roll.meeting_of(self.rank_of(worker))

    def missing(self, what: str) -> list[int]:
        """Return the workers that have not come to the meeting that this one is at."""
        return [] if self._roll is None else [self.rank_of(r) for r in self._roll.missing(what)]

    # ------------------------------------------------------------------ who has ended

    def ended(self) -> list[int]:
        """Return the workers whose processes have ended, as far as that is known."""
        return [] if self._processes is None else list(map(self.rank_of, self._processes.ended()))

    def live(self) -> list[int]:
        """Return the workers of this host whose processes have not ended."""
        return [] if self._processes is None else list(map(self.rank_of, self._processes.live()))

    def stopped(self) -> list[int]:
        """Return the workers of this host whose processes are stopped."""
        return (
            [] if self._processes is None else list(map(self.rank_of, self._processes.stopped()))
        )

    def tell_ended(self) -> None:
        """Tell the ranks of other hosts which processes of this one have ended."""
        if self._processes is not None:
            self._processes.tell()


@final
class Roll:
    """Note in the key-value store which rank has come to a meeting of all.

    Args:
        store: of the default process group.
        key: under which notes are written.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self._times: Counter[str] = Counter()

    def come(self, what: str) -> None:
        """Note that this rank has come, for the how-manieth time."""
        self._times[what] += 1
        key, times = self._key_of(what, dist.get_rank()), str(self._times[what])
        at = self._key_of("", dist.get_rank())

        def note() -> None:
            self._store.set(key, times)
            self._store.set(at, what)

        within(note, None)

    def go(self) -> None:
        """Note that this rank waits at no meeting any more."""
        key = self._key_of("", dist.get_rank())
        within(lambda: self._store.set(key, ""), None)

    def meeting_of(self, rank: int) -> str:
        """Return what a rank is at a meeting for; nothing where the store does not answer."""
        key = self._key_of("", rank)

        def look() -> str:
            return self._store.get(key).decode() if self._store.check([key]) else ""

        return within(look, "")

    def missing(self, what: str) -> list[int]:
        """Return the ranks that have come less often; none where the store does not answer."""

        def look() -> list[int]:
            return [r for r in range(dist.get_world_size()) if self._times_of(what, r) < mine]

        mine, nobody = self._times[what], list[int]()
        return within(look, nobody)

    def _times_of(self, what: str, rank: int) -> int:
        key = self._key_of(what, rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _key_of(self, what: str, rank: int) -> str:
        return f"{self._key}/{what}/{rank}"


def exchange_names(key: str, limit_s: float, rank_of: Callable[[int], int] = lambda w: w) -> Names:
    """Let all ranks learn each other's hosts and processes; all must call it.

    They are read at once, not when somebody is named: then the store may be gone.

    Args:
        key: under which these are written in the store of the default process group.
        limit_s: of the wait for all others, in seconds.
        rank_of: as in :class:`Names`.

    Raises:
        WaitTimeoutError: a rank did not come.
        PeerError: rank 0 has gone.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    num_ranks = dist.get_world_size()
    own = f"{socket.gethostname()}\n{processes.own()}"
    told = tell_all(store, f"{key}/hosts", own, rank, num_ranks, limit_s)
    hosts, known_by = zip(*(text.split("\n") for text in told), strict=True)
    roll, lives = Roll(store, f"{key}/roll"), Processes(store, known_by)
    return Names(rank_of(rank), rank_of, hosts, roll, lives)


def tell_all(
    store: Any, key: str, own: str, rank: int, num_ranks: int, limit_s: float
) -> list[str]:
    """Return what each rank tells the others over a store; all must call it.

    Args:
        store: of all of them.
        key: under which the texts are written, new for each time.
        own: this rank's text.
        rank: of this process.
        num_ranks: how many there are.
        limit_s: of the wait, in seconds.

    Raises:
        WaitTimeoutError: a rank did not come.
        PeerError: rank 0 has gone.
    """
    me = f"rank {rank} on {socket.gethostname()}"
    keys = [f"{key}/{other}" for other in range(num_ranks)]

    def first_missing() -> int:
        return next((r for r in range(num_ranks) if not store.check([keys[r]])), 0)

    try:
        store.set(keys[rank], own)
        store.wait(keys, timedelta(seconds=limit_s))
        return [text.decode() for text in store.multi_get(keys)]  # by one message
    except dist.DistStoreError:
        other = within(first_missing, 0)
        raise WaitTimeoutError(
            f"{me} waited {limit_s:g} s for rank {other} to come to the start of "
            f"training: it did not come in time.\nLook at the log of rank {other}.\n{NOT_THERE}"
        ) from None
    except dist.DistNetworkError:
        raise PeerError(
            f"rank 0 ended before training began: {me} waited for it.\n"
            f"Look at the log of rank 0.\n{NOT_THERE}"
        ) from None


def _in_brackets(stages: Sequence[int]) -> str:
    if len(stages) < 2:
        return "".join(f" (stage {j})" for j in stages)
    *others, last = map(str, stages)
    return f" (stages {', '.join(others)} and {last})"
