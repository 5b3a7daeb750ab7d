"""Unwritten: what becomes of a run whose disk takes no checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from lightning.pytorch.utilities import rank_zero_warn

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


@final
class Unwritten:
    """Let training go on where a checkpoint cannot be written, and keep what has been written.

    Callbacks that save delete older files behind each new one, and do not ask whether it is there.
    """

    def __init__(self) -> None:
        self.keeps_all = False

    @contextmanager
    def warning(self, path: Path, *, trains: bool) -> Iterator[None]:
        """Run the body, which writes a file; warn where the disk is full or not to be written.

        Args:
            path: of the file.
            trains: whether there is a training to go on; else the error is the caller's.
        """
        self.keeps_all = True  # until the file is there
        try:
            yield
        except OSError as error:
            if not trains or error.errno not in _OF_THE_DISK:
                raise
            rank_zero_warn(
                f"The checkpoint {path} could not be written ({error.strerror}). Training goes "
                "on, and no older checkpoint is deleted until one can be written again. Make "
                "room, or stop and let ModelCheckpoint(dirpath=...) name another disk."
            )
        else:
            self.keeps_all = False
