"""The failure board: why a rank fails, for those who see only a closed connection.

    key         why, in words
    key/alarm   something is wrong: there are words, or ranks are to answer
    key/here/R  the answer of rank R

A rank looks for the alarm alone as long as there is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import final

import torch.distributed as dist

from lightning_cyclic.runtime.transport.bounded import within

_POLL_S = 0.5
_ANSWER_S = 2.0  # several polls: a rank may be busy


@final
class FailureBoard:
    """Tell every rank why one fails, over the key-value store of the default process group.

    A rank whose peer is gone sees only a closed connection; the store has the reason. The store
    lives in rank 0, so a watcher reads it twice a second while rank 0 still lives; that it does
    not is a reason, too.

    Args:
        key: where in the store the reason is written.
        keeper: the name of rank 0.
        each_time: what else is done where the store is read. [nothing]
    """

    def __init__(
        self, key: str, keeper: str = "rank 0", each_time: Callable[[], None] = lambda: None
    ) -> None:
        self._key = key
        self._alarm = f"{key}/alarm"
        self._each_time = each_time
        self._keeper = keeper
        self._store = dist.distributed_c10d._get_default_store()
        self._text: str | None = None
        self._has_lingered = False
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cyclic-failures", daemon=True)
        self._watcher.start()

    def report(self, text: str) -> None:
        """Write the reason unless another rank was first; wait until others could read it."""
        if self.read() is None:
            self._text = text
            within(self._write, None)
        if dist.get_rank() == 0 and not self._has_lingered:
            self._has_lingered = True
            self._closed.wait(3 * _POLL_S)  # the store ends with this process

    def read(self) -> str | None:
        """Return the reason that some rank wrote, or None."""
        if self._text is None:
            within(self._look, None)
        return self._text

    def silent(self) -> list[int] | None:
        """Call all ranks; return those that do not answer, None where the store does not.

        The watchers answer, so that a rank does that waits, or computes.
        """
        if self._closed.is_set():  # and so are those of the others
            return []
        end = time.monotonic() + _ANSWER_S
        silent = within(self._call, None)
        while silent and time.monotonic() < end:
            time.sleep(_POLL_S)
            silent = within(partial(self._absent, silent), None)
        return silent

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _call(self) -> list[int]:
        self._store.set(self._alarm, "")
        self._answer()
        self._store.check([self._alarm])  # the answer comes when it is written
        return list(range(dist.get_world_size()))

    def _answer(self) -> None:
        self._store.set(self._key_of(dist.get_rank()), "")

    def _absent(self, ranks: Sequence[int]) -> list[int]:
        """Return who has not answered, by few messages where that is nobody or a few."""
        if self._store.check([self._key_of(r) for r in ranks]):
            return []
        if len(ranks) == 1:
            return [*ranks]
        half = len(ranks) // 2
        return self._absent(ranks[:half]) + self._absent(ranks[half:])

    def _key_of(self, rank: int) -> str:
        return f"{self._key}/here/{rank}"

    def _write(self) -> None:
        assert self._text is not None
        self._store.set(self._key, self._text)
        self._store.set(self._alarm, "")
        self._store.check([self._alarm])  # as above

    def _look(self) -> bool:
        try:
            if self._store.check([self._alarm]):
                self._answer()
                if self._store.check([self._key]):
                    self._text = self._store.get(self._key).decode()
        except RuntimeError:
            gone = f"{self._keeper} ended without a word of why\nLook at the log of rank 0."
            self._text = self._text or gone
        return self._text is None

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S) and self._look():
            with suppress(RuntimeError):  # rank 0 has gone: the next look says so
                self._each_time()
