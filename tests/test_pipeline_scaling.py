"""Half precision in pipelines: the scale of each step, which updates it skips, and who goes on.

With a flush the reference is one device. Without one it is one process under autocast that goes by
the rule, micro-batch by micro-batch; under another plan, by one rule, then by another.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.harness import processes
from tests.harness.pipelines import Job, Outcome, loader, pipelines, plainly, prepare
from tests.harness.trainers import assert_same
from tests.references import asynchronous, sequential
from tests.references.replicated import by_stage
from tests.references.scaled import FIRST_SCALE, Scaled, precision

pytestmark = pytest.mark.multi

MAX_NORM = 0.02
RULES = {
    "pipedream_2bw": "delayed", "cyclic_pipeline": "freshest", "cyclic_mp": "freshest",
    "1f1b": "sync", "auto": "sync",
}  # fmt: skip
DELAYED, BY_STAGE = {"weights": "delayed"}, {"clip_norm": "stage"}
JOB, LONG = Job(case="vit", num_steps=7), Job(case="vit", num_steps=14, num_epochs=1)
CLIPPED = (("gradient_clip_val", MAX_NORM),)
STEP, BATCH = 3, 6  # of a checkpoint; of the run that goes back to it


class Scales(Callback):
    """Read the scale behind each batch; load everything from a file in the middle of a fit."""

    def __init__(self, file: str | None) -> None:
        self.file, self.seen = file, list[float]()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append(trainer.precision_plugin.scaler.get_scale())
        if self.file is not None and batch_idx == BATCH - 1:
            saved = trainer.strategy.load_checkpoint(self.file)
            trainer.strategy.load_model_state_dict(saved)
            trainer.strategy.load_optimizer_state_dict(saved)
            trainer.precision_plugin.load_state_dict(saved["MixedPrecision"])


def fit(
    job: Job, strategy: dict[str, Any] | None, file: str | None = None, back: bool = False,
    **flags: Any,
) -> Outcome:  # fmt: skip
    """Train on this rank; from a file, or going back to it in the middle."""
    scales = Scales(file if back else None)
    run = prepare(job, strategy, [scales], plugins=[precision()], **flags)
    valid = loader(job, 1) if "val_check_interval" in flags else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.trainer.fit(run.module, run.batches, valid, ckpt_path=None if back else file)
    scaler = run.trainer.precision_plugin.scaler.state_dict()
    return run.outcome() | {
        "stage_of": getattr(run.trainer.strategy, "stage_of", None),
        "scaler": (scaler["scale"], scaler["_growth_tracker"]),
        "scales": scales.seen,
        "lrs": [g["lr"] for g in run.trainer.optimizers[0].param_groups],
        "said": sum("another plan" in str(w.message) for w in said),
    }


def fit_validating(job: Job, strategy: dict[str, Any]) -> Outcome:
    return fit(job, strategy, val_check_interval=2, limit_val_batches=1)


def fit_adding(job: Job, strategy: dict[str, Any]) -> Outcome:
    return fit(job, strategy, accumulate_grad_batches=2)


def save(job: Job, strategy: dict[str, Any] | None, folder: str, step: int = STEP) -> None:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=step, save_top_k=-1)
    flags = {"max_steps": step + 2, "enable_checkpointing": True, "plugins": [precision()]}
    run = prepare(job, strategy, [saver], **flags)
    run.trainer.fit(run.module, run.batches)


def by_rules(
    job: Job, stage_of: dict[str, int], parts: Sequence[tuple[str, int, int]],
    max_norm: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train by one rule after the other, each from a batch on, for a number of steps."""
    torch.set_num_threads(1)
    module: Any = job.make()
    module.log = module.log_dict = lambda *args, **kwargs: None
    stages, made, after = by_stage(module, stage_of), module.configure_optimizers(), None
    if isinstance(made, tuple):
        (made,), (scheduler,) = made
        after = lambda t: scheduler["scheduler"].step()  # noqa: E731
    state, skipped = (FIRST_SCALE, 0), []
    for rule, first, num_steps in parts:
        scaled: Any = Scaled(
            made, stages, together=rule != "freshest", max_norm=max_norm,
            late=int(rule != "sync"), state=state,
        )  # fmt: skip

        def loss(module: Any, t: int, i: int, first: int = first, scaled: Any = scaled) -> Tensor:
            k = (first + t) % job.num_steps * job.num_microbatches + i
            with torch.autocast("cpu", torch.float16):
                output = module.training_step(job.batch(k), 0)
            value: Tensor = output["loss"] if isinstance(output, dict) else output
            return value * scaled.scale(t)

        train, name = (
            (sequential.train, "num_workers")
            if rule == "sync"
            else (asynchronous.train, "num_microbatches")
        )
        numbers: dict[str, Any] = {name: job.num_microbatches, "num_steps": num_steps}
        train(module, stages, scaled, loss, rule=rule, after_update=after, **numbers)
        state = scaled.states[-1]
        skipped.append(scaled.skipped)
    weights = {n: x.detach().clone() for n, x in module.state_dict().items()}
    lrs = [g["lr"] for g in made.param_groups]
    return {"weights": weights, "skipped": skipped, "scaler": state, "lrs": lrs}


def compare(ranks: list[Outcome], expected: dict[str, Any], *more: str) -> None:
    for r, rank in enumerate(ranks):
        same = {n: rank["weights"][n] for n in expected["weights"]}
        assert_same(same, expected["weights"], f"rank {r}")
        for what in ("scaler", *more):
            assert rank[what] == expected[what], f"{what} of rank {r}"


# ---------------------------------------------------------------------- with a flush


@pytest.mark.parametrize(
    ("preset", "num_ranks", "more", "flags", "function"),
    [
        ("gpipe", 2, {"stages": 4}, (), fit),
        ("1f1b", 1, {"stages": 4}, CLIPPED, fit),
        ("1f1b", 2, {"stages": 4, "clip_norm": "global"}, CLIPPED, fit),
        ("1f1b", 2, {"stages": 2, "activation_checkpointing": "always"}, (), fit),
        ("1f1b", 1, {"stages": 1}, (), fit),
        ("1f1b", 4, {"stages": 2, "replicas": 2}, (), fit),
        ("1f1b", 2, {"stages": 2}, (), fit_validating),
    ],
)
def test_bits_scales_and_skips_are_those_of_one_device(
    preset: str, num_ranks: int, more: dict[str, Any], flags: tuple[Any, ...], function: Any
) -> None:
    job = Job(case="vit", num_steps=7, flags=flags)
    plain = plainly(fit, job)
    scales = plain["scales"][job.num_microbatches - 1 :: job.num_microbatches]
    assert min(scales) < FIRST_SCALE  # else nothing has been skipped
    assert {-1.0, 0.0} <= set(torch.tensor(scales).diff().sign().tolist())
    for r, rank in enumerate(pipelines(job, num_ranks, preset=preset, function=function, **more)):
        assert_same(rank["weights"], plain["weights"], f"rank {r}")
        assert rank["scales"] == scales
        assert rank["global_step"] == plain["global_step"]


def test_batches_that_are_added_up_have_one_scale() -> None:
    job = Job(case="vit", num_steps=14)
    ranks = pipelines(job, 2, preset="1f1b", stages=2, function=fit_adding)
    alone, *_ = pipelines(job, 1, preset="1f1b", stages=2, function=fit_adding)
    assert min(alone["scales"]) < FIRST_SCALE
    compare(ranks, alone, "scales")


# ---------------------------------------------------------------------- without one


@pytest.mark.parametrize(
    ("preset", "num_ranks", "case", "flags", "more"),
    [
        ("pipedream_2bw", 2, "vit", CLIPPED, {}),
        ("cyclic_pipeline", 4, "vit", (), {}),
        ("cyclic_pipeline", 2, "vit", CLIPPED, BY_STAGE),
        ("cyclic_mp", 4, "resnet", (), {}),  # with a schedule, and buffers that change
        ("cyclic_mp", 4, "vit", CLIPPED, DELAYED),
    ],
)
def test_scales_and_skipped_updates_follow_the_rule(
    preset: str, num_ranks: int, case: str, flags: tuple[Any, ...], more: dict[str, str]
) -> None:
    job = Job(case=case, num_steps=JOB.num_steps, flags=flags)
    ranks = pipelines(job, num_ranks, preset=preset, stages=4, function=fit, **more)
    rule, num_steps = more.get("weights", RULES[preset]), job.num_steps * job.num_epochs
    args = job, ranks[0]["stage_of"], [(rule, 0, num_steps)], MAX_NORM if flags else None
    (expected,) = processes.run(by_rules, 1, *args)
    compare(ranks, expected, "lrs")
    assert [rank["global_step"] for rank in ranks] == [num_steps] * num_ranks  # skipped ones, too
    skipped = set(expected["skipped"][0])
    assert 0 in skipped
    if rule == "delayed":
        assert skipped == {0, 4}
    else:
        assert skipped - {0, 4}  # some stages were updated while others were not


@pytest.mark.parametrize("plan", [{"preset": "pipeoptim"}, {"preset": "cyclic_mp", **DELAYED}])
def test_flushes_in_the_middle_change_no_scale(plan: dict[str, Any]) -> None:
    job = Job(case="vit", num_microbatches=1 if plan["preset"] == "pipeoptim" else 4, num_steps=7)
    alone, *_ = pipelines(job, 1, stages=4, function=fit, **plan)
    compare(pipelines(job, 2, stages=4, function=fit_validating, **plan), alone)


def test_replicas_have_the_same_scale() -> None:
    ranks = pipelines(JOB, 4, preset="pipedream_2bw", stages=2, replicas=2, function=fit)
    compare(ranks, ranks[0])
    assert ranks[0]["scaler"][0] < FIRST_SCALE


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("plan", "step"),
    [({"preset": "1f1b"}, 3), ({"preset": "pipedream_2bw"}, 2),
     ({"preset": "cyclic_mp", **DELAYED}, 9)],
)  # fmt: skip
def test_a_resumed_run_goes_on_with_the_scales(
    plan: dict[str, Any], step: int, tmp_path: Path
) -> None:
    alone, *_ = pipelines(JOB, 1, function=fit, stages=4, **plan)
    pipelines(JOB, 2, str(tmp_path), step, function=save, stages=4, **plan)
    file = str(tmp_path / f"step={step}.ckpt")
    compare(pipelines(JOB, 2, file, function=fit, stages=4, **plan), alone)


@pytest.mark.parametrize(
    ("first", "second", "back"), [("cyclic_mp", "1f1b", False), ("auto", "pipedream_2bw", True)]
)
def test_another_plan_goes_on_from_the_newest_scale(
    first: str, second: str, back: bool, tmp_path: Path
) -> None:
    """The scales of steps that had begun are of no use to a plan under which others have."""
    if first == "auto":
        processes.run(save, 1, LONG, None, str(tmp_path))
    else:
        pipelines(LONG, 2, str(tmp_path), preset=first, stages=4, function=save)
    file = str(tmp_path / f"step={STEP}.ckpt")
    scales = torch.load(file, weights_only=False).get("lightning_cyclic", {}).get("scales")
    assert (scales is None) == (RULES[first] == "sync")
    assert scales is None or len(set(scales.values())) > 1  # else any of them would do
    given = pipelines(LONG, 2, file, back, preset=second, stages=4, function=fit)
    begin = BATCH if back else STEP
    parts = [(RULES[first], 0, STEP), (RULES[second], begin, LONG.num_steps - begin)]
    (expected,) = processes.run(by_rules, 1, LONG, given[0]["stage_of"], parts)
    compare(given, expected)
    assert {rank["global_step"] for rank in given} == {LONG.num_steps}
    assert given[0]["said"] == (first != "auto")
    assert all(max(skipped) > 0 for skipped in expected["skipped"])  # before, and behind


def test_a_run_goes_back_to_its_own_checkpoint_alike_on_all_ranks(tmp_path: Path) -> None:
    job = Job(case="vit", num_steps=10, num_epochs=1, num_microbatches=1)
    plan: dict[str, Any] = {"preset": "pipedream", "stages": 4}
    pipelines(job, 2, str(tmp_path), function=save, **plan)
    args = str(tmp_path / f"step={STEP}.ckpt"), True
    (alone,) = pipelines(job, 1, *args, function=fit, **plan)
    compare(pipelines(job, 2, *args, function=fit, **plan), alone)
