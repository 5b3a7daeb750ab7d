"""AsyncCheckpointIO: files of the step at which they were asked for, while training goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_cyclic.plugin import sealed_file
from tests import processes
from tests.corpus import Classifier, assert_same, make_trainer, train_data, weights_of
from tests.rows import chosen
from tests.test_interrupted import contents, difference

pytestmark = pytest.mark.multi
NUM_BATCHES, EVERY = 12, 4
LIMIT_S = 20
STRATEGIES: dict[str, dict[str, Any]] = {
    "cyclic_dp": {"preset": "cyclic_dp", "stages": 4},
    "1f1b": {"preset": "1f1b", "stages": ["net.6"], "num_microbatches": 2},
    "cyclic_zero": {"preset": "cyclic_zero", "stages": 4},
}


class Slow:
    """Write a file when training has gone two steps further, and note what was there before.

    Args:
        error: is raised in place of writing, but for the first file.
    """

    def __init__(self, error: OSError | None = None) -> None:
        self.trainer: Any = None
        self.error = error
        self.before: dict[str, list[str]] = {}  # file -> those that were there
        self.steps: dict[str, int] = {}  # file -> training's, when it was written
        self._write = sealed_file.write
        sealed_file.write = self  # type: ignore[assignment]  # of a process that ends soon

    def __call__(self, checkpoint: Any, path: Path) -> None:
        until, step = time.monotonic() + LIMIT_S, checkpoint["global_step"]
        while self._goes_on and self.trainer.global_step < min(step + 2, NUM_BATCHES):
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.1 if self._goes_on else 1.0)
        if self.error is not None and step > EVERY:
            raise self.error
        self.before[path.name] = sorted(p.name for p in path.parent.glob("*.ckpt"))
        self.steps[path.name] = self.trainer.global_step
        self._write(checkpoint, path)

    @property
    def _goes_on(self) -> bool:
        return not self.trainer._signal_connector.received_sigterm


class Terminate(Callback):
    """Ask rank 1 to stop, in the step behind that of a file."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == EVERY and processes.here().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(
    preset: str, folder: str, background: bool, most: int = -1, end: str = "", error: Any = None
) -> tuple[Any, Slow | None]:
    module, slow = Classifier("batchnorm_mlp", "adamw"), Slow(error) if background else None
    saver = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=EVERY, save_top_k=most, save_on_train_epoch_end=False
    )
    trainer = make_trainer(
        STRATEGIES[preset], max_epochs=1, enable_checkpointing=True,
        callbacks=[saver, *([Terminate()] if end == "SIGTERM" else [])],
        plugins=[AsyncCheckpointIO()] if background else [],
    )  # fmt: skip
    if slow is not None:
        slow.trainer = trainer
    if end == "SIGTERM":
        with pytest.raises(SIGTERMException):
            trainer.fit(module, train_data(module, NUM_BATCHES))
    else:
        trainer.fit(module, train_data(module, NUM_BATCHES))
    if slow is not None:
        slow.trainer, slow._write = None, None  # type: ignore[assignment]  # as it is pickled
    return weights_of(module), slow


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("preset", chosen(STRATEGIES, list(STRATEGIES)[:2]))
def test_a_file_has_the_bits_of_its_step_although_training_goes_on(
    preset: str, tmp_path: Path
) -> None:
    now, later = tmp_path / "now", tmp_path / "later"
    (expected, _), _ = processes.run(fit, 2, preset, str(now), False)
    (weights, slow), (_, other) = processes.run(fit, 2, preset, str(later), True)
    assert_same(weights, expected)
    names = [f"step={k}.ckpt" for k in (12, 4, 8)]
    assert files(now) == files(later) == names
    assert sorted(slow.steps) == names
    assert slow.steps["step=4.ckpt"] >= 6
    assert slow.steps["step=8.ckpt"] >= 10
    assert other.steps == {}  # rank 0 alone writes
    for name in names:
        assert sealed_file._MAGIC in (later / name).read_bytes()[-200:]
        assert sealed_file.problem_of(later / name) is None
        assert difference(contents(now / name), contents(later / name)) is None


def test_a_file_goes_when_the_next_is_there(tmp_path: Path) -> None:
    (_, slow), _ = processes.run(fit, 2, "cyclic_dp", str(tmp_path), True, 1)
    assert slow.before == {
        "step=4.ckpt": [], "step=8.ckpt": ["step=4.ckpt"], "step=12.ckpt": ["step=8.ckpt"],
    }  # fmt: skip
    assert files(tmp_path) == ["step=12.ckpt"]


def test_who_is_asked_to_stop_finishes_what_is_written(tmp_path: Path) -> None:
    (_, slow), _ = processes.run(fit, 2, "1f1b", str(tmp_path), True, 1, "SIGTERM")
    assert slow.before == {"step=4.ckpt": []}
    assert files(tmp_path) == ["step=4.ckpt"]
    sealed_file.check(tmp_path / "step=4.ckpt")


def test_other_errors_than_the_disks_end_the_run(tmp_path: Path) -> None:
    error = PermissionError(13, "Permission denied")
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(fit, 2, "cyclic_dp", str(tmp_path), True, 1, "", error)
    assert "PermissionError: [Errno 13] Permission denied" in caught.value.errors[0]
    assert files(tmp_path) == ["step=4.ckpt"]  # the removal was behind the other in the queue


# ---------------------------------------------------------------------- reading


def go_on(path: str) -> str:
    module = Classifier("batchnorm_mlp", "adamw")
    trainer = make_trainer(STRATEGIES["1f1b"], max_epochs=2, plugins=[AsyncCheckpointIO()])
    try:
        trainer.fit(module, train_data(module, NUM_BATCHES), ckpt_path=path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_file_is_checked_where_it_is_read(tmp_path: Path) -> None:
    processes.run(fit, 2, "1f1b", str(tmp_path), False)
    path = tmp_path / "step=12.ckpt"
    assert processes.run(go_on, 2, str(path)) == ["", ""]
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    for text in processes.run(go_on, 2, str(path)):
        assert f"the checkpoint {path} has been changed since it was written; allowed:" in text
        assert text.endswith(f'use ckpt_path="{tmp_path}/step=8.ckpt"')


def read_at_once(folder: str) -> int:
    """Save within a fit, and read it in the next line, on each rank."""
    read: list[int] = []

    class Reader(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == EVERY:
                trainer.save_checkpoint(Path(folder, "a.ckpt"))
                read.append(trainer.strategy.load_checkpoint(f"{folder}/a.ckpt")["global_step"])

    module, write = Classifier(), sealed_file.write

    def slowly(checkpoint: Any, path: Path) -> None:
        time.sleep(0.5)
        write(checkpoint, path)

    sealed_file.write = slowly
    trainer = make_trainer(
        STRATEGIES["cyclic_dp"], max_epochs=1, callbacks=[Reader()], plugins=[AsyncCheckpointIO()]
    )
    trainer.fit(module, train_data(module, NUM_BATCHES))
    trainer.save_checkpoint(Path(folder, "b.ckpt"))
    assert Path(folder, "b.ckpt").is_file() or processes.here().rank  # at once, behind a fit
    return read[0]


def test_who_reads_what_is_written_waits_for_it(tmp_path: Path) -> None:
    assert processes.run(read_at_once, 2, str(tmp_path)) == [EVERY, EVERY]


# ---------------------------------------------------------------------- others' ways


class Own(TorchCheckpointIO):
    """Writes in its own way."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        Path(path).write_text("mine")


def fit_own(folder: str) -> None:
    module = Classifier()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=EVERY)
    trainer = make_trainer(
        "cyclic_dp", max_epochs=1, enable_checkpointing=True, callbacks=[saver],
        plugins=[AsyncCheckpointIO(Own())],
    )  # fmt: skip
    trainer.fit(module, train_data(module, NUM_BATCHES))


def test_who_wraps_another_writer_has_what_that_one_writes(tmp_path: Path) -> None:
    processes.run(fit_own, 2, str(tmp_path))
    assert (tmp_path / "step=12.ckpt").read_text() == "mine"
