"""A file is whole or not there, a damaged one is refused, and a run goes on from the last one."""

from __future__ import annotations

import pickle
import random
import resource
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import _atomic_save
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.plugins.io import async_plugin

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.checkpoint_file import check_file, part_of, write_whole
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.transport.crew import Crew
from tests.harness import processes
from tests.harness.interrupted import contents, difference
from tests.harness.rows import more
from tests.harness.runs import Result, run, saving, trained
from tests.harness.trainers import assert_same
from tests.modules.classifier import Classifier, micro_batches


def checkpoint(seed: int = 0, size: int = 40) -> dict[str, Any]:
    torch.manual_seed(seed)
    state = {f"layer.{k}": torch.randn(size, size) for k in range(6)}
    return {"state_dict": state, "global_step": seed}


def assert_is(path: Path, seed: int, size: int = 40, **flags: Any) -> None:
    read = torch.load(path, weights_only=True, **flags)
    assert read["global_step"] == seed
    assert_same(read["state_dict"], checkpoint(seed, size)["state_dict"])


@pytest.mark.parametrize("write", [write_whole, _atomic_save])
def test_no_damaged_file_is_read_as_another_one(write: Any, tmp_path: Path) -> None:
    path, choice, num_refused = tmp_path / "run" / "a.ckpt", random.Random(1), 0
    path.parent.mkdir()
    write(checkpoint(), path)
    check_file(path, Assembly(), reads=True)
    for mmap in (False, True):
        assert_is(path, 0, mmap=mmap)
    assert [x.name for x in path.parent.iterdir()] == ["a.ckpt"]
    whole = path.read_bytes()
    places = choice.sample(range(len(whole)), 300)
    for place in [*places, *range(len(whole) - 60, len(whole))]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << choice.randrange(8)
        path.write_bytes(damaged)
        try:
            check_file(path, Assembly(), reads=True)
        except ConfigurationError:
            num_refused += 1
            continue
        with suppress(RuntimeError):  # the list of members, which torch looks at itself
            assert_is(path, 0)  # a time, or room between members
    assert num_refused > 270
    for end in choice.sample(range(len(whole)), 60):
        path.write_bytes(whole[:end])
        with pytest.raises(ConfigurationError, match=f"has {end} bytes and is no whole archive"):
            check_file(path, Assembly(), reads=True)


def write_for_ever(path: Path) -> None:
    for k in range(1, 10**6):
        write_whole(checkpoint(k, 200), path)


def test_whoever_is_killed_while_writing_leaves_a_whole_file(tmp_path: Path) -> None:
    path, choice, seen = tmp_path / "a.ckpt", random.Random(4), set()
    write_whole(checkpoint(0, 200), path)
    for _ in range(4):
        before = path.stat().st_mtime_ns
        child = processes.fork_server().Process(target=write_for_ever, args=(path,))
        child.start()
        until = time.monotonic() + 60
        while path.stat().st_mtime_ns == before and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(choice.uniform(0, 0.02))
        child.kill()
        child.join()
        check_file(path, Assembly(), reads=True)
        seed = torch.load(path, weights_only=True)["global_step"]
        assert_is(path, seed, 200)
        seen.add(seed)
    assert 0 not in seen  # it was written


def test_a_disk_that_takes_nothing_is_named_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_whole(checkpoint(1), path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(checkpoint(2), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_is(path, 1)
    assert [x.name for x in tmp_path.iterdir()] == ["a.ckpt"]


def train(
    strategy: Any, folder: Path, num_steps: int, path: str | Path = "last", plugins: Any = (),
    how: Any = trained,
) -> list[Result]:  # fmt: skip
    ends: list[Result] = how(
        partial(Classifier, "batchnorm_mlp", "adamw"), strategy,
        data=partial(micro_batches, "vectors", 3), look=begun_by, max_steps=num_steps,
        max_epochs=-1, plugins=[*plugins], ckpt_path=path,
        **saving(folder, 2, save_last=True, save_top_k=1),
    )  # fmt: skip
    return ends


def begun_by(trainer: Any, module: Any) -> Any:
    return trainer.ckpt_path


def assert_ends(ranks: list[Result], expected: list[Result], num_steps: int) -> None:
    for rank in ranks:
        assert rank.global_step == num_steps
        assert_same(rank.weights, expected[0].weights)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("preset", "is_folder"), [("cyclic_dp", False), ("1f1b", True), more("pipedream_2bw", False)]
)
def test_a_run_goes_on_from_the_last(preset: str, is_folder: bool, tmp_path: Path) -> None:
    strategy = {"preset": preset, "save_distributed_checkpoint": is_folder}
    expected = train(strategy, tmp_path / "whole", 4)
    mine, last = tmp_path / "mine", tmp_path / "mine" / "last.ckpt"
    assert [rank.found for rank in train(strategy, mine, 2)] == [None, None]
    part_of(last).write_bytes(b"of a run that was killed, and newer")
    ranks = train(strategy, mine, 4)
    assert [rank.found for rank in ranks] == [str(last)] * 2
    assert_ends(ranks, expected, 4)


@pytest.mark.multi
@pytest.mark.skipif(not hasattr(async_plugin, "_clone_tensor"), reason="Lightning copies nothing")
def test_lightnings_thread_writes_the_same(tmp_path: Path) -> None:
    files = [tmp_path / name / "step=2.ckpt" for name in ("now", "later")]
    for file, plugins in zip(files, ([], [AsyncCheckpointIO()]), strict=True):
        train("pipedream_2bw", file.parent, 3, plugins=plugins)
    assert difference(*map(contents, files)) is None
    file.write_bytes(file.read_bytes()[:-9])
    for end in train("1f1b", tmp_path, 8, file, [AsyncCheckpointIO()], run):
        assert "is no whole archive of torch.save" in end.text


class Elsewhere(CheckpointIO):
    """Keeps what it is given in a file of its own kind."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(b"mine" + pickle.dumps(checkpoint))

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return dict(pickle.loads(Path(path).read_bytes()[4:]))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink()


@pytest.mark.multi
def test_files_of_ones_own_are_left_to_whoever_writes_them(tmp_path: Path) -> None:
    expected = train("cyclic_dp", tmp_path / "whole", 4)
    for name, its in (("now", Elsewhere), ("later", lambda: AsyncCheckpointIO(Elsewhere()))):
        mine = tmp_path / name
        train("cyclic_dp", mine, 2, plugins=[its()])
        file = mine / "step=2.ckpt"
        assert file.read_bytes()[:4] == b"mine"
        assert_ends(train("cyclic_dp", mine, 4, file, [its()]), expected, 4)


@pytest.mark.multi
def test_all_ranks_refuse_a_damaged_file(tmp_path: Path) -> None:
    train("1f1b", tmp_path, 2)
    path = tmp_path / "last.ckpt"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    said = f"the checkpoint {path} has been changed since it was written"
    for end in train("1f1b", tmp_path, 4, path, how=run):
        assert end.error == "ConfigurationError"
        assert said in end.text


def check_alone(path: Path, reader: int) -> str:
    dist.init_process_group("gloo", rank=processes.here().rank, world_size=2)
    try:
        check_file(path, Assembly(Crew(20.0)), reads=processes.here().rank == reader)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.multi
@pytest.mark.parametrize("reader", [0, 1])
def test_what_one_rank_of_a_host_reads_all_refuse(reader: int, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"no archive")
    said = processes.run(check_alone, 2, path, reader)
    assert said[0] == said[1]
    assert "has 10 bytes and is no whole archive" in said[0]
