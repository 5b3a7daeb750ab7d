"""What ends a pipeline's flow changes nothing: validation, checkpoints, stops, other fits."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.harness.pipelines import (
    Job,
    Outcome,
    fit_in_two,
    fit_validating,
    pipelines,
    plainly,
    prepare,
    reference,
)
from tests.harness.processes import here
from tests.harness.rows import in_words, more
from tests.harness.trainers import assert_same
from tests.references.rules import ONE_EACH, PREDICTING, WHOLE, Clipped, Reference

pytestmark = pytest.mark.multi

STEP, NORM = 3, 0.05
CLIPPED = {"gradient_clip_val": NORM}


def job_of(preset: str, num_ranks: int = 2, **more: Any) -> Job:
    m = num_ranks if preset in WHOLE and num_ranks > 1 else 1 if preset in ONE_EACH else 4
    flags = tuple(more.pop("flags", {}).items())
    return Job(case="resnet", num_steps=5, num_epochs=1, num_microbatches=m, flags=flags, **more)


@pytest.mark.parametrize(
    ("preset", "num_ranks", "flags", "options"),
    [
        ("cyclic_pipeline", 2, {}, {"stages": 4}),
        ("cyclic_mp", 2, {}, {"stages": 2}),
        ("pipedream", 2, {}, {"stages": 4}),
        ("pipeoptim", 2, {}, {"stages": 4}),
        more("spectrain", 2, {}, {"stages": 4}),
        ("pipedream_2bw", 2, CLIPPED, {"stages": 4}),  # by norms of steps that have begun
        more("pipedream_2bw", 1, {}, {"stages": 4}),
        more("pipedream", 1, {}, {"stages": 4}),
        more("cyclic_pipeline", 4, {}, {"stages": 2, "replicas": 2}),
        ("1f1b", 2, {}, {"stages": 4}),
        ("interleaved_1f1b", 2, {}, {"stages": 4}),
        ("zb_v", 2, {}, {"stages": 4}),
        ("cyclic_dp", 1, {}, {"stages": 4}),  # one device
        ("cyclic_dp", 4, {}, {"stages": 4, "group_size": 2}),
        more("cyclic_dp_v1", 2, {}, {"stages": 4}),
        more("cyclic_zero", 2, {}, {"stages": 4}),
    ],
    ids=in_words,
)
def test_validation_and_a_checkpoint_in_mid_epoch_change_nothing(
    preset: str, num_ranks: int, flags: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    job = job_of(preset, num_ranks, flags=flags)
    validated = replace(job, flags=(*job.flags, ("val_check_interval", 2)))
    plan = {"preset": preset, **options}
    ranks = pipelines(validated, num_ranks, tmp_path, STEP, function=fit_in_two, **plan)
    if preset in PREDICTING:
        expected = pipelines(job, 1, **plan)[0]["weights"]
    else:
        oracle = Reference(job, ranks[0]["stage_of"])
        if flags:
            clipped = Clipped(oracle.optimizer, oracle.stages, NORM, "all")
            oracle.optimizer = clipped
        expected = oracle.train(ranks[0]["plan"]).weights
        assert not flags or clipped.has_clipped
    for r, rank in enumerate(ranks):
        assert_same(rank["weights"], expected, f"rank {r}")
        assert rank["global_step"] == job.num_steps
        assert rank["plan"].num_groups == num_ranks // options.get("group_size", 1)
    if num_ranks == 1 and preset == "cyclic_dp":
        saved = torch.load(tmp_path / f"step={STEP}.ckpt", weights_only=False)["lightning_cyclic"]
        assert saved["t"] == STEP
        assert saved["previous"]


@pytest.mark.parametrize(("preset", "num_ranks"), [("pipedream", 2), more("pipedream_2bw", 2)])
def test_validation_within_an_epoch_sees_the_newest_weights(preset: str, num_ranks: int) -> None:
    one, two = (
        pipelines(job_of(preset), n, preset=preset, stages=4, function=fit_validating)[0]
        for n in (1, num_ranks)
    )
    assert one["metrics"]["val_loss"] == two["metrics"]["val_loss"]


# ---------------------------------------------------------------------- stops


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("cyclic_dp", {"stages": 4}), more("cyclic_dp_v1", {"stages": 4}),
        more("lockstep_dp", {"stages": 4}), ("cyclic_pipeline", {"stages": 2}),
    ],
    ids=in_words,
)  # fmt: skip
def test_stopping_in_mid_epoch_leaves_the_weights_of_that_step(
    preset: str, options: dict[str, Any]
) -> None:
    job = job_of(preset, flags={"max_steps": 3})
    ranks = pipelines(job, 2, preset=preset, **options)
    expected = Reference(job, ranks[0]["stage_of"]).train(ranks[0]["plan"], 3).weights
    for rank in ranks:
        assert rank["global_step"] == 3
        assert_same(rank["weights"], expected)


class Asked(Callback):
    """One rank is asked to stop."""

    done = 0

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if here().rank == 2 and trainer.global_step == STEP:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, *args: Any) -> None:
        self.done += 1


def fit_until_asked(job: Job, strategy: dict[str, Any]) -> Outcome:
    asked = Asked()
    run = prepare(job, strategy, [asked])
    with pytest.raises(SIGTERMException):
        run.trainer.fit(run.module, run.batches)
    return run.outcome() | {"done": asked.done}


def test_all_replicas_stop_at_the_same_step() -> None:
    job = replace(job_of("pipedream_2bw"), num_epochs=4)
    plan = {"preset": "pipedream_2bw", "stages": 2, "replicas": 2}
    ends = pipelines(job, 4, function=fit_until_asked, **plan)
    assert len({end["done"] for end in ends}) == 1
    assert STEP < ends[0]["done"] <= STEP + 8
    for end in ends:
        assert_same(end["weights"], ends[0]["weights"])


# ---------------------------------------------------------------------- second fits


def fit_twice(job: Job, strategy: dict[str, Any], folder: Path) -> list[Outcome]:
    """Fit, saving a step; fit again from there, with the same Trainer."""
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEP, save_top_k=-1)
    run = prepare(job, strategy, [saver], enable_checkpointing=True)
    found = []
    for path in (None, folder / f"step={STEP}.ckpt"):
        run.trainer.fit(run.module, run.batches, ckpt_path=path)
        groups = len(dist.distributed_c10d._world.pg_map)
        found.append(run.outcome() | {"groups": groups})
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in run.module.modules())
    assert hooks == 0
    return found


@pytest.mark.parametrize(
    "preset", ["cyclic_dp", more("cyclic_dp_v1"), more("1f1b"), "cyclic_pipeline"]
)
def test_a_trainer_goes_on_from_what_it_has_saved_in_a_fit_before(
    preset: str, tmp_path: Path
) -> None:
    ends = pipelines(job_of(preset), 2, tmp_path, function=fit_twice, preset=preset, stages=2)
    for first, second in ends:
        assert_same(second["weights"], first["weights"])
        assert second["global_step"] == first["global_step"] == 5
        # the default group alone is left
        assert (first["groups"], second["groups"]) == (1, 1)


def fit_on(job: Job, strategy: dict[str, Any], anew: bool) -> Outcome:
    """Train two epochs in two fits, of one Trainer or of two."""
    run = prepare(job, strategy)
    run.trainer.fit(run.module, run.batches)
    again = prepare(job, strategy) if anew else run
    again.trainer.fit_loop.max_epochs = 1 if anew else 2
    again.trainer.fit(run.module, run.batches)
    return replace(again, module=run.module).outcome()


@pytest.mark.parametrize(
    ("preset", "anew"),
    [
        ("cyclic_dp", False),
        more("cyclic_dp_v1", True),
        more("lockstep_dp", False),
        ("cyclic_pipeline", True),
    ],
)
def test_two_fits_in_a_row_train_one_after_the_other(preset: str, anew: bool) -> None:
    job = job_of(preset)
    ranks = pipelines(job, 2, anew, preset=preset, stages=2, function=fit_on)
    oracle = Reference(job, ranks[0]["stage_of"]).train(ranks[0]["plan"])
    oracle.configure()  # each fit has an optimizer of its own
    oracle.train(ranks[0]["plan"])
    for rank in ranks:
        assert_same(rank["weights"], oracle.weights)


# ---------------------------------------------------------------------- callbacks, and files


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
    plan = {"preset": "1f1b", "stages": 2}
    for rank in pipelines(job, 2, tmp_path / "pipeline", function=fit_and_stop, **plan):
        for what in ("stopped", "epoch", "global_step", "best"):
            assert rank[what] == plain[what], what
        assert_same(rank["weights"], plain["weights"])
    plain_one, other = (
        torch.load(tmp_path / kind / plain["best"][0], weights_only=True)["state_dict"]
        for kind in ("plain", "pipeline")
    )
    assert_same(other, plain_one)


def fit_epochs(job: Job, strategy: Any, folder: Path, num_epochs: int, begin: str = "") -> Outcome:
    """Save a checkpoint of each epoch; begin with one, or anew."""
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    job = replace(job, num_epochs=num_epochs)
    run = prepare(job, strategy, [saver], enable_checkpointing=True)
    if begin:
        for p in run.module.parameters():
            p.data.zero_()  # so that all must come from the file
    run.trainer.fit(run.module, run.batches, ckpt_path=folder / begin if begin else None)
    return run.outcome()


SAVED_IN = {"preset": "1f1b", "stages": 4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where a pipeline, and a plain Trainer, have saved both of their epochs."""
    folder, job = tmp_path_factory.mktemp("saved"), Job(case="gpt2")
    pipelines(job, 2, folder / "pipeline", 2, function=fit_epochs, **SAVED_IN)
    plainly(fit_epochs, job, folder / "plain", 2)
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "wrote"),
    [("auto", "pipeline"), (2, "plain"), more(1, "pipeline"), more(4, "pipeline")],
)
def test_checkpoints_move_between_places(saved: Path, num_ranks: Any, wrote: str) -> None:
    job = Job(case="gpt2")
    args: Any = saved / wrote, 3, "epoch=1.ckpt"
    if num_ranks == "auto":
        ends = [plainly(fit_epochs, job, *args)]
    else:
        plan = {"preset": "gpipe", "stages": 4}
        ends = pipelines(job, num_ranks, *args, function=fit_epochs, **plan)
    expected = reference(replace(job, num_epochs=3))
    for end in ends:
        assert end["global_step"] == expected["global_step"]
        assert_same(end["weights"], expected["weights"])


def test_a_checkpoint_is_a_plain_one(saved: Path) -> None:
    pipeline, plain = (
        torch.load(saved / kind / "epoch=1.ckpt", weights_only=True)
        for kind in ("pipeline", "plain")
    )
    assert_same(pipeline["state_dict"], plain["state_dict"])
    given, expected = pipeline["optimizer_states"][0], plain["optimizer_states"][0]
    assert given["param_groups"] == expected["param_groups"]
    assert given["state"].keys() == expected["state"].keys()
    for p, values in expected["state"].items():
        assert_same(given["state"][p], values, f"parameter {p}")


def test_a_pipeline_with_dropout_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    job = Job(case="bert", dropout=0.2, num_epochs=1)
    (through,) = pipelines(job, 1, **SAVED_IN)
    for rank in pipelines(job, 2, tmp_path, STEP, function=fit_in_two, **SAVED_IN):
        assert rank["global_step"] == through["global_step"]
        assert rank["logged"] == through["logged"][-len(rank["logged"]) :]
        assert_same(rank["weights"], through["weights"])
