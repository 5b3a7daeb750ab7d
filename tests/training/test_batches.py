"""Batches of every size are cut right, and all stages of a replica see the same one.

One case by hand: pytest tests/training/test_batches.py -k "uneven and lstm"
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_cyclic.errors import ConfigurationError
from tests.harness.pipelines import (
    Job,
    Outcome,
    StepLosses,
    assert_equal_runs,
    assert_equals_plain,
    joined,
    loader,
    pipelines,
    plainly,
    prepare,
    reference,
)
from tests.harness.processes import here
from tests.harness.rows import more
from tests.harness.trainers import assert_same, make_trainer, strategy_of, weights_of
from tests.modules import plain as own
from tests.modules.cases import CASES

pytestmark = pytest.mark.multi


# ---------------------------------------------------------------------- sizes of batches


class SgdUNet(own.UNet):
    """Without the optimizer that makes much of small differences."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SgdLstm(own.LstmStack):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Sized(Dataset[Any]):
    """Batches of given numbers of rows."""

    def __init__(self, job: Job, sizes: tuple[int, ...]) -> None:
        self._job, self._sizes = job, sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, t: int) -> Any:
        return CASES[self._job.case].batch(t, self._sizes[t])


def fit_sizes(job: Job, strategy: Any, sizes: tuple[int, ...]) -> Outcome:
    """Train plainly, or in a pipeline, on whole batches."""
    more = {} if strategy else {"accumulate_grad_batches": 1}
    run = prepare(
        replace(job, num_microbatches=job.num_microbatches if strategy else 1), strategy, **more
    )
    run.trainer.fit(run.module, DataLoader(Sized(job, sizes), batch_size=None))
    return run.outcome()


UNEVEN = {
    "not divisible": (10, 10, 9, 11, 10, 13, 10, 9),
    "smaller": (3, 2, 1, 3, 1, 2, 3, 3),
    "last": (8, 8, 8, 8, 8, 8, 8, 5),
    "any": (8, 3, 10, 1, 8, 7, 2, 12),
}


@pytest.mark.parametrize(
    ("name", "module", "uneven"),
    [
        ("lstm", SgdLstm, "not divisible"), ("unet", SgdUNet, "smaller"),
        more("lstm", SgdLstm, "last"), more("unet", SgdUNet, "any"),
    ],
)  # fmt: skip
def test_uneven_micro_batches_weigh_as_their_rows(name: str, module: Any, uneven: str) -> None:
    sizes = UNEVEN[uneven]
    job = Job(case=name, module=module, num_epochs=1)
    whole = plainly(fit_sizes, job, sizes)
    one = pipelines(job, 1, sizes, function=fit_sizes, preset="gpipe", stages=4)[0]
    assert one["global_step"] == whole["global_step"] == 8
    for what, x in whole["weights"].items():
        torch.testing.assert_close(one["weights"][what], x, rtol=1e-4, atol=1e-5)
    assert one["logged"] == pytest.approx(whole["logged"], rel=1e-4)
    assert one["metrics"] == pytest.approx(whole["metrics"], rel=1e-4)
    two = pipelines(job, 2, sizes, function=fit_sizes, preset="gpipe", stages=4)
    assert_equal_runs(two, one)


def test_a_batch_of_another_length_is_learnt_anew() -> None:
    """Rows and sequence lengths change: ghosts have other shapes in each batch."""
    job = Lengths(case="lstm")
    assert_equals_plain(pipelines(job, 2, preset="1f1b", stages=4), job)


class Lengths(Job):
    """Cut the sequences of each step to another length."""

    def batch(self, k: int) -> Tensor:
        t = k // self.num_microbatches
        return super().batch(k)[:, : 9 - t % 3]


# ---------------------------------------------------------------------- one batch for all stages


class Stream(IterableDataset[Any]):
    """Give every rank but the last of its replica other batches: they are of no use.

    The worker of stage 0, whose batch counts, is on the last rank of its replica.
    """

    def __init__(self, job: Job, replicas: int) -> None:
        per_replica = here().num_ranks // replicas
        replica, place = divmod(here().rank, per_replica)
        self._job, self._groups = job, job.groups(replicas, replica)
        self._other = 10_000 * (per_replica - 1 - place)

    def __iter__(self) -> Iterator[Any]:
        for group in self._groups:
            yield joined([self._job.batch(self._other + k) for k in group])


def fit_stream(job: Job, strategy: dict[str, Any]) -> Outcome:
    run = prepare(job, strategy)
    stream = Stream(job, strategy.get("replicas", 1))
    run.trainer.fit(run.module, DataLoader(stream, batch_size=None))
    return run.outcome()


@pytest.mark.parametrize("name", ["unet", more("siamese"), more("gru")])
def test_stages_see_the_batch_of_the_first(name: str) -> None:
    job = Job(case=name)
    ranks = pipelines(job, 2, function=fit_stream, preset="gpipe", stages=2)
    assert_equals_plain(ranks, job)


def test_stages_of_each_replica_see_its_batches() -> None:
    job = Job(case="unet")
    ranks = pipelines(job, 4, function=fit_stream, preset="1f1b", stages=2, replicas=2)
    assert_equals_plain(ranks, job, exact_metrics=False)


def fit_and_predict(job: Job, strategy: dict[str, Any]) -> Outcome:
    run = prepare(job, strategy)
    run.trainer.fit(run.module, run.batches)
    whole = DataLoader(loader(job, strategy["replicas"]).dataset, batch_size=None)
    return run.outcome() | {"predictions": torch.cat(run.trainer.predict(run.module, whole))}


def test_each_replica_predicts_its_own_batches() -> None:
    job = Job(case="resnet", num_epochs=1)
    ranks = pipelines(job, 4, function=fit_and_predict, preset="gpipe", stages=2, replicas=2)
    halves = [rank["predictions"] for rank in ranks]
    assert torch.equal(halves[0], halves[1])  # the stages of one replica
    assert torch.equal(halves[2], halves[3])
    assert halves[0].shape == halves[2].shape
    assert not torch.equal(halves[0], halves[2])


class Augmented(own.UNet):
    """Change the batch on each rank in its own way; the last rank's is the one that counts."""

    def on_after_batch_transfer(self, batch: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        return {
            name: x + 100.0 * (here().num_ranks - 1 - here().rank) for name, x in batch.items()
        }


def test_stages_see_the_first_one_s_augmentation() -> None:
    job = Job(case="unet", module=Augmented)
    assert_equals_plain(pipelines(job, 2, preset="1f1b", stages=4), job)


class Rows(Dataset[Any]):
    """Single rows, which the DataLoader makes batches of."""

    def __len__(self) -> int:
        return 8 * 12

    def __getitem__(self, r: int) -> Any:
        x, y = own.images(r, 1)
        return x[0], y[0]


def fit_sampled(job: Job, strategy: dict[str, Any]) -> Outcome:
    """Let Lightning choose each rank's rows."""
    seen = StepLosses()
    trainer = Trainer(
        strategy=strategy_of(strategy), accelerator="cpu", devices=1,
        num_nodes=here().num_ranks, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[seen],
    )  # fmt: skip
    module = job.make()
    trainer.fit(module, DataLoader(Rows(), batch_size=6))
    return {"weights": weights_of(module), "global_step": trainer.global_step}


class SampledRows(Job):
    """The rows that Lightning's sampler of two replicas gives micro-batch i of step t."""

    def batch(self, k: int) -> Any:
        t, i = divmod(k, 4)
        rows = list(DistributedSampler(Rows(), 2, i % 2, shuffle=True, seed=0))
        start = 6 * t + i // 2 * 3
        return joined([own.images(row, 1) for row in rows[start : start + 3]])


def test_the_sampler_feeds_replicas_and_not_stages() -> None:
    job = SampledRows(case="resnet", num_steps=8, num_epochs=1)
    two = {"num_microbatches": 2, "preset": "1f1b", "stages": 2, "replicas": 2}
    for rank in pipelines(job, 4, function=fit_sampled, **two):
        assert rank["global_step"] == 8
        assert_same(rank["weights"], reference(job)["weights"])


def test_without_replicas_the_sampler_gives_every_row_to_all_stages() -> None:
    job = Job(case="resnet")
    strategy = {"num_microbatches": 2, "preset": "gpipe", "stages": 2}
    two = pipelines(job, 2, function=fit_sampled, **strategy)
    (one,) = pipelines(job, 1, function=fit_sampled, **strategy)
    assert one["global_step"] == two[0]["global_step"] == two[1]["global_step"] == 16
    for rank in two:
        assert_same(rank["weights"], one["weights"])


def fit_divided(job: Job, strategy: dict[str, Any], stage: str, advised: bool) -> Any:
    """Let the user's code divide the rows by ranks, or as the error says."""
    module, trainer = job.make(), make_trainer(strategy, max_epochs=1)

    def rows(*args: Any) -> DataLoader[Any]:
        numbers = trainer.distributed_sampler_kwargs if advised else {}
        return DataLoader(Rows(), 6, sampler=DistributedSampler(Rows(), **numbers, shuffle=False))

    whole = DataLoader(Rows(), 6)
    module.train_dataloader = rows if stage == "train" else lambda: whole  # type: ignore[method-assign]
    module.val_dataloader = rows if stage == "val" else lambda: whole  # type: ignore[method-assign]
    module.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    try:
        trainer.fit(module)
    except ConfigurationError as error:
        return str(error)
    return trainer.global_step


@pytest.mark.parametrize("stage", ["train", "val"])
def test_a_sampler_of_the_users_that_divides_a_replica_s_rows_is_refused(stage: str) -> None:
    job, strategy = Job(case="resnet"), {"preset": "gpipe", "stages": 2, "num_microbatches": 2}
    for r, said in enumerate(pipelines(job, 2, stage, False, function=fit_divided, **strategy)):
        assert f"DistributedSampler with num_replicas=2, rank={r}, but" in said
        assert "allowed on this rank: num_replicas=1, rank=0" in said
    steps = pipelines(job, 2, stage, True, function=fit_divided, **strategy)
    assert steps == [16, 16]
