"""A run that is started again goes on from the newest of its checkpoints that is whole."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_cyclic import CyclicStrategy
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.newest import checkpoints_of, newest_whole
from tests import processes
from tests.corpus import assert_same, make_trainer, weights_of
from tests.launched import Tiny
from tests.rows import more

NUM_STEPS = 6


def trainer_in(folder: Path | str, strategy: Any = "auto", **flags: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return Trainer(
        strategy=strategy, accelerator="cpu", devices=1, default_root_dir=folder,
        **{"enable_checkpointing": False, **quiet, **flags},
    )  # fmt: skip


def write(path: Path, age_s: float, **content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"lr_schedulers": [], **content}, path)
    os.utime(path, (1e9 - age_s, 1e9 - age_s))
    return path


def saver(folder: Path, **flags: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, **flags)


# ---------------------------------------------------------------------- which file


def test_the_newest_file_with_more_than_weights(tmp_path):
    old, new = write(tmp_path / "a.ckpt", 9), write(tmp_path / "b.ckpt", 5)
    weights = tmp_path / "weights.ckpt"
    torch.save({"state_dict": {}}, weights)
    assert newest_whole([old, new, weights]) == new
    assert newest_whole([]) is None
    with pytest.warns(UserWarning, match=rf"{weights} has weights alone.*save_weights_only=False"):
        assert newest_whole([weights]) is None


def test_a_file_that_is_not_whole_is_passed_over_with_a_warning(tmp_path):
    old, new = write(tmp_path / "a.ckpt", 9), write(tmp_path / "b.ckpt", 5)
    new.write_bytes(new.read_bytes()[:-7])
    with pytest.warns(UserWarning, match=rf"{new} has \d+ bytes and is not whole, and is passed"):
        assert newest_whole([old, new]) == old


def test_a_run_looks_where_its_callbacks_write_and_where_a_requeue_does(tmp_path):
    root, mine = tmp_path / "root", tmp_path / "mine"
    found = [write(root / "hpc_ckpt_1.ckpt", 1), write(mine / "step=3.ckpt", 1)]
    write(root / "other" / "step=9.ckpt", 0)
    trainer = trainer_in(root, enable_checkpointing=True, callbacks=[ModelCheckpoint(mine)])
    assert [*checkpoints_of(trainer)] == found


def test_a_logger_has_another_folder_in_every_start(tmp_path):
    before = write(tmp_path / "logs" / "version_0" / "checkpoints" / "step=3.ckpt", 1)
    logger = CSVLogger(tmp_path, name="logs")
    trainer = trainer_in("elsewhere", enable_checkpointing=True, logger=logger)
    assert [*checkpoints_of(trainer)] == [before]


def test_folders_of_other_runs_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path.parent):
        trainer = trainer_in(folder, enable_checkpointing=True)
        with pytest.raises(ConfigurationError, match="above the working dir.*default_root_dir="):
            [*checkpoints_of(trainer)]


def test_folders_elsewhere_are_refused(tmp_path):
    callback = ModelCheckpoint("memory://there")
    trainer = trainer_in(tmp_path, enable_checkpointing=True, callbacks=[callback])
    with pytest.raises(ConfigurationError, match=re.escape("'memory://there'; allowed: folders")):
        [*checkpoints_of(trainer)]


def test_a_word_that_is_not_understood_is_refused():
    with pytest.raises(ConfigurationError, match="resume 'newest' is unknown; allowed: auto"):
        CyclicStrategy(resume="newest")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- runs


class Evaluated(Tiny):
    """Can be evaluated, too."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def fitted(folder: Path, preset: str, num_steps: int, ckpt_path: Path | None = None) -> Any:
    """Train up to a step; return the file that a run began with, its step and its weights."""
    trainer = make_trainer(
        {"preset": preset, "resume": "auto"}, enable_checkpointing=True, default_root_dir=folder,
        max_steps=num_steps, max_epochs=-1, callbacks=[saver(folder / "checkpoints")],
    )  # fmt: skip
    module = Evaluated()
    trainer.fit(module, ckpt_path=ckpt_path)
    began_with, weights = trainer.ckpt_path, weights_of(module)
    assert "resume_start" not in vars(trainer._checkpoint_connector)
    trainer.validate(module, module.train_dataloader(), verbose=False)
    assert trainer.ckpt_path is None  # nothing is looked for
    return began_with, trainer.global_step, weights


@pytest.mark.multi
@pytest.mark.parametrize(
    ("num_ranks", "preset"), [(1, "cyclic_dp"), more(2, "cyclic_dp"), (2, "1f1b")]
)
def test_a_run_goes_on_by_itself(num_ranks: int, preset: str, tmp_path: Path) -> None:
    whole, mine = tmp_path / "whole", tmp_path / "mine"
    (_, _, expected), *_ = processes.run(fitted, num_ranks, whole, preset, NUM_STEPS)
    for began_with, *_ in processes.run(fitted, num_ranks, mine, preset, 2):
        assert began_with is None  # there was nothing yet
    for began_with, step, weights in processes.run(fitted, num_ranks, mine, preset, NUM_STEPS):
        assert (began_with, step) == (str(mine / "checkpoints" / "step=2.ckpt"), NUM_STEPS)
        if num_ranks > 1:  # else this is Lightning's, which begins an epoch's data anew
            assert_same(weights, expected)


@pytest.mark.multi
def test_what_the_run_has_written_is_before_what_fit_names(tmp_path: Path) -> None:
    begun, mine = (tmp_path / name for name in ("begun", "mine"))
    processes.run(fitted, 2, begun, "cyclic_dp", 2)
    named = begun / "checkpoints" / "step=2.ckpt"
    began = [processes.run(fitted, 2, mine, "cyclic_dp", num, named)[0][0] for num in (3, 4)]
    assert began == [named, str(mine / "checkpoints" / "step=3.ckpt")]
