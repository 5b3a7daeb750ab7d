"""Unwritten: where no checkpoint is written, as the disk takes none, or a step has failed."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from lightning_cyclic.compat import ModelCheckpoint, Trainer, rank_zero_warn
from lightning_cyclic.errors import ConfigurationError

# below Lightning's, which is printed
_log = logging.getLogger("lightning.pytorch.lightning_cyclic")
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES}


def refusal(errors: Mapping[int, BaseException]) -> OSError | None:
    """Return one error for those of several ranks, if the disk takes nothing of any of them."""
    found = {r: x for r, x in errors.items() if isinstance(x, OSError)}
    numbers = [x.errno for x in found.values()]
    if len(found) < len(errors) or not _OF_THE_DISK.issuperset(numbers):
        return None
    each = "; ".join(f"rank {r}: {x.strerror}" for r, x in sorted(found.items()))
    return OSError(numbers[0], each)


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


@final
class Unwritten:
    """Let training go on where a checkpoint cannot be written, and keep what has been written.

    Callbacks that save delete older files behind each new one, and do not ask whether it is there.
    """

    def __init__(self) -> None:
        self.keeps_all = False

    @contextmanager
    def warning(self, path: Path, *, trains: bool) -> Iterator[None]:
        """Run the body, which writes a checkpoint; warn where the disk takes nothing.

        Args:
            path: of the checkpoint.
            trains: whether there is a training to go on; else the error is the caller's.
        """
        self.keeps_all = True  # until the checkpoint is there
        try:
            yield
        except (OSError, ConfigurationError) as error:
            disk = error if isinstance(error, OSError) else error.__cause__
            if not trains or not isinstance(disk, OSError) or disk.errno not in _OF_THE_DISK:
                raise
            rank_zero_warn(
                f"The checkpoint {path} could not be written ({disk.strerror}). Training goes "
                "on, and no older checkpoint is deleted until one can be written again. Make "
                "room, or stop and let ModelCheckpoint(dirpath=...) name another disk."
            )
        else:
            self.keeps_all = False
