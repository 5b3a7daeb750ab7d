"""Pipelines without a flush under Lightning: validation, checkpoints, prediction, clipping."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.harness import processes
from tests.harness.pipelines import Job, Outcome, loader, pipelines, prepare
from tests.harness.trainers import assert_same
from tests.test_flow_parity import fit

pytestmark = pytest.mark.multi

PRESETS = ["cyclic_pipeline", "pipedream_2bw", "pipedream", "pipeoptim", "spectrain"]
ONE_EACH = {"pipedream", "pipeoptim", "spectrain"}  # one update per micro-batch


def job_of(preset: str) -> Job:
    return Job(case="resnet", num_microbatches=1 if preset in ONE_EACH else 4, num_steps=5)


@cache
def alone(preset: str) -> Outcome:
    """Return the one-process run of a plan of four stages, made once per session."""
    job = job_of(preset)
    (outcome,) = pipelines(job, 1, preset=preset, stages=4, function=fit)
    return outcome


def first_of(outcome: Outcome) -> torch.Tensor:
    """Return the first weights that are trained."""
    weights: torch.Tensor = next(x for x in outcome["weights"].values() if x.ndim > 1)
    return weights


def assert_equals_alone(ranks: list[Outcome], preset: str) -> None:
    for r, rank in enumerate(ranks):
        assert_same(rank["weights"], alone(preset)["weights"], f"rank {r}")
        assert rank["global_step"] == alone(preset)["global_step"]


@pytest.mark.parametrize(("preset", "num_ranks"), [("pipeoptim", 4), ("spectrain", 2)])
def test_predicted_weights_are_the_same_in_every_place(preset: str, num_ranks: int) -> None:
    job = job_of(preset)
    ranks = pipelines(job, num_ranks, preset=preset, stages=4, function=fit)
    assert_equals_alone(ranks, preset)


def test_presets_train_differently() -> None:
    weights = [first_of(alone(preset)) for preset in PRESETS[2:5]]
    for k, a in enumerate(weights):
        assert all(not torch.equal(a, b) for b in weights[:k])


# ---------------------------------------------------------------------- flushes


def validated(job: Job, strategy: dict[str, Any]) -> Outcome:
    run = prepare(job, strategy, val_check_interval=2, limit_val_batches=2)
    run.trainer.fit(run.module, run.batches, loader(job, 1))
    assert "val_loss" in run.trainer.callback_metrics
    return run.outcome()


@pytest.mark.parametrize(
    ("preset", "num_ranks"),
    [("cyclic_pipeline", 2), ("cyclic_mp", 2), ("pipedream", 2), ("pipeoptim", 2),
     ("pipedream_2bw", 1), ("pipedream", 1)],
)  # fmt: skip
def test_validation_within_an_epoch_changes_nothing(preset: str, num_ranks: int) -> None:
    job = job_of(preset)
    ranks = pipelines(job, num_ranks, preset=preset, stages=4, function=validated)
    assert_equals_alone(ranks, preset)


@pytest.mark.parametrize("preset", ["pipedream", "pipedream_2bw"])
def test_validation_within_an_epoch_sees_the_newest_weights(preset: str) -> None:
    job = job_of(preset)
    one, two = (
        pipelines(job, n, preset=preset, stages=4, function=validated)[0]["metrics"]["val_loss"]
        for n in (1, 2)
    )
    assert one == two


# ---------------------------------------------------------------------- checkpoints


def saved_and_resumed(job: Job, strategy: dict[str, Any], folder: str, step: int) -> Outcome:
    """Train and save behind a step; in a new Trainer go on from there."""
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=step, save_top_k=-1)
    first = prepare(job, strategy, [saver], max_steps=2 * step + 1, enable_checkpointing=True)
    first.trainer.fit(first.module, first.batches)
    second = prepare(job, strategy)
    second.trainer.fit(second.module, second.batches, ckpt_path=f"{folder}/step={step}.ckpt")
    return second.outcome()


@pytest.mark.parametrize(
    ("preset", "step"),
    [("cyclic_mp", 3), ("pipedream_2bw", 5), ("pipedream", 3),
     ("pipeoptim", 3)],
)  # fmt: skip
def test_a_resumed_run_ends_with_the_same_bits(preset: str, step: int, tmp_path: Any) -> None:
    job = job_of(preset)
    ranks = pipelines(
        job, 2, str(tmp_path), step, preset=preset, stages=4, function=saved_and_resumed
    )
    assert_equals_alone(ranks, preset)


# ---------------------------------------------------------------------- clipping


def test_each_stage_is_clipped_by_its_own_norm() -> None:
    job = Job(case="resnet", num_steps=5, flags=(("gradient_clip_val", 0.05),))
    one, *_ = pipelines(
        job, 1, preset="cyclic_pipeline", stages=4, clip_norm="stage", function=fit
    )
    ranks = pipelines(job, 4, preset="cyclic_pipeline", stages=4, clip_norm="stage", function=fit)
    for rank in ranks:
        assert_same(rank["weights"], one["weights"])
    assert not torch.equal(first_of(one), first_of(alone("cyclic_pipeline")))


def test_workers_that_take_turns_clip_by_the_norm_over_all_stages_of_delayed_weights() -> None:
    job = Job(case="resnet", num_steps=5, flags=(("gradient_clip_val", 0.05),))
    one, *_ = pipelines(job, 1, preset="pipedream_2bw", stages=4, function=fit)
    plan = {"preset": "cyclic_mp", "weights": "delayed", "stages": 4}
    for rank in pipelines(job, 4, function=fit, **plan):
        assert_same(rank["weights"], one["weights"])
    apart, *_ = pipelines(job, 1, function=fit, clip_norm="stage", **plan)
    assert not torch.equal(first_of(apart), first_of(one))


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("flags", "options", "text"),
    [
        ({"accumulate_grad_batches": 2}, {}, "accumulate_grad_batches=2.*allowed: 1; use larger"),
        (
            {"gradient_clip_val": 1.0},
            {"clip_norm": "global"},
            'clip_norm="global".*allowed: clip_norm="stage"',
        ),
        (
            {"gradient_clip_val": 1.0},
            {"preset": "cyclic_mp", "clip_norm": "global"},
            'clip_norm="global" with preset .cyclic_mp.*allowed: clip_norm="stage"',
        ),
        (
            {},
            {"num_microbatches": 2},
            "num_microbatches=2 with num_stages=4.*num_microbatches=3 or more",
        ),
        (
            {},
            {"preset": "cyclic_mp", "num_microbatches": 3},
            "num_microbatches=3 with num_stages=4.*num_microbatches=4",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    flags: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    job = Job(case="resnet", flags=tuple(flags.items()))
    with pytest.raises(processes.RanksFailedError, match=text):
        pipelines(job, 2, **{"preset": "cyclic_pipeline", "stages": 4} | options, function=fit)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_shared_parameters_are_not_predicted(num_ranks: int) -> None:
    job = Job(case="gpt2", num_microbatches=1)
    text = "weights 'predicted' (with|do not fit).*allowed: .*one stage"
    with pytest.raises(processes.RanksFailedError, match=text):
        pipelines(job, num_ranks, preset="pipeoptim", stages=2, function=fit)
