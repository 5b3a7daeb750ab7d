"""Under pipelines, Lightning's features do what they do on a single device, bit by bit.

One case by hand: pytest tests/test_pipeline_features.py -k "clipping and gpt2"
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_cyclic.errors import ConfigurationError
from tests import stagewise_torch as own
from tests.corpus import assert_same
from tests.rows import chosen, more
from tests.stagewise_modules import CASES
from tests.stagewise_runs import (
    Job,
    Outcome,
    assert_equals_plain,
    loader,
    pipelines,
    plainly,
    prepare,
    reference,
)

pytestmark = pytest.mark.multi

PLACES = [(1, "gpipe", 4), (2, "1f1b", 2), (4, "gpipe", 4)]  # processes, preset, stages
EXHAUSTIVE = pytest.mark.exhaustive


# ---------------------------------------------------------------------- clipping, accumulation


@pytest.mark.parametrize(
    ("name", "num_ranks", "preset", "flags"),
    [
        ("resnet", 2, "1f1b", {"gradient_clip_val": 0.3}),
        more("gpt2", 2, "gpipe", {"gradient_clip_val": 0.1}),
        ("gpt2", 4, "1f1b", {"gradient_clip_val": 0.1}),  # whose tied weights count once
        ("frozen", 2, "gpipe", {"gradient_clip_val": 0.1}),
        ("resnet", 4, "gpipe", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        more("t5", 2, "1f1b", {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
    ],
)
def test_clipping(name: str, num_ranks: int, preset: str, flags: dict[str, Any]) -> None:
    job = Job(case=name, flags=tuple(flags.items()))
    ranks = pipelines(job, num_ranks, preset=preset, stages=4 if num_ranks == 4 else 2)
    assert_equals_plain(ranks, job)
    assert reference(job)["logged"] != reference(Job(case=name))["logged"]


@pytest.mark.parametrize(("num_ranks", "preset", "stages"), chosen(PLACES, PLACES[1:]))
@pytest.mark.parametrize(
    "num_steps",
    [5, pytest.param(8, marks=EXHAUSTIVE)],  # five leave an incomplete window
)
def test_accumulating_batches_on_top(
    num_steps: int, num_ranks: int, preset: str, stages: int
) -> None:
    job = Job(case="resnet", num_steps=num_steps, num_epochs=3, num_microbatches=2,
              flags=(("accumulate_grad_batches", 2),))  # fmt: skip
    ranks = pipelines(job, num_ranks, preset=preset, stages=stages)
    assert_equals_plain(ranks, job)


def test_accumulating_three_batches() -> None:  # a third, three times, is not one
    job = Job(case="resnet", num_steps=12, num_microbatches=2, num_epochs=2,
              flags=(("accumulate_grad_batches", 3),))  # fmt: skip
    assert_equals_plain(pipelines(job, 2, preset="1f1b", stages=2), job)


def test_clipping_what_two_replicas_accumulated() -> None:
    flags = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    job = Job(case="gpt2", num_steps=8, flags=tuple(flags.items()))
    ranks = pipelines(job, 4, preset="1f1b", stages=2, replicas=2)
    assert_equals_plain(ranks, job, exact_metrics=False)


# ---------------------------------------------------------------------- rates


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


class OnPlateau(own.ResNet):
    """Lower the rate when the accuracy has not fallen: often, and by an exact number."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        plateau = {"scheduler": scheduler, "interval": "epoch", "monitor": "train_metric"}
        return {"optimizer": optimizer, "lr_scheduler": plateau}


def fit_and_read_rates(job: Job, strategy: Any) -> Outcome:
    rates = Rates()
    run = prepare(job, strategy, [rates])
    run.trainer.fit(run.module, run.batches)
    return run.outcome() | {"rates": rates.seen}


@pytest.mark.parametrize(
    ("module", "num_ranks", "preset", "stages"),
    chosen(
        [(module, *place) for module in (own.ResNet, OnPlateau) for place in PLACES],
        [(own.ResNet, *PLACES[1]), (OnPlateau, *PLACES[2])],
    ),
)
def test_rates(module: Any, num_ranks: int, preset: str, stages: int) -> None:
    job = Job(case="resnet", module=module, num_steps=2, num_epochs=6)
    ranks = pipelines(job, num_ranks, function=fit_and_read_rates, preset=preset, stages=stages)
    assert_equals_plain(ranks, job)
    rates = plainly(fit_and_read_rates, job)["rates"][:: job.num_microbatches]
    assert len(set(rates)) > 2
    assert [rank["rates"] for rank in ranks] == [rates] * num_ranks


# ---------------------------------------------------------------------- evaluation


def fit_and_evaluate(job: Job, strategy: Any) -> Outcome:
    """Evaluate on whole batches, whatever it was trained on."""
    run = prepare(job, strategy)
    whole = DataLoader(loader(job, (strategy or {}).get("replicas", 1)).dataset, batch_size=None)
    untrained = run.trainer.validate(run.module, whole, verbose=False)
    run.trainer.fit(run.module, run.batches, whole)
    trained = run.outcome()
    evaluated = {
        "untrained": untrained,
        "valid": run.trainer.validate(run.module, whole, verbose=False),
        "test": run.trainer.test(run.module, whole, verbose=False),
        "predictions": run.trainer.predict(run.module, whole),
    }
    assert_same(run.outcome()["weights"], trained["weights"], "evaluation")
    return trained | evaluated


EVALUATED = ("untrained", "valid", "test")


@pytest.mark.parametrize(
    ("name", "num_ranks", "preset", "stages"),
    [
        pytest.param(name, *place, marks=[] if k in always else [EXHAUSTIVE])
        for name, always in (("resnet", (0,)), ("gpt2", (1,)), ("t5", ()))
        for k, place in enumerate(PLACES)
    ],
)
def test_validate_test_and_predict(name: str, num_ranks: int, preset: str, stages: int) -> None:
    job = Job(case=name)
    plain = plainly(fit_and_evaluate, job)
    ranks = pipelines(job, num_ranks, function=fit_and_evaluate, preset=preset, stages=stages)
    assert plain["untrained"] != plain["valid"]
    for rank in ranks:
        assert_same(rank["weights"], plain["weights"])
        assert rank["metrics"]["val_loss"] == plain["metrics"]["val_loss"]
        assert {what: rank[what] for what in EVALUATED} == {w: plain[w] for w in EVALUATED}
        for given, expected in zip(rank["predictions"], plain["predictions"], strict=True):
            assert torch.equal(given, expected)


def test_each_replica_predicts_its_own_batches() -> None:
    job = Job(case="resnet")
    ranks = pipelines(job, 4, function=fit_and_evaluate, preset="gpipe", stages=2, replicas=2)
    assert_same(ranks[0]["weights"], reference(job)["weights"])
    halves = [torch.cat(rank["predictions"]) for rank in ranks]
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


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.mark.parametrize(("num_ranks", "preset", "stages"), chosen(PLACES, PLACES[1:2]))
def test_stopping_early_and_keeping_the_best(
    num_ranks: int, preset: str, stages: int, tmp_path: Path, plain_folder: Path
) -> None:
    job = Job(case="resnet", num_epochs=12)
    plain = plainly(fit_and_stop, job, plain_folder)
    assert 0 < plain["stopped"] < 11
    ranks = pipelines(
        job, num_ranks, tmp_path / "pipeline", function=fit_and_stop, preset=preset, stages=stages
    )
    for rank in ranks:
        for what in ("stopped", "epoch", "global_step", "best"):
            assert rank[what] == plain[what], what
        assert_same(rank["weights"], plain["weights"])
    best = plain["best"][0]
    saved = [
        torch.load(folder / best, weights_only=True)
        for folder in (plain_folder, tmp_path / "pipeline")
    ]
    assert_same(saved[1]["state_dict"], saved[0]["state_dict"])


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


@pytest.mark.parametrize(
    ("name", "dropout"),
    [more("resnet", 0.0), more("gpt2", 0.0), more("vae", 0.0), ("bert", 0.2)],
)
def test_a_pipeline_goes_on_with_the_same_bits(name: str, dropout: float, tmp_path: Path) -> None:
    job = Job(case=name, dropout=dropout)
    through = pipelines(job, 2, tmp_path, function=fit_in_parts, **SAVED_IN)
    for begin_with in ("epoch=0.ckpt", "step=3.ckpt"):
        again = pipelines(job, 2, tmp_path, begin_with, function=fit_in_parts, **SAVED_IN)
        for rank in again:
            assert rank["global_step"] == through[0]["global_step"]
            assert rank["logged"] == through[0]["logged"][-len(rank["logged"]) :]
            assert_same(rank["weights"], through[0]["weights"], begin_with)


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=EXHAUSTIVE), "gpt2"])
def test_checkpoints_move_between_places(name: str, tmp_path: Path) -> None:
    job = Job(case=name)
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


@pytest.mark.parametrize(
    ("name", "num_ranks", "precision"),
    [
        ("resnet", 2, "bf16-mixed"),
        more("gpt2", 2, "bf16-mixed"),  # as with rematerialisation, below
        pytest.param("t5", 1, "bf16-mixed", marks=EXHAUSTIVE),  # and test_precisions.py has more
        more("t5", 4, "bf16-mixed"),
        pytest.param("gru", 2, "64-true", marks=EXHAUSTIVE),
        pytest.param("gpt2", 2, "bf16-true", marks=EXHAUSTIVE),
    ],
)
def test_precision(name: str, num_ranks: int, precision: str) -> None:
    job = Job(case=name, flags=(("precision", precision),))
    ranks = pipelines(job, num_ranks, preset="1f1b", stages=2 if num_ranks == 2 else 4)
    assert_equals_plain(ranks, job)
    assert reference(job)["logged"] != reference(Job(case=name))["logged"]


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
