"""Half precision in pipelines with a flush: the bits, scales and skips of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.corpus import assert_same
from tests.rows import more
from tests.scaled import FIRST_SCALE, precision
from tests.stagewise_runs import Job, Outcome, loader, pipelines, plainly, prepare

pytestmark = pytest.mark.multi

JOB = Job(case="vit", num_steps=7)
CLIPPED = (("gradient_clip_val", 0.02),)


class Scales(Callback):
    """Read the scale behind each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


def fit(job: Job, strategy: dict[str, Any] | None, *validation: int) -> Outcome:
    more: dict[str, Any] = {"val_check_interval": 2, "limit_val_batches": 1} if validation else {}
    scales = Scales()
    run = prepare(job, strategy, [scales], plugins=[precision()], **more)
    run.trainer.fit(run.module, run.batches, loader(job, 1) if validation else None)
    return run.outcome() | {"scales": scales.seen}


def assert_equals_one_device(ranks: list[Outcome], job: Job) -> None:
    plain = plainly(fit, job)
    scales = plain["scales"][job.num_microbatches - 1 :: job.num_microbatches]
    assert min(scales) < FIRST_SCALE  # else nothing has been skipped
    changes = torch.tensor(scales).diff().sign().tolist()
    assert {-1.0, 0.0} <= set(changes)  # some steps are skipped, others are not
    for r, rank in enumerate(ranks):
        assert_same(rank["weights"], plain["weights"], f"rank {r}")
        assert rank["scales"] == scales
        assert rank["global_step"] == plain["global_step"]


@pytest.mark.parametrize(
    ("preset", "num_ranks", "more", "flags"),
    [
        pytest.param("gpipe", 1, {"stages": 4}, (), marks=pytest.mark.exhaustive),
        ("gpipe", 2, {"stages": 4}, ()),
        more("gpipe", 4, {"stages": 4}, CLIPPED),
        ("1f1b", 1, {"stages": 4}, CLIPPED),
        pytest.param("1f1b", 2, {"stages": 2}, (), marks=pytest.mark.exhaustive),
        ("1f1b", 2, {"stages": 4, "clip_norm": "global"}, CLIPPED),
        more("1f1b", 4, {"stages": 4}, ()),
        ("1f1b", 2, {"stages": 2, "activation_checkpointing": "always"}, ()),
    ],
)
def test_bits_scales_and_skips_are_those_of_one_device(
    preset: str, num_ranks: int, more: dict[str, Any], flags: tuple[Any, ...]
) -> None:
    job = Job(case="vit", num_steps=7, flags=flags)
    ranks = pipelines(job, num_ranks, preset=preset, function=fit, **more)
    assert_equals_one_device(ranks, job)


def test_one_stage_is_plain_training() -> None:
    assert_equals_one_device(pipelines(JOB, 1, preset="1f1b", stages=1, function=fit), JOB)


def test_replicas_follow_the_owners() -> None:
    ranks = pipelines(JOB, 4, preset="1f1b", stages=2, replicas=2, function=fit)
    assert_equals_one_device(ranks, JOB)


def test_validation_in_the_middle_changes_nothing() -> None:
    ranks = pipelines(JOB, 2, 1, preset="1f1b", stages=2, function=fit)
    assert_equals_one_device(ranks, JOB)


def fit_added(job: Job, strategy: dict[str, Any] | None) -> Outcome:
    scales = Scales()
    run = prepare(job, strategy, [scales], plugins=[precision()], accumulate_grad_batches=2)
    run.trainer.fit(run.module, run.batches)
    return run.outcome() | {"scales": scales.seen}


def test_batches_that_are_added_up_have_one_scale() -> None:
    job = Job(case="vit", num_steps=14)
    ranks = pipelines(job, 2, preset="1f1b", stages=2, function=fit_added)
    alone, *_ = pipelines(job, 1, preset="1f1b", stages=2, function=fit_added)
    assert min(alone["scales"]) < FIRST_SCALE
    for rank in ranks:
        assert_same(rank["weights"], alone["weights"])
        assert rank["scales"] == alone["scales"]


def saved_and_resumed(job: Job, strategy: dict[str, Any], folder: str, step: int) -> Outcome:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=step, save_top_k=-1)
    flags = {"max_steps": step + 2, "enable_checkpointing": True, "plugins": [precision()]}
    first = prepare(job, strategy, [saver], **flags)
    first.trainer.fit(first.module, first.batches)
    second = prepare(job, strategy, plugins=[precision()])
    second.trainer.fit(second.module, second.batches, ckpt_path=f"{folder}/step={step}.ckpt")
    return second.outcome() | {"scaler": second.trainer.precision_plugin.scaler.state_dict()}


def test_a_resumed_run_goes_on_with_the_scale(tmp_path: Any) -> None:
    whole = plainly(fit, JOB)
    strategy = {"preset": "1f1b", "stages": 2}
    for rank in pipelines(JOB, 2, str(tmp_path), 3, function=saved_and_resumed, **strategy):
        assert_same(rank["weights"], whole["weights"])
        assert rank["scaler"]["scale"] == whole["scales"][-1]
