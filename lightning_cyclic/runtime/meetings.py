"""Meetings of all ranks over the default process group: whoever does not come is named.

Lightning lets ranks meet there (barriers, broadcasts) before a training is set up, and between
its steps. Where one of them has ended, gloo and NCCL only say that a connection is closed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch.distributed as dist

from lightning_cyclic.errors import PeerError
from lightning_cyclic.runtime.failure_words import words_of
from lightning_cyclic.runtime.transport.failure_board import FailureBoard
from lightning_cyclic.runtime.transport.names import NOT_THERE, exchange_names
from lightning_cyclic.runtime.waiting import Watch, naming_peers

START = "before training began"
_OF_GROUPS = ("gloo", "nccl", "pair closure", "connection closed", "connection reset")


@final
class Meetings:
    """Name the ranks of the default process group; every rank must build it at the same time.

    Args:
        limit_s: of a wait, in seconds.

    Raises:
        WaitTimeoutError: a rank did not come.
    """

    def __init__(self, limit_s: float) -> None:
        self.timeout_s = limit_s
        store = dist.distributed_c10d._get_default_store()
        # words of an earlier training that failed are no news: each has a key of its own
        times = store.add(f"lightning_cyclic/starts/{dist.get_rank()}", 1)
        key = f"lightning_cyclic/start/{times}"
        self.names = exchange_names(key, limit_s)
        self._board = FailureBoard(key, self.names.of(0), self.names.tell_ended)
        self._training: Watch | None = None

    def failure(self) -> str | None:
        """Return the words that a failing rank left, or None."""
        told = None if self._training is None else self._training.failure()
        return told or self._board.read()

    def silent(self) -> list[int] | None:
        """Call all ranks; return those that do not answer, None where the store does not."""
        return (self._board if self._training is None else self._training).silent()

    def heed(self, training: Watch) -> None:
        """Ask a training's own transport, too, whether a rank has failed; watch no more."""
        self._training = training
        self._board.close()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one fails, before there is a training that tells it."""
        self._board.report(words_of(error, self.names, START))

    @contextmanager
    def naming(self, when: str, what: str) -> Iterator[None]:
        """Run the body, in which all ranks meet; name those who do not come.

        Args:
            when: they meet, as "in step 12".
            what: they were to do, as "to start alike".

        Raises:
            WaitTimeoutError: they did not come in time.
            PeerError: the connection is gone, or another rank has failed.
        """
        own: RuntimeError | None = None
        with naming_peers(self, when, what):
            try:
                yield
            except RuntimeError as error:
                if is_of_groups(error):
                    raise
                own = error
        if own is not None:
            raise own

    def close(self) -> None:
        """Stop watching."""
        self._board.close()


@contextmanager
def naming_start(rank: int, num_ranks: int, limit_s: float) -> Iterator[None]:
    """Run the body, in which the process group is made; where ranks do not come, say what to do.

    Who is missing nobody knows yet, but for rank 0, with which all others meet.

    Raises:
        PeerError: they did not come together.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_groups(error):
            raise
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        them = "all other ranks" if rank == 0 else f"rank 0 at {where}"
        todo = (
            "Look at the logs of the other ranks." if rank == 0 else "Look at the log of rank 0."
        )
        raise PeerError(
            f"rank {rank} waited up to {limit_s:g} s for {them} to come to the start of training, "
            f"{num_ranks} ranks in all: they did not come together.\n{todo}\n"
            f"{NOT_THERE}. Torch says: {_first(error)}"
        ) from error


def is_of_groups(error: RuntimeError) -> bool:
    """Say whether an error came from torch.distributed, and not from code of the user's."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _OF_GROUPS)


def _first(error: RuntimeError) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
