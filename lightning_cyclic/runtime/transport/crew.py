"""The crew: the ranks of a training, what people call them, and why one of them fails.

A rank that fails writes why under one key of the default process group's store. A thread of each
other rank looks there twice a second, and ends all waits of its rank. Whoever waits in vain, and
finds no words, writes a call there: ranks answer what they wait for with all others, and one that
does not answer was killed, stopped or cut off.

    key         why the first rank fails, in words; or the call
    key/at/R    the answer of rank R
    key/read/R  rank R has read the words

The store lives in rank 0, or in torchrun's agent: rank 0 stays until all that answer have read the
words, as others would take its end for the failure. Where the store is frozen, questions to it
have no limit, so those of a rank that fails are asked in threads.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Final, TypeVar, final

import torch.distributed as dist
from typing_extensions import override

from lightning_cyclic.errors import CyclicError, PeerError, WaitTimeoutError

T = TypeVar("T")

_POLL_S, _ANSWER_S = 0.5, 2.0  # an answer takes several polls: a rank may be busy
_READ_S = 3.0  # so long rank 0 stays for ranks that may be dead
_CALL: Final = "call"
_OF_GROUPS = ("gloo", "nccl", "pair closure", "connection closed", "connection reset")
_SLOW = (
    "Possible causes: it computes, compiles or loads data for longer than that, waits itself for "
    "another rank, hangs, or cannot be reached. If it was only slow, raise the limit: "
    "timeout=timedelta(minutes=...)"
)
_GONE = (
    "Possible causes: it was killed (out of memory, or by whoever started it), it crashed, or its "
    "machine or the network went down."
)


@final
class Names:
    """Know what people call ranks: rank and host stand in logs, and stages are what they do.

    Args:
        hosts: of each rank. [none are named]
    """

    def __init__(self, rank: int, hosts: Sequence[str] = ()) -> None:
        self.rank = rank
        self.hosts = hosts
        self.rank_of: Callable[[int], int] = lambda worker: worker
        """Worker -> rank, and rank -> worker: a pipeline counts workers the other way round."""
        self._stages: Mapping[int, Sequence[int]] = {}

    def know_stages(self, stages: Mapping[int, Sequence[int]]) -> None:
        """Name the stages of ranks, too: worker -> stages."""
        self._stages = {self.rank_of(w): js for w, js in stages.items()}

    def of(self, *ranks: int) -> str:
        """Name ranks.

        Example:
            >>> names = Names(0, ["left", "right"])
            >>> names.know_stages({0: (0, 2), 1: (1,)})
            >>> names.of(0, 1)
            'rank 0 on left (stages 0 and 2) and rank 1 on right (stage 1)'
        """
        return " and ".join(map(self._of, ranks))

    def _of(self, rank: int) -> str:
        host = f" on {self.hosts[rank]}" if rank < len(self.hosts) else ""
        *others, last = [*map(str, self._stages.get(rank, ()))] or [""]
        several = f"s {', '.join(others)} and" if others else ""
        return f"rank {rank}{host}" + (f" (stage{several} {last})" if last else "")


class AbstractCrew(ABC):
    """Be the ranks that wait for each other.

    Args:
        timeout_s: limit of every wait for another rank, in seconds.
    """

    def __init__(self, names: Names, timeout_s: float) -> None:
        self.names = names
        self.timeout_s = timeout_s
        self.waits = ""  # for what this rank waits with all others
        self.hang_ups: list[Callable[[], None]] = []
        """What ends all waits of this rank, in any thread."""

    @abstractmethod
    def failure(self) -> str | None:
        """Return the words that a failing rank left, or None."""

    @abstractmethod
    def tell(self, words: str) -> None:
        """Leave word of why this rank fails, unless another one was first; wait no more."""

    @abstractmethod
    def call(self) -> dict[int, str] | None:
        """Return what each rank that answers waits for with all others; None without a store."""

    def close(self) -> None:  # noqa: B027  # only one with a store looks for words
        """Look for no words any more."""

    def hang_up(self) -> None:
        """End all waits of this rank."""
        for hang_up in list(self.hang_ups):
            with suppress(RuntimeError, ValueError):  # what is closed already
                hang_up()

    def failed(self, what: str, error: Exception, rank: int | None = None) -> CyclicError:
        """Return why a wait of this rank has failed: another one's words, or who does not come.

        Args:
            what: the other was to do, and when, as "to finish, in step 12".
            error: with which it ended: it came to its limit, or a connection was closed.
            rank: that is waited for. [all]
        """
        late = isinstance(error, TimeoutError) or is_late(str(error))
        name, me = self.names.of, self.names.of(self.names.rank)
        end = time.monotonic() + _ANSWER_S
        answers = self.call() if self.failure() is None else {}
        silent = [0] if answers is None else self._others(answers)
        # whoever has closed connections may be about to say why, as may the store that is gone
        while self.failure() is None and time.monotonic() < end:
            if answers is not None and (late or silent):
                break
            time.sleep(0.02)
        if (words := self.failure()) is not None:
            return PeerError(heard(words, self.names.rank))
        if not late:
            gone = silent or ([] if rank is None else [rank])
            it = "all ranks" if rank is None else "it" if gone == [rank] else name(rank)
            return PeerError(
                f"{name(*gone) or 'another rank'} ended without a word of why: {me} waited for "
                f"{it} {what}.\n{look_at(gone)}\n{_GONE}"
            )
        missing, why = [0] if rank is None else [rank], ""
        if answers is None:
            why = f"; {name(0)}, through which ranks find each other, cannot be reached from {me}"
        elif silent:
            why = f"; {name(*silent)} did not answer"
        elif rank is not None and answers.get(rank):
            why = f"; {name(rank)} waits itself for all ranks {answers[rank]}"
        if rank is None and answers is not None:
            missing = self._others(r for r, waits in answers.items() if waits == self.waits)
        return WaitTimeoutError(
            f"{me} waited {self.timeout_s:g} s for {name(*missing) or 'all ranks'} {what}: it did "
            f"not come in time{why}.\n{look_at(silent or missing)}\n{_SLOW}"
        )

    def _others(self, ranks: Iterable[int]) -> list[int]:
        return sorted({*range(len(self.names.hosts))} - {self.names.rank, *ranks})


@final
class Crew(AbstractCrew):
    """Be all ranks of the default process group; every rank must build it at the same time.

    Args:
        timeout_s: limit of every wait for another rank, in seconds.

    Raises:
        DistError: a rank did not come.
    """

    def __init__(self, timeout_s: float) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.store = store = dist.distributed_c10d._get_default_store()
        # words of an earlier training that failed are no news: each has a key of its own
        self.key = f"lightning_cyclic/crew/{store.add(f'lightning_cyclic/crews/{rank}', 1)}"
        self._places = [f"{self.key}/at/{r}" for r in range(num_ranks)]
        self._read = [f"{self.key}/read/{r}" for r in range(num_ranks)]
        hosts = [f"{self.key}/host/{r}" for r in range(num_ranks)]
        store.set(hosts[rank], socket.gethostname())
        store.wait(hosts, timedelta(seconds=timeout_s))
        # at once, not when somebody is named: then the store may be gone
        names = Names(rank, [host.decode() for host in store.multi_get(hosts)])
        super().__init__(names, timeout_s)
        self._words: str | None = None
        self._is_cut_off = False  # the store has not answered: who ends asks it several things
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="cyclic-failures", daemon=True).start()

    @override
    def failure(self) -> str | None:
        return self._words

    @override
    def tell(self, words: str) -> None:
        if self._words is None:
            self._in_time(lambda: self._put(words), 1.0)
            self._heed(self._words or words)
        else:  # this rank may end before the thread that has read them says so
            self._in_time(self._note_read, 1.0)
        if self.names.rank == 0:
            self._in_time(self._stay, _READ_S + 1.0)  # the store ends with this process

    @override
    def call(self) -> dict[int, str] | None:
        return self._in_time(self._answers, _ANSWER_S + 1.0)

    @override
    def close(self) -> None:
        self._closed.set()

    def _put(self, words: str) -> None:
        found = self.store.compare_set(self.key, "", words).decode()
        if found == _CALL:
            found = self.store.compare_set(self.key, _CALL, words).decode()
        self._know(found)

    def _know(self, words: str) -> None:
        self._heed(words)  # first: what is said to rank 0 has no limit
        self._note_read()

    def _note_read(self) -> None:
        self.store.set(self._read[self.names.rank], "")

    def _stay(self) -> None:
        store, end = self.store, time.monotonic() + _READ_S
        while time.monotonic() < end:
            called = any(store.check([at]) for at in self._places)
            pairs = zip(self._places, self._read, strict=True)
            alive = [read for at, read in pairs if not called or store.check([at])]
            if store.check(alive):
                break
            time.sleep(0.05)

    def _heed(self, words: str) -> None:
        if self._words is None:
            self._words = words
            self.hang_up()

    def _answers(self) -> dict[int, str]:
        store, end = self.store, time.monotonic() + _ANSWER_S
        if (words := store.compare_set(self.key, "", _CALL).decode()) != _CALL:
            self._know(words)
            return {}
        while not store.check(self._places) and time.monotonic() < end:
            time.sleep(_POLL_S / 2)
        given = [r for r, key in enumerate(self._places) if store.check([key])]
        return {r: store.get(self._places[r]).decode() for r in given}

    def _watch(self) -> None:
        answered = False
        while self._words is None and not self._closed.wait(_POLL_S):
            try:
                if not self.store.check([self.key]):
                    continue
                if (words := self.store.get(self.key).decode()) != _CALL:
                    self._know(words)
                elif not answered:
                    self.store.set(self._places[self.names.rank], self.waits)
                    answered = True
            except RuntimeError:  # it knows no words yet, or they are heeded already
                if is_in_agent():  # all ranks may be alive, and stop behind the same step
                    return
                gone = "ended without a word of why\nLook at the log of rank 0."
                self._heed(f"{self.names.of(0)} {gone}")

    def _in_time(self, ask: Callable[[], T], limit_s: float) -> T | None:
        """Return what the store answers, or None: it is late, or gone."""
        answers: list[T] = []

        def run() -> None:
            with suppress(RuntimeError):
                answers.append(ask())

        asking = threading.Thread(target=run, name="cyclic-asking", daemon=True)
        try:
            asking.start()
        except RuntimeError:  # no memory for a thread, which who fails is to say
            run()
        else:
            asking.join(0.1 if self._is_cut_off else limit_s)
            self._is_cut_off = asking.is_alive()
        return answers[0] if answers else None


def is_in_agent() -> bool:
    """Say whether the store lives in torchrun's agent, which may end before rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# ---------------------------------------------------------------------- the start


@contextmanager
def naming_start(rank: int, num_ranks: int, limit_s: float) -> Iterator[None]:
    """Run the body, in which the process group is made; where ranks do not come, say what to do.

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
        at = "the logs of the other ranks" if rank == 0 else "the log of rank 0"
        raise PeerError(
            f"rank {rank} waited up to {limit_s:g} s for {them} to come to the start of training, "
            f"{num_ranks} ranks in all: they did not come together.\nLook at {at}.\n"
            "It may have ended before training began, as when a download or an import fails "
            "there, or have been started late or not at all. If it was only slow, raise the "
            "limit: timeout=timedelta(minutes=...). Torch says: "
            f"{(str(error).splitlines() or [type(error).__name__])[0]}"
        ) from error


# ---------------------------------------------------------------------- words


def heard(words: str, rank: int) -> str:
    """Return with what a rank stops that has read the words of another one.

    Example:
        >>> heard("rank 3 failed in step 12: it is broken." + chr(10) + "Look there.", 0)
        'rank 3 failed in step 12: it is broken; this rank (0) stopped because of it. Look there.'
    """
    said, _, todo = words.partition("\n")
    return f"{said.rstrip('.')}; this rank ({rank}) stopped because of it. {todo}".rstrip()


def look_at(ranks: Sequence[int]) -> str:
    """Say whose log has more.

    Example:
        >>> look_at([2]), look_at([1, 3]), look_at([])
        ('Look at the log of rank 2.', 'Look at the logs of ranks 1, 3.', 'Look at all logs.')
    """
    several = "s" * (len(ranks) > 1)
    numbers = f"the log{several} of rank{several} {', '.join(map(str, ranks))}"
    return f"Look at {numbers if ranks else 'all logs'}."


def is_late(text: str) -> bool:
    """Say whether torch's words for a wait that failed mean that it took too long."""
    return "timed out" in text.lower() or "timeout" in text.lower()


def is_of_groups(error: RuntimeError) -> bool:
    """Say whether an error came from torch.distributed, and not from code of the user's."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _OF_GROUPS)
