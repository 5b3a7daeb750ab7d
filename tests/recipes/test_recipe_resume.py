"""A run that is started again in its folder goes on from what is there."""

from __future__ import annotations

import os

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from recipes.resume import checkpoint_of, keep_rows
from recipes.train import make_callbacks

ASKED = "ckpt_path=somewhere.ckpt"


@pytest.fixture
def write(tmp_path):
    """Write a checkpoint of an age in seconds."""

    def write(name, age_s):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"global_step": age_s, "lr_schedulers": []}, path)
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
        return path

    return write


def test_the_newest_checkpoint_of_the_run_is_before_the_one_that_is_named(compose_recipe, write):
    write("hpc_ckpt_1.ckpt", 20)
    newest = write("metrics/checkpoints/newest-step=60.ckpt", 10)
    write("metrics/checkpoints/epoch=0-step=40.ckpt", 30)
    assert checkpoint_of(compose_recipe("resume=true", ASKED)) == str(newest)
    assert checkpoint_of(compose_recipe(ASKED)) == "somewhere.ckpt"


def test_the_first_run_begins_as_it_is_told(compose_recipe):
    assert checkpoint_of(compose_recipe("resume=true")) is None
    assert checkpoint_of(compose_recipe("resume=true", ASKED)) == "somewhere.ckpt"


def test_what_was_logged_before_is_kept(compose_recipe, tmp_path):
    rows = tmp_path / "metrics" / "metrics.csv"
    rows.parent.mkdir()
    for k in range(2):
        rows.write_text(f"run {k}")
        keep_rows(compose_recipe("resume=true"))
    keep_rows(compose_recipe("resume=true"))  # nothing was logged since
    found = {path.name: path.read_text() for path in rows.parent.iterdir()}
    assert found == {"metrics-0.csv": "run 0", "metrics-1.csv": "run 1"}
    rows.write_text("run 2")
    keep_rows(compose_recipe())
    assert rows.read_text() == "run 2"


def test_checkpoints_between_those_of_epochs(compose_recipe):
    assert not any(isinstance(x, ModelCheckpoint) for x in make_callbacks(compose_recipe()))
    _, of_epochs, newest = make_callbacks(compose_recipe("save_every=7"))
    assert (of_epochs._every_n_epochs, newest._every_n_train_steps) == (1, 7)
