"""Unwritten: what becomes of a run whose disk takes no checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import final

from lightning.pytorch.utilities import rank_zero_warn

from lightning_cyclic.errors import ConfigurationError

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES}


def refusal(errors: Mapping[int, BaseException]) -> OSError | None:
    """Return one error for those of several ranks, if the disk takes nothing of any of them."""
    found = {r: x for r, x in errors.items() if isinstance(x, OSError)}
    numbers = [x.errno for x in found.values()]
    if len(found) < len(errors) or not _OF_THE_DISK.issuperset(numbers):
        return None
    each = "; ".join(f"rank {r}: {x.strerror}" for r, x in sorted(found.items()))
    return OSError(numbers[0], each)


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
