"""Checkpoint files: written whole and sealed, at once or in a thread while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, final

from lightning_cyclic.compat import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from lightning_cyclic.plugin import checkpoint as ckpt
from lightning_cyclic.plugin import sealed_file
from lightning_cyclic.plugin.background import MOST_LEFT, Background, copied
from lightning_cyclic.plugin.unwritten import Unwritten

_REQUEUED = "hpc_ckpt_"  # begins the name of what Lightning saves before it requeues a job


@final
class CheckpointFiles:
    """Write and remove the checkpoints of a run, on the rank that does.

    What AsyncCheckpointIO is asked for is done here: files that are whole, sealed, in order.

    Args:
        io: gives the Trainer's plugin for files, which is known late.
        is_fitting: says whether a training goes on now.
    """

    def __init__(self, io: Callable[[], CheckpointIO], is_fitting: Callable[[], bool]) -> None:
        self._io = io
        self._is_fitting = is_fitting
        self._unwritten = Unwritten()
        self._background = Background()

    def has(self, path: Any) -> bool:
        """Say whether a checkpoint is a file here, and no plugin has its own way to it."""
        io = self._io()
        writer = io.checkpoint_io if type(io) is AsyncCheckpointIO else io
        return type(writer) is TorchCheckpointIO and ckpt.is_local(path)

    def is_behind(self, path: Any) -> bool:
        """Say whether a thread writes a file, and removes it, while training goes on."""
        return type(self._io()) is AsyncCheckpointIO and self.has(path) and self._is_fitting()

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write a file, or have it written while training goes on."""
        write = partial(self._write, path=path, trains=self._is_fitting())
        is_last = path.name.startswith(_REQUEUED)  # the job is requeued as soon as it is there
        if self.is_behind(path) and not is_last:
            self._background.wait(MOST_LEFT)
            self._background.add(partial(write, copied(checkpoint)))
        else:
            self._background.wait()
            write(checkpoint)

    def warning(self, path: Path) -> AbstractContextManager[None]:
        """Run the body, which writes a checkpoint; warn where the disk takes nothing."""
        return self._unwritten.warning(path, trains=self._is_fitting())

    def remove(self, path: Any, remove: Callable[[Any], None], *, writes: bool) -> None:
        """Remove a checkpoint, but for one that the last should have replaced and could not.

        Args:
            path: of the checkpoint.
            remove: does so.
            writes: whether this rank is the one that writes files.
        """
        job = partial(self._remove, path, remove)
        if self.is_behind(path) and writes:
            self._background.add(job)  # behind that one
        else:
            job()

    def wait(self) -> None:
        """Wait until what a thread writes is there."""
        self._background.wait()

    def close(self) -> None:
        """Finish what a thread writes, and end it."""
        self._background.close()

    def _write(self, checkpoint: dict[str, Any], path: Path, *, trains: bool) -> None:
        with self._unwritten.warning(path, trains=trains):
            sealed_file.write(checkpoint, path)

    def _remove(self, path: Any, remove: Callable[[Any], None]) -> None:
        if not self._unwritten.keeps_all:
            remove(path)
