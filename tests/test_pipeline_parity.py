"""Pipelines of unmodified modules end with the bits of the plain run on the same micro-batches.

One case by hand: pytest tests/test_pipeline_parity.py -k "gpt2"
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import processes
from tests.harness.pipelines import (
    Job,
    assert_equal_runs,
    assert_equals_plain,
    fit,
    pipelines,
    reference,
)
from tests.harness.rows import in_turn
from tests.modules.cases import CASES

pytestmark = pytest.mark.multi

REPRESENTATIVE = ["resnet", "unet", "gru", "gpt2", "t5"]
OTHERS = [name for name, case in CASES.items() if not (case.random or name in REPRESENTATIVE)]
GPIPE, F1B = "gpipe", "1f1b"
AGAIN = {"activation_checkpointing": "always"}


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_training_changes_what_is_trained(name: str) -> None:
    module, weights = Job(case=name).make(), reference(Job(case=name))["weights"]
    for n, p in module.named_parameters():
        assert not p.requires_grad or not torch.equal(weights[n], p), n


@pytest.mark.parametrize(
    ("name", "preset", "num_ranks", "options"),
    [
        *in_turn(REPRESENTATIVE, [GPIPE, F1B], [(1, {"stages": 4})]),
        *in_turn(OTHERS, [F1B, GPIPE], [(2, {"stages": 2})]),
        *in_turn(REPRESENTATIVE, [GPIPE, F1B], [(4, {"stages": 4})]),
        ("resnet", GPIPE, 2, {"stages": 2, **AGAIN}),
        ("unet", F1B, 2, {"stages": 2, "activation_checkpointing": "except_last"}),
        ("gpt2", F1B, 2, {"stages": 2, **AGAIN}),
        ("resnet", F1B, 4, {"stages": 4, **AGAIN}),
        ("t5", GPIPE, 4, {"stages": 4, "activation_checkpointing": "except_last"}),
        ("resnet", GPIPE, 4, {"stages": 2, "replicas": 2}),
        ("gpt2", F1B, 4, {"stages": 2, "replicas": 2}),
        ("resnet", F1B, 4, {"stages": 2, "replicas": 2, **AGAIN}),
        ("resnet", GPIPE, 2, {"stages": 1, "replicas": 2}),
        ("resnet", GPIPE, 1, {"stages": 1}),
    ],
)
def test_places(name: str, preset: str, num_ranks: int, options: dict[str, Any]) -> None:
    job = Job(case=name)
    ranks = pipelines(job, num_ranks, preset=preset, **options)
    assert {rank["num_stages"] for rank in ranks} == {options["stages"]}
    assert_equals_plain(ranks, job, exact_metrics="replicas" not in options)


def test_two_replicas_of_four_stages_that_share_a_worker_each() -> None:
    job = Job(case="gpt2", num_microbatches=6)
    ranks = pipelines(job, 2, preset=F1B, stages=4, replicas=2)
    assert_equals_plain(ranks, job, exact_metrics=False)


@pytest.mark.parametrize("name", [*REPRESENTATIVE[2:], "siamese", "inception"])
def test_stages_chosen_by_the_strategy(name: str) -> None:
    job = Job(case=name)
    ranks = processes.run(fit, 2, job, {"preset": F1B, "stages": 2})
    assert ranks[0]["num_stages"] == 2
    assert_equals_plain(ranks, job)


@pytest.mark.parametrize("bandwidth", ["10Gbit/s", "1Mbit/s"])
def test_branches_are_cut_by_times_and_messages(bandwidth: str) -> None:
    job = Job(case="inception")
    strategy = {"preset": F1B, "stages": 3, "bandwidth": bandwidth}
    ranks = processes.run(fit, 3, job, strategy)
    assert ranks[0]["num_stages"] == 3
    assert_equals_plain(ranks, job)


@pytest.mark.parametrize("preset", [GPIPE, F1B])
@pytest.mark.parametrize("num_microbatches", [1, 7])
def test_numbers_of_micro_batches(num_microbatches: int, preset: str) -> None:
    job = Job(case="resnet", num_microbatches=num_microbatches, num_steps=8, num_epochs=1)
    assert_equals_plain(pipelines(job, 2, preset=preset, stages=4), job)


# ---------------------------------------------------------------------- randomness


@pytest.mark.parametrize(
    ("name", "preset"), in_turn(["gru", "vae", "cls_token", "t5"], [GPIPE, F1B])
)
def test_dropout_does_not_depend_on_the_place(name: str, preset: str) -> None:
    job = Job(case=name, dropout=0.2)
    one = pipelines(job, 1, preset=preset, stages=2)[0]
    two = pipelines(job, 2, preset=preset, stages=2)
    assert_equal_runs(two, one)


def test_dropout_in_four_processes_under_the_other_schedule_and_run_again() -> None:
    job = Job(case="bert", dropout=0.2)
    one = pipelines(job, 1, preset=GPIPE, stages=4)[0]
    assert_equal_runs(pipelines(job, 4, preset=GPIPE, stages=4), one)
    assert_equal_runs(pipelines(job, 2, preset=F1B, stages=4), one)
    assert_equal_runs(pipelines(job, 2, preset=F1B, stages=4, **AGAIN), one)


class SameAgain(Job):
    """Give the same micro-batch again and again to a module that stays as it is."""

    def batch(self, k: int) -> Any:
        return super().batch(0)

    def make(self) -> Any:
        module = super().make()
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)
        return module


def test_dropout_drops_something_else_each_time() -> None:
    job = SameAgain(case="vit", dropout=0.2, num_microbatches=1, num_epochs=1)
    each_step = pipelines(job, 1, preset=GPIPE, stages=2)[0]["logged"]
    assert len(set(each_step)) == len(each_step) == job.num_steps
    two = pipelines(replace(job, num_microbatches=2), 1, preset=GPIPE, stages=2)[0]["logged"]
    assert abs(two[0] - each_step[0]) > 1e-4  # of equal micro-batches the mean would be either


def test_a_seed_means_the_same_numbers_and_another_seed_others() -> None:
    job = Job(case="vae", num_epochs=1)
    first, again = (pipelines(job, 1, preset=F1B, stages=4)[0] for _ in range(2))
    assert_equal_runs([again], first)
    other = pipelines(replace(job, seed=6), 1, preset=F1B, stages=4)[0]
    assert other["logged"][0] != first["logged"][0]
