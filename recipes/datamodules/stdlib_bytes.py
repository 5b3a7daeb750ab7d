"""The Python standard library's own source as text: a few megabytes that need no download."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path
from typing import final

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

_ONE_FILE_IN = 10  # goes to validation


@final
class Windows(Dataset[Tensor]):
    """Cut text into windows of ``block_size + 1`` bytes; neighbours share one byte.

    The shared byte is the target of one window and the first input of the next, so every byte
    but the first is predicted once.
    """

    def __init__(self, text: bytes, block_size: int) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.block_size = block_size

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.block_size)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.block_size
        return self.tokens[start : start + self.block_size + 1].long()


@final
class StdlibBytes(L.LightningDataModule):
    """Serve windows of the standard library's source, split into training and validation by file.

    The text depends on the Python version alone: files are ordered and split by a hash of their
    names, so that a small ``max_bytes`` is a fair sample.

    Args:
        block_size: Bytes that the model sees at once.
        batch_size: Windows of one worker's batch.
        max_bytes: Text to use for training; validation gets a tenth of it at most.
        root: Folder of Python files; the running interpreter's standard library if ``None``.
    """

    def __init__(
        self, *, block_size: int, batch_size: int, max_bytes: int, root: str | None = None
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.root = Path(root or sysconfig.get_path("stdlib"))

    def setup(self, stage: str) -> None:
        """Read the files."""
        train, val = split_by_file(source_files(self.root), self.root)
        self.train = Windows(read(train, self.max_bytes), self.block_size)
        self.val = Windows(read(val, self.max_bytes // _ONE_FILE_IN), self.block_size)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return shuffled batches of windows (N, block_size + 1)."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation windows in order."""
        return DataLoader(self.val, self.batch_size)


def source_files(root: Path) -> list[Path]:
    """List the Python files below a folder, without installed packages and tests."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = (path for path in root.rglob("*.py") if path.is_file())
    return [path for path in files if skipped.isdisjoint(path.relative_to(root).parts)]


def split_by_file(files: list[Path], root: Path) -> tuple[list[Path], list[Path]]:
    """Order the files by a hash of their names and keep one in ten for validation."""
    hashes = {path: zlib.crc32(path.relative_to(root).as_posix().encode()) for path in files}
    ordered = sorted(files, key=lambda path: (hashes[path], path))
    val = [path for path in ordered if hashes[path] % _ONE_FILE_IN == 0]
    return [path for path in ordered if hashes[path] % _ONE_FILE_IN], val


def read(files: list[Path], max_bytes: int) -> bytes:
    """Join the files' bytes, up to a limit."""
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return bytes(text[:max_bytes])
