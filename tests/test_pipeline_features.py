"""Under pipelines, Lightning's features do what they do on a single device, bit by bit.

One case by hand: pytest tests/test_pipeline_features.py -k "clipping and gpt2"
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_cyclic.errors import ConfigurationError
from tests.harness.pipelines import (
    Job,
    Outcome,
    assert_equals_plain,
    loader,
    pipelines,
    plainly,
    prepare,
    reference,
)
from tests.harness.trainers import assert_same
from tests.modules.cases import CASES

pytestmark = pytest.mark.multi


# ---------------------------------------------------------------------- clipping, accumulation


@pytest.mark.parametrize(
    ("name", "num_ranks", "preset", "flags"),
    [
        ("resnet", 2, "1f1b", {"gradient_clip_val": 0.3}),
        ("gpt2", 4, "1f1b", {"gradient_clip_val": 0.1}),  # whose tied weights count once
        ("frozen", 2, "gpipe", {"gradient_clip_val": 0.1}),
        ("resnet", 4, "gpipe", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    ],
)
def test_clipping(name: str, num_ranks: int, preset: str, flags: dict[str, Any]) -> None:
    job = Job(case=name, flags=tuple(flags.items()))
    ranks = pipelines(job, num_ranks, preset=preset, stages=4 if num_ranks == 4 else 2)
    assert_equals_plain(ranks, job)
    assert reference(job)["logged"] != reference(Job(case=name))["logged"]


@pytest.mark.parametrize(
    ("num_steps", "accumulate", "num_ranks", "preset", "stages"),
    [
        (5, 2, 2, "1f1b", 2),  # which leave an incomplete window
        (5, 2, 4, "gpipe", 4),
        (12, 3, 2, "1f1b", 2),  # a third, three times, is not one
    ],
)
def test_accumulating_batches_on_top(
    num_steps: int, accumulate: int, num_ranks: int, preset: str, stages: int
) -> None:
    job = Job(case="resnet", num_steps=num_steps, num_epochs=3, num_microbatches=2,
              flags=(("accumulate_grad_batches", accumulate),))  # fmt: skip
    assert_equals_plain(pipelines(job, num_ranks, preset=preset, stages=stages), job)


def test_clipping_what_two_replicas_accumulated() -> None:
    flags = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    job = Job(case="gpt2", num_steps=8, flags=tuple(flags.items()))
    ranks = pipelines(job, 4, preset="1f1b", stages=2, replicas=2)
    assert_equals_plain(ranks, job, exact_metrics=False)


# ---------------------------------------------------------------------- evaluation


def fit_and_predict(job: Job, strategy: Any) -> Outcome:
    run = prepare(job, strategy)
    run.trainer.fit(run.module, run.batches)
    whole = DataLoader(loader(job, strategy["replicas"]).dataset, batch_size=None)
    return run.outcome() | {"predictions": torch.cat(run.trainer.predict(run.module, whole))}


def test_each_replica_predicts_its_own_batches() -> None:
    job = Job(case="resnet")
    ranks = pipelines(job, 4, function=fit_and_predict, preset="gpipe", stages=2, replicas=2)
    assert_same(ranks[0]["weights"], reference(job)["weights"])
    halves = [rank["predictions"] for rank in ranks]
    assert torch.equal(halves[0], halves[1])  # the stages of one replica
    assert torch.equal(halves[2], halves[3])
    assert halves[0].shape == halves[2].shape
    assert not torch.equal(halves[0], halves[2])


# ---------------------------------------------------------------------- callbacks, checkpoints


def fit_and_stop(job: Job, strategy: Any, folder: Path) -> Outcome:
    stop = EarlyStopping("train_metric", mode="min", patience=1)  # an accuracy: soon
    best = ModelCheckpoint(folder, monitor="train_metric", mode="max", save_top_k=2,
                           filename="{epoch}-{train_metric:.4f}")  # fmt: skip
    run = prepare(job, strategy, [stop, best], enable_checkpointing=True)
    run.trainer.fit(run.module, run.batches)
    names = sorted(Path(path).name for path in best.best_k_models)
    return run.outcome() | {"stopped": stop.stopped_epoch, "best": names}


def test_stopping_early_and_keeping_the_best(tmp_path: Path) -> None:
    job = Job(case="resnet", num_epochs=12)
    plain = plainly(fit_and_stop, job, tmp_path / "plain")
    assert 0 < plain["stopped"] < 11
    ranks = pipelines(
        job, 2, tmp_path / "pipeline", function=fit_and_stop, preset="1f1b", stages=2
    )
    for rank in ranks:
        for what in ("stopped", "epoch", "global_step", "best"):
            assert rank[what] == plain[what], what
        assert_same(rank["weights"], plain["weights"])
    plain_one, other = (
        torch.load(tmp_path / kind / plain["best"][0], weights_only=True)
        for kind in ("plain", "pipeline")
    )
    assert_same(other["state_dict"], plain_one["state_dict"])


def fit_in_parts(
    job: Job, strategy: Any, folder: Path, begin_with: str | None = None, num_epochs: int = 2
) -> Outcome:
    """Save a checkpoint each epoch and each third step; begin with one, or anew."""
    epochs = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    steps = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=3)
    run = prepare(replace(job, num_epochs=num_epochs), strategy, [epochs, steps],
                  enable_checkpointing=True)  # fmt: skip
    if begin_with:
        for p in run.module.parameters():
            p.data.zero_()  # so that all must come from the file
    path = begin_with and folder / begin_with
    run.trainer.fit(run.module, run.batches, ckpt_path=path)
    return run.outcome()


SAVED_IN = {"preset": "1f1b", "stages": 4}


def test_a_pipeline_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    job = Job(case="bert", dropout=0.2)
    through = pipelines(job, 2, tmp_path, function=fit_in_parts, **SAVED_IN)
    for begin_with in ("epoch=0.ckpt", "step=3.ckpt"):
        again = pipelines(job, 2, tmp_path, begin_with, function=fit_in_parts, **SAVED_IN)
        for rank in again:
            assert rank["global_step"] == through[0]["global_step"]
            assert rank["logged"] == through[0]["logged"][-len(rank["logged"]) :]
            assert_same(rank["weights"], through[0]["weights"], begin_with)


def test_checkpoints_move_between_places(tmp_path: Path) -> None:
    job = Job(case="gpt2")
    plain = plainly(fit_in_parts, job, tmp_path / "plain", None, 3)
    pipelines(job, 2, tmp_path / "pipeline", function=fit_in_parts, **SAVED_IN)
    ends = [plainly(fit_in_parts, job, tmp_path / "pipeline", "epoch=1.ckpt", 3)]
    for num_ranks, folder in ((4, "pipeline"), (1, "pipeline"), (2, "plain")):
        ends += pipelines(
            job, num_ranks, tmp_path / folder, "epoch=1.ckpt", 3, function=fit_in_parts,
            preset="gpipe", stages=4,
        )  # fmt: skip
    for end in ends:
        assert end["global_step"] == plain["global_step"]
        assert_same(end["weights"], plain["weights"])


def test_a_checkpoint_is_a_plain_one(tmp_path: Path) -> None:
    job = Job(case="gpt2")
    pipelines(job, 2, tmp_path / "pipeline", function=fit_in_parts, **SAVED_IN)
    plainly(fit_in_parts, job, tmp_path / "plain")
    pipeline, plain = (
        torch.load(tmp_path / kind / "epoch=1.ckpt", weights_only=True)
        for kind in ("pipeline", "plain")
    )
    assert_same(pipeline["state_dict"], plain["state_dict"])
    given, expected = pipeline["optimizer_states"][0], plain["optimizer_states"][0]
    assert given["param_groups"] == expected["param_groups"]
    assert given["state"].keys() == expected["state"].keys()
    for p, values in expected["state"].items():
        assert_same(given["state"][p], values, f"parameter {p}")


# ---------------------------------------------------------------------- precision


def test_mixed_precision_with_rematerialisation() -> None:
    job = Job(case="gpt2", flags=(("precision", "bf16-mixed"),))
    assert_equals_plain(
        pipelines(job, 2, preset="1f1b", stages=4, activation_checkpointing="always"), job
    )


# ---------------------------------------------------------------------- the report


def fit_and_report(job: Job, strategy: dict[str, Any]) -> str:
    run = prepare(job, strategy)
    run.trainer.fit(run.module, run.batches)
    try:
        return run.trainer.strategy.report()
    except ConfigurationError as error:
        return f"refused: {error}"


def test_rank_zero_reports_where_stages_begin_and_could() -> None:
    job = Job(case="unet")
    shown, refused = pipelines(job, 2, function=fit_and_report, preset="gpipe", stages=2)
    paths = ", ".join(f'"{path}"' for path in CASES["unet"].cuts(2))
    assert f"stages=[{paths}]" in shown
    assert "can begin" in shown
    assert refused.startswith("refused: strategy.report() was asked for where no module")
