"""The failure board: why a worker fails, for those who see only a closed connection."""

from __future__ import annotations

import contextlib
import threading
from typing import final

import torch.distributed as dist

_POLL_S = 0.5


@final
class FailureBoard:
    """Tell every worker why one fails, over the key-value store of the default process group.

    A worker whose peer is gone sees only a closed connection; the store has the reason. The
    store lives in worker 0, so a watcher reads it twice a second while worker 0 still lives.

    Args:
        key: where in the store the reason is written.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._store = dist.distributed_c10d._get_default_store()
        self._text: str | None = None
        self._has_lingered = False
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cyclic-failures", daemon=True)
        self._watcher.start()

    def report(self, text: str) -> None:
        """Write the reason unless another worker was first; wait until others could read it."""
        if self.read() is None:
            self._text = text
            with contextlib.suppress(RuntimeError):  # rank 0, and with it the store, may be gone
                self._store.set(self._key, text)
        if dist.get_rank() == 0 and not self._has_lingered:
            self._has_lingered = True
            self._closed.wait(3 * _POLL_S)  # the store ends with this process

    def read(self) -> str | None:
        """Return the reason that some worker wrote, or None."""
        if self._text is None:
            self._look()
        return self._text

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _look(self) -> bool:
        try:
            if self._store.check([self._key]):
                self._text = self._store.get(self._key).decode()
        except RuntimeError:
            return False
        return self._text is None

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S) and self._look():
            pass
