"""The failure board: why a rank fails, for those who see only a closed connection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import final

import torch.distributed as dist

from lightning_cyclic.runtime.transport.bounded import within

_POLL_S = 0.5


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

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _write(self) -> None:
        assert self._text is not None
        self._store.set(self._key, self._text)
        self._store.check([self._key])  # the answer comes when it is written

    def _look(self) -> bool:
        try:
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
