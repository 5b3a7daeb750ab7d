"""Real fits over every transport that takes tensors of the host: the same bits over each."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.harness import processes
from tests.harness.pipelines import Job, loader, pipelines, prepare
from tests.harness.trainers import assert_same, make_trainer, outcome, train_data, valid_data
from tests.modules.classifier import Classifier

pytestmark = pytest.mark.multi

ROUTES = ("named", "edges", "host_staged")
FLAGS = {"val_check_interval": 2, "limit_val_batches": 1, "enable_checkpointing": True}


def saver(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=1)


def replicas(strategy: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train two epochs of whole micro-batches."""
    module = Classifier("batchnorm_mlp", "sgd")
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[saver(folder)], **FLAGS)
    trainer.fit(module, train_data(module, 4), valid_data(module))
    return outcome(trainer, module)


def stages(job: Job, strategy: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train two epochs stage by stage."""
    run = prepare(job, strategy, [saver(folder)], **FLAGS)
    run.trainer.fit(run.module, run.batches, loader(job, 1))
    return run.outcome()


def assert_alike(by_route: dict[str, list[dict[str, Any]]]) -> None:
    """Compare weights, losses and metrics of every rank with those by name."""
    for route in ROUTES[1:]:
        for given, expected in zip(by_route[route], by_route["named"], strict=True):
            assert_same(given["weights"], expected["weights"], route)
            for what in ("metrics", "losses", "logged", "global_step"):
                assert given.get(what) == expected.get(what), (route, what)


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_zero", "lockstep_dp"])
def test_whole_micro_batches(preset: str, tmp_path: Path) -> None:
    flags = {"preset": preset, "stages": 2}
    assert_alike(
        {
            route: processes.run(
                replicas, 2, flags | {"transport": route}, str(tmp_path / route), time_limit_s=90.0
            )
            for route in ROUTES
        }
    )


def test_stages(tmp_path: Path) -> None:
    run = partial(
        pipelines, Job(case="resnet"), 2, function=stages, preset="pipedream_2bw", stages=2
    )
    assert_alike({route: run(str(tmp_path / route), transport=route) for route in ROUTES})
