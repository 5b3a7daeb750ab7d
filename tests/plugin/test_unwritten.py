"""A disk that is full, or not to be written: training goes on, and the last checkpoint stays."""

from __future__ import annotations

import resource
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_cyclic.plugin import sealed_file
from lightning_cyclic.plugin.unwritten import Unwritten
from tests import processes
from tests.corpus import Classifier, assert_same, make_trainer, train_data, weights_of
from tests.rows import in_turn

pytestmark = pytest.mark.multi
SMALL = "size=1m"  # of which a file takes a fortieth, and a folder a seventh


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", SMALL, "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


class Troubles(Callback):
    """Let the disk take nothing from one batch on, until another.

    Args:
        disk: where it is mounted.
        kind: "full" or "read-only"; or a rank that alone can write no more than its first bytes.
    """

    def __init__(self, disk: str, kind: str) -> None:
        self._disk, self._kind = disk, kind

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        alone = self._kind.isdigit()
        if batch_idx not in (5, 9) or trainer.global_rank != (int(self._kind) if alone else 0):
            return
        if alone:
            most = 100 if batch_idx == 5 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            return
        filler = Path(self._disk, "filler")
        if self._kind == "read-only":
            state = "ro" if batch_idx == 5 else "rw"
            subprocess.run(["mount", "-o", f"remount,{state}", self._disk], check=True)
        elif batch_idx == 9:
            filler.unlink()
        else:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1024))


def fit(
    disk: str, kind: str | None, background: bool, folders: bool = False
) -> tuple[Any, list[str], list[list[str]]]:
    """Return weights, what was warned of, and what each batch finds on the disk at its end."""
    module, files = Classifier("mlp"), []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.strategy._files.wait()
            files.append(sorted(p.name for p in Path(disk).glob("*.ckpt*")))

    saving = ModelCheckpoint(disk, every_n_train_steps=2, filename="{step}")
    callbacks = [Troubles(disk, kind)] if kind else []
    run = make_trainer(
        {"preset": "cyclic_dp", "save_distributed_checkpoint": folders},
        max_epochs=1, enable_checkpointing=True,
        callbacks=[*callbacks, saving, Look()],
        plugins=[AsyncCheckpointIO()] if background else [],
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, train_data(module, 12))
    said = [str(w.message) for w in caught if "could not be written" in str(w.message)]
    return weights_of(module), said, files


def check_kept(disk: Path, outcomes: Any, expected: Any, reason: str) -> None:
    """Check that steps 6 and 8 were not written, and that step 4 stayed meanwhile."""
    (weights, said, files), (_, nothing, _) = outcomes
    assert_same(weights, expected)
    assert files[3] == ["step=2.ckpt"]
    assert files[4:10] == [["step=4.ckpt"]] * 6
    assert files[10] == ["step=10.ckpt", "step=4.ckpt"]
    assert nothing == []
    assert len(said) == 2
    for step, text in zip((6, 8), said, strict=True):
        assert f"step={step}.ckpt could not be written ({reason}). Training goes on" in text
    for step in (4, 12):
        sealed_file.check(disk / f"step={step}.ckpt")


@pytest.mark.parametrize(
    ("kind", "reason", "background"),
    in_turn(
        [("full", "No space left on device"), ("read-only", "Read-only file system")],
        [False, True],
    ),
)
def test_training_goes_on_and_keeps_the_last_file(
    kind: str, reason: str, background: bool, disk: Path, tmp_path: Path
) -> None:
    (expected, *_), _ = processes.run(fit, 2, str(tmp_path / "other"), None, False)
    check_kept(disk, processes.run(fit, 2, str(disk), kind, background), expected, reason)
    for step in (4, 12):
        saved = torch.load(disk / f"step={step}.ckpt", weights_only=True)
        assert saved["global_step"] == step


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("full", "rank 0: No space left on device; rank 1: No space left on device"),
        ("read-only", "rank 0: Read-only file system; rank 1: Read-only file system"),
        ("0", "rank 0: File too large"),
        ("1", "rank 1: File too large"),
    ],
)
def test_training_goes_on_and_keeps_the_last_folder(
    kind: str, reason: str, disk: Path, tmp_path: Path
) -> None:
    (expected, *_), _ = processes.run(fit, 2, str(tmp_path / "other"), None, False)
    outcomes = processes.run(fit, 2, str(disk), kind, False, True)
    check_kept(disk, outcomes, expected, reason)
    for step in (4, 12):
        meta = torch.load(disk / f"step={step}.ckpt" / "meta.pt", weights_only=True)
        assert meta["global_step"] == step


def test_outside_of_training_the_error_is_the_callers(tmp_path: Path) -> None:
    unwritten = Unwritten()
    with pytest.raises(OSError, match="No space"), unwritten.warning(tmp_path, trains=False):
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError, match="error"), unwritten.warning(tmp_path, trains=True):
        raise OSError(5, "Input/output error")
    assert unwritten.keeps_all
    with unwritten.warning(tmp_path, trains=True):
        assert unwritten.keeps_all
    assert not unwritten.keeps_all
