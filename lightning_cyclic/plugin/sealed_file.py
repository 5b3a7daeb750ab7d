"""Checkpoints that are whole or not there, and that say so themselves: files, and folders.

    | archive of torch.save, its last record | comment: name of this package, blake2b of the rest |

Such a file is written beside its target, brought to the disk, and takes the target's name in one
step: whatever ends a run, there is the old file or the new one. Its archive has a comment with a
digest, which everybody else's readers skip, so that plain Lightning loads it. Files without one
are checked by the sums that archives have of their members.

    FOLDER/digests.b2    blake2b of each file, as "b2sum --length 256 --check digests.b2" reads it,
                         and in the last line that of the lines before

A folder has a file of digests, which nobody else reads. Those without one are checked for the
files, and the sizes, that their index names.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final
from zipfile import BadZipFile, ZipFile

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_cyclic.compat import _METADATA_FILENAME as META
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.agreement import gather_texts

INDEX: Final = ".metadata"  # of a folder, by torch.distributed.checkpoint
DIGESTS: Final = "digests.b2"
_MAGIC: Final = b"lightning_cyclic blake2b "
_DIGEST_BYTES: Final = 32
_COMMENT_BYTES: Final = len(_MAGIC) + 2 * _DIGEST_BYTES  # in hexadecimal digits
_END: Final = b"PK\5\6"  # an archive's last record: 22 bytes, of which the last two count
_END_BYTES: Final = 22  # those of the comment behind it
_BLOCK_BYTES: Final = 1 << 22
_CHANGED: Final = "has been changed since it was written"


def write(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint without a copy of it in memory; there is the whole file, or none.

    Raises:
        OSError: the disk is full, or not to be written; a file that was there is there still.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w+b") as file:
            with naming_disk():
                torch.save(checkpoint, file)
            _seal(file)
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def naming_disk() -> Iterator[None]:
    """Run the body, which saves by torch; raise the disk's error, and not torch's behind it."""
    try:
        yield
    except RuntimeError as error:  # about its archive, while it handles the disk's
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def digests_of(folder: Path, names: Iterable[str]) -> str:
    """Return a line for each of these files in a folder."""
    return "".join(f"{_digest_of(folder / name)}  {name}\n" for name in names)


def seal_folder(folder: Path, path: Path, lines: str, before: Path) -> None:
    """Write down what digests a folder's files have, and let it take its name.

    Args:
        folder: of which all other files are written, and brought to the disk.
        path: that it is to have.
        lines: the digests of its files.
        before: the path that gets what had that name; nothing is there.

    Raises:
        OSError: the disk is full, or not to be written; what had the name has it still.
    """
    with (folder / DIGESTS).open("wb") as file:
        file.write(_with_seal(lines.encode()))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    if gives_way := path.is_symlink() or path.exists():
        path.rename(before)
    try:
        folder.rename(path)
    except OSError:
        if gives_way:
            before.rename(path)
        raise
    _sync_folder(path.parent)


def check(path: str | Path, *, together: bool = False) -> None:
    """Refuse a file, or a folder, that is not as it was written.

    Args:
        path: of what this package wrote, or any other writer of torch's archives, or of folders.
            A file that is no archive is left to who reads it.
        together: whether all ranks call it. Then each reads a part of a folder's files, and of a
            file the first rank of each host reads all.

    Raises:
        FileNotFoundError: there is none.
        ConfigurationError: with what to go on from instead, if there is something beside it; on
            all ranks, where they check together.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    rank, num_ranks, reads = 0, 1, True
    if together and dist.is_initialized() and dist.get_world_size() > 1:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        hosts = gather_texts(socket.gethostname())
        reads = path.is_dir() or hosts.index(hosts[rank]) == rank
    told = gather_texts if num_ranks > 1 else lambda text: [text]
    found = problem_of(path, rank, num_ranks) if reads else None
    problem = next(filter(None, told(found or "")), None)
    if problem is None:
        return
    todo, *_ = told(_instead_of(path) if rank == 0 else "")
    raise ConfigurationError(
        f"the checkpoint {path} {problem}; allowed: files as they were written; copy it anew, or "
        f"{todo}"
    )


def problem_of(path: Path, rank: int = 0, num_ranks: int = 1) -> str | None:
    """Say what is wrong with a checkpoint, a file or a folder.

    Args:
        path: of it.
        rank: of this process, which reads its part of a folder's files. [all]
        num_ranks: that read the others.

    Returns:
        Words to be read behind its name; None for nothing, or for a file that is no archive.
    """
    try:
        is_folder = path.is_dir()
        return _problem_of_folder(path, rank, num_ranks) if is_folder else _problem_of_file(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _problem_of_file(path: Path) -> str | None:
    num_bytes, tail = path.stat().st_size, _tail(path)
    if _MAGIC in tail:
        return None if _is_as_sealed(path, tail) else _CHANGED
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return None
    is_complete = tail[-_END_BYTES:].startswith(_END) and tail.endswith(b"\0\0")
    if not is_complete:
        return f"has {num_bytes} bytes and is not whole"
    try:
        with ZipFile(path) as archive:
            member = archive.testzip()
    except (BadZipFile, NotImplementedError, EOFError, ValueError, struct.error) as error:
        return f"is no whole archive ({error})"
    return None if member is None else f"{_CHANGED}, in {member}"


def _problem_of_folder(folder: Path, rank: int, num_ranks: int) -> str | None:
    if not (folder / DIGESTS).is_file():
        return _problem_of_unsealed(folder)
    told = (folder / DIGESTS).read_bytes()
    lines = told[: told.rfind(b"# ")]
    if told != _with_seal(lines):
        return f"{_CHANGED}, in {DIGESTS}"
    for line in lines.decode().splitlines()[rank::num_ranks]:
        digest, _, name = line.partition("  ")
        try:
            is_same = _digest_of(folder / name) == digest
        except FileNotFoundError:
            return f"is not whole: it lacks {name}"
        except OSError as error:
            return f"cannot be read ({error.strerror}), in {name}"
        if not is_same:
            return f"{_CHANGED}, in {name}"
    return None


def _problem_of_unsealed(folder: Path) -> str | None:
    missing = [name for name in (META, INDEX) if not (folder / name).is_file()]
    if missing:
        return f"is a folder without {' and '.join(missing)}, so that it is no checkpoint"
    if _MAGIC in _tail(folder / META):
        return f"is not whole: it lacks {DIGESTS}"
    try:
        index = FileSystemReader(folder).read_metadata()
    except Exception as error:  # whatever a pickle of other bytes comes to
        return f"has an index that cannot be read ({type(error).__name__}), in {INDEX}"
    ends: dict[str, int] = defaultdict(int)
    for info in (index.storage_data or {}).values():
        ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
    for name, end in sorted(ends.items()):
        if not (folder / name).is_file():
            return f"is not whole: it lacks {name}"
        if (size := (folder / name).stat().st_size) < end:
            return f"has {size} bytes of {end} and is not whole, in {name}"
    return None


def _instead_of(path: Path) -> str:
    """Say what to go on from: the newest checkpoint that is whole, beside one or within."""
    nearby = [*path.parent.iterdir(), *(path.iterdir() if path.is_dir() else ())]
    others = [x for x in nearby if x.exists() and (x.suffix == ".ckpt" or (x / META).is_file())]
    for other in sorted(others, key=lambda x: -x.stat().st_mtime):
        if other != path and problem_of(other) is None:
            return f'use ckpt_path="{other}"'
    return "go on from another checkpoint"


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


def _with_seal(lines: bytes) -> bytes:
    """Return the contents of a file of digests."""
    seal = hashlib.blake2b(lines, digest_size=_DIGEST_BYTES).hexdigest()
    return lines + b"# " + _MAGIC + seal.encode() + b"\n"


def _tail(path: Path) -> bytes:
    """Return the last record of an archive, with its comment, if it has one."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _END_BYTES - _COMMENT_BYTES, 0))
        return file.read()


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return _digest(file, path.stat().st_size)


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
