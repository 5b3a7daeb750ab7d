"""A checkpoint in one file: written whole or not at all, and checked before it is read.

It is what torch.save writes: an archive with a checksum of each of its members, which torch.load
does not look at. It is written beside its target, brought to the disk, and takes the target's name
in one step, so that whatever ends a run leaves the old file or the new one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final
from zipfile import ZipFile

import torch
from typing_extensions import override

from lightning_cyclic.compat import ModelCheckpoint, TorchCheckpointIO, Trainer, logger
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.checkpoint import is_local
from lightning_cyclic.runtime.assembly import Assembly

_log = logger()


@final
class CheckpointFile(TorchCheckpointIO):
    """Write files as Lightning does, whole or not at all."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if storage_options is None and is_local(path):
            write_whole(checkpoint, Path(path))
        else:
            super().save_checkpoint(checkpoint, path, storage_options)


def write_whole(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint without a copy of it in memory; there is the whole file, or none.

    Raises:
        OSError: the disk is full, or not to be written; a file that was there is there still.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    try:
        with part.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except RuntimeError as error:  # torch's about its archive, while it handles the disk's
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


def part_of(path: Path) -> Path:
    """Return where what is to have a path is written; no name that who looks for "last" finds."""
    digest = hashlib.blake2b(path.name.encode(), digest_size=8).hexdigest()
    return path.with_name(f".{digest}.part")


def sync_folder(folder: Path) -> None:
    """Bring new names of files to the disk, where the file system can."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # the file is there: no reason for training to end
            os.fsync(opened)
    finally:
        os.close(opened)


def check_file(path: Path, assembly: Assembly, *, reads: bool) -> None:
    """Refuse a file that is not as it was written; all ranks must call it, and do so alike.

    Args:
        assembly: these ranks.
        reads: whether this rank is one that reads all of it.

    Raises:
        ConfigurationError: with what was found, on all ranks.
    """
    mine = _problem_of(path) if reads and path.is_file() else ""
    if problem := next(filter(None, assembly.share(mine, "to check a checkpoint")), ""):
        raise ConfigurationError(
            f"the checkpoint {path} {problem}; allowed: files as they were written; copy it anew, "
            "or go on from another checkpoint, fit(ckpt_path=...)"
        )


def _problem_of(path: Path) -> str:
    try:
        with ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # whatever other bytes come to
        return f"has {path.stat().st_size} bytes and is no whole archive of torch.save ({error})"
    return f"has been changed since it was written, in {damaged}" if damaged else ""


@contextmanager
def none_on_exception(trainer: Trainer) -> Iterator[None]:
    """Let callbacks write no checkpoint while the body runs: updates of a step were under way.

    Ranks have weights of several steps then, or parts of them, and nobody may wait for others.
    """
    savers = [
        vars(callback)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and getattr(callback, "save_on_exception", False)
    ]

    def say(*args: Any, **kwargs: Any) -> None:
        if not trainer.is_global_zero:
            return
        _log.warning(  # a warning may be an error, and hide this one
            "No checkpoint is written on this exception: updates were under way, so that weights "
            "and counters would be of different steps. Go on from the newest checkpoint; for "
            "newer ones set ModelCheckpoint(every_n_train_steps=...). Several ranks end behind "
            "the same step by one Ctrl-C, or SIGTERM, where such a checkpoint is written."
        )

    vars(trainer)["save_checkpoint"] = say
    for attributes in savers:
        attributes["on_exception"] = say  # which would say that it has saved
    try:
        yield
    finally:
        for attributes in savers:
            attributes.pop("on_exception", None)
        vars(trainer).pop("save_checkpoint", None)
