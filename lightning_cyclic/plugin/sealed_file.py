"""Checkpoint files that are whole or not there, and that say so themselves.

    | archive of torch.save, its last record | comment: name of this package, blake2b of the rest |

Such a file is written beside its target, brought to the disk, and takes the target's name in one
step: whatever ends a run, there is the old file or the new one. Its archive has a comment with a
digest, which everybody else's readers skip, so that plain Lightning loads it. Files without one
are checked by the sums that archives have of their members.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final
from zipfile import BadZipFile, ZipFile

import torch

from lightning_cyclic.errors import ConfigurationError

_MAGIC: Final = b"lightning_cyclic blake2b "
_DIGEST_BYTES: Final = 32
_COMMENT_BYTES: Final = len(_MAGIC) + 2 * _DIGEST_BYTES  # in hexadecimal digits
_END: Final = b"PK\5\6"  # an archive's last record: 22 bytes, of which the last two count
_END_BYTES: Final = 22  # those of the comment behind it
_BLOCK_BYTES: Final = 1 << 22


def write(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint without a copy of it in memory; there is the whole file, or none.

    Raises:
        OSError: the disk is full, or not to be written; a file that was there is there still.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w+b") as file:
            _save(checkpoint, file)
            _seal(file)
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def check(path: str | Path) -> None:
    """Refuse a file that is not as it was written.

    Args:
        path: of a file, of this package's or of any other writer of torch's archives. What is no
            archive is left to who reads it.

    Raises:
        FileNotFoundError: there is none.
        ConfigurationError: with what to go on from instead, if there is something beside it.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if (problem := problem_of(Path(path))) is None:
        return
    others = sorted(Path(path).parent.glob("*.ckpt"), key=_age)
    whole = (x for x in others if x != Path(path) and x.is_file() and problem_of(x) is None)
    other = next(whole, None)
    todo = "go on from another checkpoint" if other is None else f'use ckpt_path="{other}"'
    raise ConfigurationError(
        f"the checkpoint {path} {problem}; allowed: files as they were written; copy it anew, or "
        f"{todo}"
    )


def problem_of(path: Path) -> str | None:
    """Say what is wrong with a file; None for nothing, or for what is no archive."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
        file.seek(max(num_bytes - _END_BYTES - _COMMENT_BYTES, 0))
        tail = file.read()
    if _MAGIC in tail:
        return None if _is_as_sealed(path, tail) else "has been changed since it was written"
    if not is_archive:
        return None
    is_complete = tail[-_END_BYTES:].startswith(_END) and tail.endswith(b"\0\0")
    if not is_complete:
        return f"has {num_bytes} bytes and is not whole"
    try:
        with ZipFile(path) as archive:
            member = archive.testzip()
    except (BadZipFile, NotImplementedError, EOFError, ValueError, struct.error) as error:
        return f"is no whole archive ({error})"
    return None if member is None else f"has been changed since it was written, in {member}"


def _save(checkpoint: Mapping[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:  # torch's, about its archive, while it handles the disk's
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _seal(file: BinaryIO) -> None:
    """Write the comment of an archive that has none."""
    end = file.seek(0, os.SEEK_END)
    digest = _digest(file, end - 2)
    file.seek(end - 2)
    file.write(struct.pack("<H", _COMMENT_BYTES) + _MAGIC + digest.encode())
    file.flush()


def _is_as_sealed(path: Path, tail: bytes) -> bool:
    begins = len(tail) - _COMMENT_BYTES
    size = struct.pack("<H", _COMMENT_BYTES)
    is_formed = tail[:4] == _END and tail[begins - 2 : begins] == size
    if not is_formed or not tail[begins:].startswith(_MAGIC):
        return False
    with path.open("rb") as file:
        end = path.stat().st_size - _COMMENT_BYTES - 2
        return _digest(file, end).encode() == tail[-2 * _DIGEST_BYTES :]


def _digest(file: BinaryIO, end: int) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for block in _blocks(file, end):
        digest.update(block)
    return digest.hexdigest()


def _blocks(file: BinaryIO, end: int) -> Iterator[bytes]:
    file.seek(0)
    while (left := end - file.tell()) > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
        yield block


def _sync_folder(folder: Path) -> None:
    """Bring a folder's new name of a file to the disk, where its file system can."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # the file is there: no reason for training to end
            os.fsync(opened)
    finally:
        os.close(opened)


def _age(path: Path) -> float:
    return -path.stat().st_mtime
