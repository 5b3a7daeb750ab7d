"""16-mixed under every preset: the scale of each step, which updates it skips, and who goes on.

With a flush the oracle is the plain Trainer; else it is one process under autocast that goes by
the rule, micro-batch by micro-batch; under another plan, by one rule, then by another.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.harness import processes
from tests.harness.pipelines import (
    Job,
    Outcome,
    fit,
    fit_in_two,
    fit_validating,
    pipelines,
    plainly,
    prepare,
    save,
)
from tests.harness.rows import in_words, more
from tests.harness.trainers import assert_same
from tests.references.rules import WHOLE, Clipped, Reference
from tests.references.scaled import FIRST_SCALE, Scaled, precision

pytestmark = pytest.mark.multi

MAX_NORM = 0.02
DELAYED = {"weights": "delayed"}
CLIPPED = {"gradient_clip_val": MAX_NORM}
VALIDATED = {"val_check_interval": 2}
STEP, BATCH = 3, 6  # of a checkpoint; of the run that goes back to it


def job_of(case: str = "vit", num_steps: int = 7, **more: Any) -> Job:
    flags = tuple(more.pop("flags", {}).items())
    return Job(case=case, num_steps=num_steps, plugins=(precision,), flags=flags, **more)


# ---------------------------------------------------------------------- with a flush


@pytest.mark.parametrize(
    ("preset", "num_ranks", "options", "flags"),
    [
        more("gpipe", 2, {"stages": 4}, {}),
        more("1f1b", 1, {"stages": 4}, CLIPPED),
        ("1f1b", 2, {"stages": 4, "clip_norm": "global"}, CLIPPED),
        more("1f1b", 2, {"stages": 2, "activation_checkpointing": "always"}, {}),
        more("1f1b", 1, {"stages": 1}, {}),
        ("1f1b", 2, {"stages": 1, "replicas": 2}, {}),
        more("1f1b", 4, {"stages": 2, "replicas": 2}, {}),
        more("1f1b", 2, {"stages": 2}, VALIDATED),
    ],
    ids=in_words,
)
def test_bits_scales_and_skips_are_those_of_one_device(
    preset: str, num_ranks: int, options: dict[str, Any], flags: dict[str, Any]
) -> None:
    job = job_of(flags={k: x for k, x in flags.items() if k not in VALIDATED})
    plain = plainly(fit, job)
    scales = plain["scales"][job.num_microbatches - 1 :: job.num_microbatches]
    assert min(scales) < FIRST_SCALE  # else nothing has been skipped
    assert {-1.0, 0.0} <= set(torch.tensor(scales).diff().sign().tolist())
    function = fit_validating if flags is VALIDATED else fit
    ranks = pipelines(job, num_ranks, preset=preset, function=function, **options)
    for r, rank in enumerate(ranks):
        assert_same(rank["weights"], plain["weights"], f"rank {r}")
        assert rank["scales"] == scales
        assert rank["global_step"] == plain["global_step"]


def test_batches_of_a_pipeline_that_are_added_up_have_one_scale() -> None:
    job = job_of(flags={"accumulate_grad_batches": 2}, num_steps=14, num_microbatches=2)
    plain = plainly(fit, job)
    assert min(plain["scales"]) < FIRST_SCALE
    for rank in pipelines(job, 2, preset="1f1b", stages=2):
        assert_same(rank["weights"], plain["weights"])
        assert rank["scaler"] == plain["scaler"]


# ---------------------------------------------------------------------- by the rule


def by_rule(ranks: list[Outcome], job: Job, clip: str | None = None) -> tuple[Any, Scaled]:
    """Return the reference of ranks, not yet trained, and its optimizer."""
    plan = ranks[0]["plan"]
    reference = Reference(job, ranks[0]["stage_of"], precision())
    optimizer, is_fresh = reference.optimizer, plan.weights == "freshest"
    if clip:
        optimizer = Clipped(optimizer, reference.stages, MAX_NORM, clip)
    scaled = Scaled(
        optimizer, reference.stages, together=not is_fresh or clip == "all",
        late=int(plan.weights != "sync" and plan.num_workers > 1),
    )  # fmt: skip
    reference.optimizer = scaled
    return reference, scaled


def compare(ranks: list[Outcome], expected: Outcome) -> None:
    for r, rank in enumerate(ranks):
        assert_same(rank["weights"], expected["weights"], f"rank {r}")
        assert rank["scaler"] == expected["scaler"]


@pytest.mark.parametrize(
    ("preset", "num_ranks", "case", "flags", "options"),
    [
        # workers that run whole micro-batches
        more("cyclic_dp", 1, "vit", {}, {"stages": 4, "num_microbatches": 1}),
        ("cyclic_dp", 2, "unet", {}, {"stages": 6, "slack": 2}),
        ("cyclic_zero", 2, "vit", VALIDATED, {"stages": 4}),
        more("cyclic_zero", 2, "unet", {"accumulate_grad_batches": 2}, {"stages": 4}),
        ("cyclic_dp_v1", 2, "unet", CLIPPED, {"stages": 4}),
        more("cyclic_dp_v1", 4, "vit", CLIPPED, {"stages": 4}),
        more("cyclic_dp_v1", 2, "vit", {}, {"stages": 4}),
        ("lockstep_dp", 2, "unet", CLIPPED, {"stages": 4}),
        ("cyclic_dp", 2, "unet", CLIPPED, {"stages": 4, "clip_norm": "global"}),
        # stages apart
        ("pipedream_2bw", 2, "unet", CLIPPED, {"stages": 4}),
        more("pipedream_2bw", 2, "unet", {}, {"stages": 2, "replicas": 2}),
        more("pipedream_2bw", 4, "vit", {}, {"stages": 2, "replicas": 2}),
        ("cyclic_pipeline", 2, "unet", CLIPPED, {"stages": 4, "clip_norm": "stage"}),
        more("cyclic_pipeline", 4, "vit", {}, {"stages": 4}),
        # with a schedule, and buffers that change
        ("cyclic_mp", 2, "resnet", {}, {"stages": 2}),
        more("cyclic_mp", 2, "vit", CLIPPED | VALIDATED, {"stages": 2, **DELAYED}),
        more("cyclic_mp", 4, "vit", CLIPPED, {"stages": 4, **DELAYED}),
    ],
    ids=in_words,
)
def test_scales_and_skipped_updates_follow_the_rule(
    preset: str, num_ranks: int, case: str, flags: dict[str, Any], options: dict[str, Any]
) -> None:
    accumulate = flags.get("accumulate_grad_batches", 1)
    m = num_ranks if preset in WHOLE else 4
    job = job_of(case, 7 * accumulate, flags=flags, num_microbatches=m)
    ranks = pipelines(job, num_ranks, preset=preset, **options)
    clip = None
    if "gradient_clip_val" in flags:
        clip = "stage" if options.get("clip_norm") == "stage" else "all"
    reference, scaled = by_rule(ranks, job, clip)
    reference.train(ranks[0]["plan"], accumulate=accumulate).compare(ranks)
    for rank in ranks:
        assert rank["scaler"] == scaled.states[-1]
        assert rank["global_step"] == 14  # skipped ones, too
    skipped, all_stages = set(scaled.skipped), {0, len(reference.stages)}
    assert 0 in skipped
    if scaled.together:
        assert skipped == all_stages
    else:
        # some were updated while others were not, where there are several
        assert skipped - all_stages or len(reference.stages) == 1


class Halves(Callback):
    """Changes the gradients of an update before they are clipped."""

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        for p in trainer.strategy.updated_parameters:
            p.grad.mul_(0.5)


class Halved:
    """Steps an optimizer on half of the gradients."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups, self.zero_grad = optimizer.param_groups, optimizer.zero_grad
        self._optimizer = optimizer

    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.mul_(0.5)
        self._optimizer.step()


@pytest.mark.parametrize("preset", ["cyclic_dp_v1", "1f1b"])
def test_gradients_that_a_hook_changes_are_clipped_as_it_leaves_them(preset: str) -> None:
    num_microbatches = 2 if preset in WHOLE else 4
    job = job_of("unet", 7, flags=CLIPPED | {"callbacks": [Halves()]})
    job = replace(job, num_microbatches=num_microbatches)
    ranks = pipelines(job, 2, preset=preset, stages=4)
    reference, scaled = by_rule(ranks, job, "all")
    scaled._optimizer = Halved(scaled._optimizer)
    reference.train(ranks[0]["plan"]).compare(ranks)
    assert 0 in scaled.skipped


def test_flushes_in_the_middle_change_no_scale_of_predicted_weights() -> None:
    job = job_of(num_microbatches=1)
    (alone,) = pipelines(job, 1, preset="pipeoptim", stages=4)
    assert alone["scaler"][0] < FIRST_SCALE
    ranks = pipelines(job, 2, preset="pipeoptim", stages=4, function=fit_validating)
    compare(ranks, alone)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("preset", "options", "step"),
    [
        more("cyclic_zero", {}, 4), more("1f1b", {}, 3), ("pipedream_2bw", {}, 2),
        more("cyclic_mp", DELAYED, 9),
    ],
    ids=in_words,
)  # fmt: skip
def test_a_resumed_run_goes_on_with_the_scales(
    preset: str, options: dict[str, Any], step: int, tmp_path: Path
) -> None:
    job = job_of(num_microbatches=2 if preset in WHOLE else 4)
    ranks = pipelines(
        job, 2, tmp_path, step, preset=preset, stages=4, function=fit_in_two, **options
    )
    reference, scaled = by_rule(ranks, job)
    reference.train(ranks[0]["plan"])
    compare(ranks, {"weights": reference.weights, "scaler": scaled.states[-1]})


class Goes(Callback):
    """Loads everything from a file in the middle of a fit."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == BATCH - 1:
            saved = trainer.strategy.load_checkpoint(self.file)
            trainer.strategy.load_model_state_dict(saved)
            trainer.strategy.load_optimizer_state_dict(saved)
            trainer.precision_plugin.load_state_dict(saved["MixedPrecision"])


def go_on(job: Job, strategy: dict[str, Any], file: Path, back: bool) -> Outcome:
    """Train from a file, or go back to it in the middle; note what is said of another plan."""
    run = prepare(job, strategy, [Goes(file)] if back else [])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.trainer.fit(run.module, run.batches, ckpt_path=None if back else file)
    return run.outcome() | {"said": sum("another plan" in str(w.message) for w in said)}


@pytest.mark.parametrize(
    ("first", "second", "back"),
    [more("cyclic_mp", "1f1b", False), ("auto", "pipedream_2bw", True)],
)
def test_another_plan_goes_on_from_the_newest_scale(
    first: str, second: str, back: bool, tmp_path: Path
) -> None:
    """The scales of steps that had begun are of no use to a plan under which others have."""
    job = job_of(num_steps=14, num_epochs=1)
    if first == "auto":
        processes.run(save, 1, job, None, tmp_path, STEP)
    else:
        pipelines(job, 2, tmp_path, STEP, preset=first, stages=4, function=save)
    file = tmp_path / f"step={STEP}.ckpt"
    scales = torch.load(file, weights_only=False).get("lightning_cyclic", {}).get("scales")
    assert (scales is None) == (first == "auto")
    assert scales is None or len(set(scales.values())) > 1  # else any of them would do
    ranks = pipelines(job, 2, file, back, preset=second, stages=4, function=go_on)
    begin, plan = BATCH if back else STEP, ranks[0]["plan"]
    reference = Reference(job, ranks[0]["stage_of"], precision())
    optimizer, state = reference.optimizer, (FIRST_SCALE, 0)
    rules = "sync" if first == "auto" else "freshest", plan.weights
    for rule, k, num in zip(rules, (0, begin), (STEP, 14 - begin), strict=True):
        scaled = Scaled(
            optimizer, reference.stages, together=rule != "freshest", late=int(rule != "sync"),
            state=state,
        )  # fmt: skip
        reference.optimizer = scaled
        reference.train(plan, num, rule=rule, first=k)
        state = scaled.states[-1]
        assert max(scaled.skipped) > 0  # before, and behind
    compare(ranks, {"weights": reference.weights, "scaler": state})
    assert {rank["global_step"] for rank in ranks} == {14}
    assert ranks[0]["said"] == (first != "auto")


def test_a_run_goes_back_to_its_own_checkpoint_alike_on_all_ranks(tmp_path: Path) -> None:
    job = job_of(num_steps=10, num_epochs=1, num_microbatches=1)
    plan: dict[str, Any] = {"preset": "pipedream", "stages": 4}
    pipelines(job, 1, tmp_path, STEP, function=save, **plan)
    args = tmp_path / f"step={STEP}.ckpt", True
    (alone,) = pipelines(job, 1, *args, function=go_on, **plan)
    compare(pipelines(job, 2, *args, function=go_on, **plan), alone)


def epochs(job: Job, strategy: dict[str, Any] | None, folder: Path, num: int) -> Any:
    """Train until behind so many epochs, and save each; begin with the last but one."""
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    run = prepare(replace(job, num_epochs=num), strategy, [saver], enable_checkpointing=True)
    begin = folder / f"epoch={num - 2}.ckpt" if num > 1 else None
    run.trainer.fit(run.module, run.batches, ckpt_path=begin)
    return run.outcome()


@pytest.mark.parametrize("first", ["lockstep_dp", "auto"])
def test_checkpoints_are_exchanged_with_the_plain_trainer(first: str, tmp_path: Path) -> None:
    job = job_of(num_microbatches=2)
    lockstep, plain = {"preset": "lockstep_dp", "stages": 4}, None
    order = (lockstep, plain) if first == "lockstep_dp" else (plain, lockstep)
    for num, strategy in enumerate(order, start=1):
        given = processes.run(epochs, 2 if strategy else 1, job, strategy, tmp_path, num)
    compare(given, plainly(fit, job))
