"""Rates that change, batches that are added up, and flags that say how long a fit is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.conformance.harness import Batches
from tests.conformance.modules import Plain, vectors
from tests.harness import processes
from tests.harness.pipelines import Job, assert_equals_plain, pipelines
from tests.harness.processes import here
from tests.harness.rows import in_turn, in_words, more
from tests.harness.trainers import assert_same, make_trainer, weights_of
from tests.modules.plain import ResNet
from tests.references.rules import Reference

pytestmark = pytest.mark.multi


class PerEpoch(ResNet):
    """Lowers its rate behind each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch"}]


@pytest.mark.parametrize("preset", ["cyclic_dp", more("lockstep_dp"), more("cyclic_pipeline")])
def test_rates_per_epoch(preset: str) -> None:
    m = 4 if preset == "cyclic_pipeline" else 2
    job = Job(case="resnet", module=PerEpoch, num_epochs=3, num_steps=3, num_microbatches=m)
    ranks = pipelines(job, 2, preset=preset, stages=2)
    reference = Reference(job, ranks[0]["stage_of"]).train(ranks[0]["plan"])
    reference.compare(ranks)  # rates are a part of it
    assert len(set(reference.rates)) == 3


# ---------------------------------------------------------------------- batches that are added up


@pytest.mark.parametrize(
    ("preset", "n", "num_steps", "accumulate", "options"),
    [
        ("cyclic_dp", 2, 7, 2, {"stages": 4}),  # which leave an incomplete window
        more("cyclic_dp_v1", 2, 7, 2, {"stages": 4}),
        more("lockstep_dp", 2, 7, 2, {"stages": 4}),
        more("cyclic_zero", 2, 7, 2, {"stages": 4}),
        ("cyclic_dp", 3, 8, 3, {"stages": 6, "slack": 2}),
    ],
    ids=in_words,
)
def test_workers_of_whole_steps_add_batches_up(
    preset: str, n: int, num_steps: int, accumulate: int, options: dict[str, Any]
) -> None:
    flags = (("accumulate_grad_batches", accumulate),)
    job = Job(case="resnet", num_steps=num_steps, num_microbatches=n, flags=flags)
    ranks = pipelines(job, n, preset=preset, **options)
    assert {rank["global_step"] for rank in ranks} == {2 * -(-num_steps // accumulate)}
    reference = Reference(job, ranks[0]["stage_of"])
    reference.train(ranks[0]["plan"], accumulate=accumulate).compare(ranks)


@pytest.mark.parametrize(
    ("num_steps", "accumulate", "num_ranks", "preset", "stages"),
    [
        (5, 2, 2, "1f1b", 2),  # which leave an incomplete window
        more(5, 2, 4, "gpipe", 4),
        (9, 3, 2, "gpipe", 2),  # a third, three times, is not one
    ],
)
def test_pipelines_add_batches_up(
    num_steps: int, accumulate: int, num_ranks: int, preset: str, stages: int
) -> None:
    job = Job(case="resnet", num_steps=num_steps, num_epochs=3, num_microbatches=2,
              flags=(("accumulate_grad_batches", accumulate),))  # fmt: skip
    assert_equals_plain(pipelines(job, num_ranks, preset=preset, stages=stages), job)


def test_what_two_replicas_have_added_up_is_clipped() -> None:
    flags = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    job = Job(case="gpt2", num_steps=8, flags=tuple(flags.items()))
    ranks = pipelines(job, 2, preset="1f1b", stages=2, replicas=2)
    assert_equals_plain(ranks, job, exact_metrics=False)


# ---------------------------------------------------------------------- how long a fit is

FLAGS = [
    {"fast_dev_run": 3},
    {"max_epochs": 2, "limit_train_batches": 0.5, "limit_val_batches": 0},
    {"max_epochs": 3, "val_check_interval": 4, "check_val_every_n_epoch": None},
    {"max_epochs": 9, "max_steps": 4, "accumulate_grad_batches": 2},
    {"max_epochs": 2, "min_steps": 13},
]


class Counting(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen.append((batch_idx, float(loss.detach())))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


def batches(num: int) -> DataLoader[Any]:
    groups = [[here().num_ranks * t + here().rank] for t in range(num)]
    return DataLoader(Batches(vectors, groups), batch_size=None)


def fit_by(strategy: Any, flags: dict[str, Any]) -> dict[str, Any]:
    module = Counting()
    trainer = make_trainer(strategy, **({"max_epochs": 1} | flags))
    trainer.fit(module, batches(6), batches(2))
    batch_numbers = [number for number, _ in module.seen]
    metrics = {name: float(x) for name, x in trainer.callback_metrics.items()}
    return {
        "counts": (trainer.global_step, trainer.current_epoch, batch_numbers, list(metrics)),
        "first_loss": module.seen[0][1],
        "val_loss": metrics.get("val_loss"), "weights": weights_of(module),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "preset"),
    in_turn(FLAGS, ["cyclic_dp", "cyclic_dp_v1", "lockstep_dp"]),
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)),
)
def test_flags_mean_what_they_mean_under_ddp(flags: dict[str, Any], preset: str) -> None:
    expected = processes.run(fit_by, 2, "ddp", flags)
    ranks = processes.run(fit_by, 2, preset, flags)
    for what in ("counts", "first_loss"):
        assert [rank[what] for rank in ranks] == [rank[what] for rank in expected], what
    assert ranks[0]["val_loss"] == ranks[1]["val_loss"]
    assert_same(ranks[1]["weights"], ranks[0]["weights"])
