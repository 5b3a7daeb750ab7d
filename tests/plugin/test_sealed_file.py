"""A damaged checkpoint is refused; one that is being written is the old or the new one."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import pytest
import torch
from lightning.fabric.utilities.cloud_io import _atomic_save

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin import sealed_file
from lightning_cyclic.plugin.checkpoint_folder import write_folder
from tests import processes
from tests.runtime.transport.rings import join

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


# ---------------------------------------------------------------------- folders


def sealed_folder(path: Path, seed: int) -> Path:
    """Write a folder as one process of a training does."""
    state = checkpoint(seed)["state_dict"]
    saved = {"state_dict": state, "optimizer_states": [], "global_step": seed}
    write_folder(saved, path, {}, None)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sealed_folder(tmp_path / "a.ckpt", 1)


def files_of(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def assert_folder_refused(folder: Path, *names: str, words: str = "has been changed") -> None:
    """Refuse it, by the name of one of these files, with the folder's own."""
    with pytest.raises(ConfigurationError) as raised:
        sealed_file.check(folder)
    text = str(raised.value)
    assert text.startswith(f"the checkpoint {folder} {words}")
    assert any(f" {name}; allowed: files as they were written; copy it" in text for name in names)


def test_a_folder_has_a_digest_of_each_file(folder: Path) -> None:
    assert files_of(folder) == [".metadata", "__0_0.distcp", "digests.b2", "meta.pt"]
    *lines, seal = (folder / "digests.b2").read_text().splitlines()
    assert sorted(line.split("  ")[1] for line in lines) == [
        ".metadata",
        "__0_0.distcp",
        "meta.pt",
    ]
    assert seal.startswith("# lightning_cyclic blake2b ")
    sealed_file.check(folder)
    assert sealed_file.problem_of(folder) is None
    if shutil.which("b2sum"):
        command = ["b2sum", "--length", "256", "--check", "--strict", "digests.b2"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("to", ["the name", "what it had"])
def test_a_folder_that_cannot_take_its_name_leaves_what_has_it(
    to: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, before = Path(shutil.copytree(folder, tmp_path / "a.ckpt.part")), tmp_path / "before"
    lines = "".join((new / "digests.b2").read_text().splitlines(keepends=True)[:-1])
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if (path, target) == ((new, folder) if to == "the name" else (folder, before)):
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(OSError, match="No space"):
        sealed_file.seal_folder(new, folder, lines, before)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole
    assert not before.exists()
    monkeypatch.undo()
    sealed_file.seal_folder(new, folder, lines, before)
    assert not new.exists()
    for path in (folder, before):
        sealed_file.check(path)


def test_every_flip_and_every_truncation_in_a_folder_is_refused(folder: Path) -> None:
    choice = random.Random(5)
    for name in files_of(folder):
        file = folder / name
        whole = file.read_bytes()
        for _ in range(12):
            damaged = bytearray(whole)
            damaged[choice.randrange(len(whole))] ^= 1 << choice.randrange(8)
            file.write_bytes(damaged)
            assert_folder_refused(folder, name)
        for end in [0, len(whole) - 1, *(choice.randrange(len(whole)) for _ in range(5))]:
            file.write_bytes(whole[:end])
            assert_folder_refused(folder, name)
        file.write_bytes(whole)
    sealed_file.check(folder)


def test_every_file_that_is_gone_from_a_folder_is_named(folder: Path) -> None:
    for name in files_of(folder):
        (folder / name).rename(folder / "aside")
        assert_folder_refused(folder, name, words="is not whole: it lacks")
        (folder / "aside").rename(folder / name)
    sealed_file.check(folder)


def swap(a: Path, b: Path) -> None:
    a_bytes = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(a_bytes)


def test_swapped_files_of_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    other = sealed_folder(tmp_path / "b.ckpt", 2)
    for a, b in combinations(["__0_0.distcp", ".metadata", "meta.pt"], 2):
        swap(folder / a, folder / b)
        assert_folder_refused(folder, a, b)
        swap(folder / a, folder / b)
    sealed_file.check(folder)
    for name in files_of(folder):
        whole = (folder / name).read_bytes()
        assert whole != (other / name).read_bytes()
        shutil.copy(other / name, folder / name)
        assert_folder_refused(folder, ".metadata" if name == "digests.b2" else name)
        (folder / name).write_bytes(whole)


def test_ranks_share_the_files_of_a_folder(folder: Path) -> None:
    for name in (".metadata", "__0_0.distcp", "meta.pt"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1])
        found = [sealed_file.problem_of(folder, rank, 2) for rank in (0, 1)]
        assert sorted(found, key=str) == [
            None,
            f"has been changed since it was written, in {name}",
        ]
        (folder / name).write_bytes(whole)


def check_together(path: str) -> tuple[int, str]:
    """Return how often this rank opens a file to check it, and what it is told of it."""
    join()
    opened = []
    sys.addaudithook(lambda event, given: opened.append(given[0]) if event == "open" else None)
    try:
        sealed_file.check(path, together=True)
    except ConfigurationError as error:
        return list(map(str, opened)).count(path), str(error)
    return list(map(str, opened)).count(path), ""


@pytest.mark.multi
def test_one_rank_of_a_host_reads_a_file_and_tells_the_others(path: Path) -> None:
    (first, said), (second, also) = processes.run(check_together, 2, str(path))
    assert (first > 0, second, said, also) == (True, 0, "", "")
    whole = path.read_bytes()
    path.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    (first, said), (second, also) = processes.run(check_together, 2, str(path))
    assert (first > 0, second) == (True, 0)
    assert said == also
    assert "has been changed since it was written; allowed: files as they were" in said


def test_folders_without_digests_are_checked_by_their_index(folder: Path) -> None:
    (folder / "digests.b2").unlink()
    torch.save(torch.load(folder / "meta.pt", weights_only=True), folder / "meta.pt")
    sealed_file.check(folder)
    file = folder / "__0_0.distcp"
    os.truncate(file, 100)
    assert_folder_refused(folder, file.name, words="has 100 bytes of ")
    file.unlink()
    assert_folder_refused(folder, file.name, words="is not whole: it lacks")
    (folder / ".metadata").write_bytes(b"no index")
    assert_folder_refused(folder, ".metadata", words="has an index that cannot be read (Un")
    (folder / "meta.pt").unlink()
    assert "without meta.pt, so that it is no checkpoint" in str(sealed_file.problem_of(folder))


def test_files_and_folders_are_offered_for_each_other(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "b.ckpt"
    sealed_file.write(checkpoint(), file)
    (tmp_path / "link.ckpt").symlink_to("nowhere")
    (tmp_path / "empty.ckpt").mkdir()
    for path, other in ((folder / "meta.pt", file), (file, folder)):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(ConfigurationError) as raised:
            sealed_file.check(folder if other is file else file)
        assert str(raised.value).endswith(f'use ckpt_path="{other}"')
        path.write_bytes(whole)
    with pytest.raises(
        ConfigurationError, match="is a folder without meta.pt and .metadata"
    ) as no:
        sealed_file.check(tmp_path)
    assert str(no.value).endswith((f'"{file}"', f'"{folder}"'))  # in it


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    said = "cannot be read (No such file or directory)"
    assert sealed_file.problem_of(tmp_path / "gone.ckpt") == said
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        sealed_file.check(tmp_path / "gone.ckpt")


# ---------------------------------------------------------------------- while it is written


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
