"""A damaged checkpoint is refused; one that is being written is the old or the new one."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import pytest
import torch
from lightning.fabric.utilities.cloud_io import _atomic_save

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin import sealed_file
from tests import processes

NUM_DAMAGED = 700


def checkpoint(seed: int = 0, size: int = 40) -> dict[str, Any]:
    torch.manual_seed(seed)
    state = {f"layer.{k}": torch.randn(size, size) for k in range(6)}
    return {"state_dict": state, "global_step": seed, "epoch": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "run" / "a.ckpt"
    sealed_file.write(checkpoint(), made)
    return made


def assert_refused(path: Path, whole: bytes, damaged: bytes) -> None:
    assert damaged != whole
    path.write_bytes(damaged)
    with pytest.raises(ConfigurationError, match="allowed: files as they were written; copy it"):
        sealed_file.check(path)


def test_what_was_written_is_what_plain_torch_reads(path: Path) -> None:
    sealed_file.check(path)
    for mmap in (False, True):
        read = torch.load(path, weights_only=True, mmap=mmap)
        for name, x in checkpoint()["state_dict"].items():
            assert torch.equal(read["state_dict"][name], x)
    assert [x.name for x in path.parent.iterdir()] == ["a.ckpt"]


def test_every_flip_is_refused(path: Path) -> None:
    whole, choice = path.read_bytes(), random.Random(1)
    places = choice.sample(range(len(whole)), NUM_DAMAGED)
    for place in [0, 1, *places, *range(len(whole) - 120, len(whole))]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << choice.randrange(8)
        if damaged[:2] != b"PK":  # no archive to anybody, but sealed
            assert sealed_file._MAGIC in damaged
        assert_refused(path, whole, bytes(damaged))


def test_every_truncation_is_refused(path: Path) -> None:
    whole, choice = path.read_bytes(), random.Random(2)
    ends = choice.sample(range(4, len(whole)), 100) + list(range(len(whole) - 120, len(whole)))
    for end in ends:
        assert_refused(path, whole, whole[:end])


def test_swapped_members_are_refused(path: Path) -> None:
    whole = path.read_bytes()
    with ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    first, second = [n for n in members if "/data/" in n][:2]
    members[first], members[second] = members[second], members[first]
    with ZipFile(path, "w", ZIP_STORED) as archive:
        archive.comment = whole[-sealed_file._COMMENT_BYTES :]
        for name, data in members.items():
            archive.writestr(name, data)
    assert_refused(path, whole, path.read_bytes())


def test_values_in_files_of_plain_lightning_are_checked_by_their_sums(tmp_path: Path) -> None:
    path, choice = tmp_path / "plain.ckpt", random.Random(3)
    _atomic_save(checkpoint(), path)
    sealed_file.check(path)
    whole = path.read_bytes()
    with ZipFile(path) as archive:
        members = [x for x in archive.infolist() if x.file_size > 100]
    for member in members:
        begin = whole.index(member.filename.encode(), member.header_offset)
        damaged = bytearray(whole)
        damaged[begin + 100 + member.file_size // 2] ^= 1 << choice.randrange(8)
        assert_refused(path, whole, bytes(damaged))
    for end in choice.sample(range(4, len(whole)), 50):
        assert_refused(path, whole, whole[:end])


def test_the_newest_that_is_whole_is_offered(path: Path) -> None:
    for k, name in enumerate(("old", "newer", "newest")):
        other = path.with_name(f"{name}.ckpt")
        sealed_file.write(checkpoint(k), other)
        os.utime(other, (k + 1, k + 1))
    other.write_bytes(other.read_bytes()[:-1])
    os.utime(other, (9, 9))
    path.write_bytes(path.read_bytes()[:-1])
    offered = rf'bytes and is not whole|has been changed.*use ckpt_path="{path.parent}/newer.ckpt"'
    with pytest.raises(ConfigurationError, match=offered) as raised:
        sealed_file.check(path)
    assert str(raised.value).endswith(f'use ckpt_path="{path.parent}/newer.ckpt"')


def folders() -> Iterator[str]:
    """Yield a folder on the file system of temporary ones, and one on another."""
    yield tempfile.gettempdir()
    if Path("/dev/shm").is_dir():
        yield "/dev/shm"


def write_for_ever(path: Path) -> None:
    for k in range(1, 10**6):
        sealed_file.write(checkpoint(k, 200), path)


@pytest.mark.parametrize("within", list(folders()))
def test_whoever_is_killed_while_writing_leaves_a_whole_file(within: str) -> None:
    with tempfile.TemporaryDirectory(dir=within) as folder:
        path, choice, seen = Path(folder, "a.ckpt"), random.Random(4), set()
        sealed_file.write(checkpoint(0, 200), path)
        for _ in range(20):
            before = path.stat().st_mtime_ns
            child = processes._context().Process(target=write_for_ever, args=(path,))
            child.start()
            until = time.monotonic() + 60
            while path.stat().st_mtime_ns == before and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(choice.uniform(0, 0.02))
            child.kill()
            child.join()
            sealed_file.check(path)
            read = torch.load(path, weights_only=True)
            expected = checkpoint(read["global_step"], 200)["state_dict"]
            assert all(torch.equal(read["state_dict"][n], x) for n, x in expected.items())
            seen.add(read["global_step"])
        assert len(seen) > 1  # it was written
