"""Pipelines of unmodified modules end with the bits of the plain run on the same micro-batches.

One case by hand: pytest tests/test_pipeline_parity.py -k "one_process and gpt2"
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests import processes
from tests.rows import chosen, more
from tests.stagewise_modules import CASES
from tests.stagewise_runs import (
    Job,
    assert_equal_runs,
    assert_equals_plain,
    fit,
    joined,
    pipelines,
    reference,
)

pytestmark = pytest.mark.multi

NAMES = [name for name, case in CASES.items() if not case.random]
REPRESENTATIVE = ["resnet", "unet", "gru", "gpt2", "t5"]
DROPS = [name for name in CASES if name != "mamba"]  # which has no dropout
DROPS_ALIKE = {
    "unet", "inception", "siamese", "frozen", "bert", "gpt2", "llama", "vit", "whisper", "mixtral",
    "lstm", "resnet",
}  # fmt: skip
GPIPE, F1B = "gpipe", "1f1b"
EXHAUSTIVE = pytest.mark.exhaustive


def alternating(
    names: list[str], *, begin: int = 0, alike: Collection[str] = ()
) -> list[tuple[str, str] | Any]:
    """Pair each name with one of the presets; names that are like others run with exhaustive."""
    pairs = [(name, (GPIPE, F1B)[(k + begin) % 2]) for k, name in enumerate(names)]
    return [p if p[0] not in alike else pytest.param(*p, marks=EXHAUSTIVE) for p in pairs]


# ---------------------------------------------------------------------- the corpus itself


@pytest.mark.parametrize("name", list(CASES))
def test_the_cuts_are_called_in_their_order(name: str) -> None:
    module, calls = Job(case=name).make(), []
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    for path, part in module.named_modules():
        part.register_forward_pre_hook(lambda part, args, path=path: calls.append(path))
    batch = Job(case=name).batch(0)
    first = module.training_step(batch, 0)
    for cuts in (CASES[name].cuts2, CASES[name].cuts4):
        places = [calls.index(path) for path in cuts]
        assert places == sorted(places)
        assert places[0] > 0
    assert len(CASES[name].cuts2) == 1
    assert len(CASES[name].cuts4) == 3
    if not CASES[name].random:
        again = Job(case=name).make()
        again.log = again.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
        again = again.training_step(Job(case=name).batch(0), 0)
        assert torch.equal(_loss(first), _loss(again))


def _loss(output: Any) -> torch.Tensor:
    return output["loss"] if isinstance(output, dict) else output


@pytest.mark.parametrize("name", list(CASES))
def test_micro_batches_are_equal_rows_of_the_joined_batch(name: str) -> None:
    job = Job(case=name)
    whole = job.batch(0), job.batch(1), joined([job.batch(0), job.batch(1)])
    rows = [_tensors(tree) for tree in whole]
    assert all(len(x) == job.size for x in rows[0])
    for a, b, both in zip(*rows, strict=True):
        assert torch.equal(torch.cat([a, b]), both)


def _tensors(tree: Any) -> list[torch.Tensor]:
    tree = vars(tree) if hasattr(tree, "names") else tree
    values = tree.values() if hasattr(tree, "values") and not torch.is_tensor(tree) else tree
    values = [values] if torch.is_tensor(values) else values
    return [x for x in values if torch.is_tensor(x)]


@pytest.mark.parametrize("name", NAMES)
def test_training_changes_what_is_trained(name: str) -> None:
    module, weights = Job(case=name).make(), reference(Job(case=name))["weights"]
    moved = {n for n, p in module.named_parameters() if not torch.equal(weights[n], p)}
    unmoved = {n for n, p in module.named_parameters() if p.requires_grad} - moved
    assert moved
    assert not unmoved - _without_gradient(name, module)


def _without_gradient(name: str, module: nn.Module) -> set[str]:
    """Return what may stay as it is: experts that no token of these batches went to."""
    return {n for n, _ in module.named_parameters() if name == "mixtral" and "experts" in n}


# ---------------------------------------------------------------------- places


@pytest.mark.parametrize(
    ("name", "preset"), alternating(NAMES, alike=set(NAMES) - set(REPRESENTATIVE))
)
def test_four_stages_in_one_process(name: str, preset: str) -> None:
    job = Job(case=name)
    ranks = pipelines(job, 1, preset=preset, stages=4)
    assert ranks[0]["num_stages"] == 4
    assert_equals_plain(ranks, job)


@pytest.mark.parametrize(("name", "preset"), alternating(NAMES, begin=1, alike=REPRESENTATIVE))
def test_two_stages_in_two_processes(name: str, preset: str) -> None:
    job = Job(case=name)
    ranks = pipelines(job, 2, preset=preset, stages=2)
    assert [rank["num_stages"] for rank in ranks] == [2, 2]
    assert_equals_plain(ranks, job)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "preset"), alternating(REPRESENTATIVE))
def test_four_stages_in_two_processes(name: str, preset: str) -> None:
    job = Job(case=name)
    assert_equals_plain(pipelines(job, 2, preset=preset, stages=4), job)


@pytest.mark.parametrize(
    ("name", "preset"),
    [*alternating(REPRESENTATIVE), *alternating(REPRESENTATIVE[:1], begin=1, alike=["resnet"]),
     more("whisper", F1B), more("mixtral", GPIPE)],
)  # fmt: skip
def test_four_stages_in_four_processes(name: str, preset: str) -> None:
    job = Job(case=name)
    assert_equals_plain(pipelines(job, 4, preset=preset, stages=4), job)


@pytest.mark.parametrize(
    "name", [*chosen(REPRESENTATIVE, REPRESENTATIVE[2:]), "siamese", "inception"]
)
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


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("preset", [GPIPE, F1B])
@pytest.mark.parametrize(
    "num_microbatches", [1, 7, *(pytest.param(m, marks=pytest.mark.exhaustive) for m in (2, 3))]
)
def test_numbers_of_micro_batches(num_microbatches: int, preset: str) -> None:
    job = Job(case="resnet", num_microbatches=num_microbatches, num_steps=8, num_epochs=1)
    assert_equals_plain(pipelines(job, 2, preset=preset, stages=4), job)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_stage_is_the_plain_run(num_ranks: int) -> None:
    job = Job(case="resnet", num_microbatches=2)
    replicas = {"replicas": num_ranks}
    ranks = pipelines(job, num_ranks, preset=GPIPE, stages=1, **replicas)
    assert_equals_plain(ranks, job, exact_metrics=num_ranks == 1)


# ---------------------------------------------------------------------- rematerialisation


@pytest.mark.parametrize(
    ("name", "preset", "remat"),
    [
        pytest.param(name, preset, remat, marks=[EXHAUSTIVE] if (k + r) % 2 else [])
        for k, (name, preset) in enumerate(alternating(REPRESENTATIVE))
        for r, remat in enumerate(["always", "except_last"])
    ],
)
def test_rematerialisation_changes_no_bit(name: str, preset: str, remat: str) -> None:
    job = Job(case=name)
    assert_equals_plain(
        pipelines(job, 2, preset=preset, stages=2, activation_checkpointing=remat), job
    )


@pytest.mark.parametrize(
    ("name", "preset", "remat"), [("resnet", F1B, "always"), ("t5", GPIPE, "except_last")]
)
def test_rematerialisation_in_four_processes(name: str, preset: str, remat: str) -> None:
    job = Job(case=name)
    assert_equals_plain(
        pipelines(job, 4, preset=preset, stages=4, activation_checkpointing=remat), job
    )


# ---------------------------------------------------------------------- replicas


@pytest.mark.parametrize(
    ("name", "preset"), alternating(REPRESENTATIVE, alike=["unet", "gru", "t5"])
)
def test_two_replicas_of_two_stages(name: str, preset: str) -> None:
    job = Job(case=name)
    ranks = pipelines(job, 4, preset=preset, stages=2, replicas=2)
    assert_equals_plain(ranks, job, exact_metrics=False)


def test_two_replicas_of_four_stages_that_share_a_worker_each() -> None:
    job = Job(case="gpt2", num_microbatches=6)
    ranks = pipelines(job, 2, preset=F1B, stages=4, replicas=2)
    assert_equals_plain(ranks, job, exact_metrics=False)


def test_two_replicas_with_rematerialisation() -> None:
    job = Job(case="resnet")
    ranks = pipelines(job, 4, preset=F1B, stages=2, replicas=2, activation_checkpointing="always")
    assert_equals_plain(ranks, job, exact_metrics=False)


# ---------------------------------------------------------------------- randomness


@pytest.mark.parametrize(("name", "preset"), alternating(DROPS, alike=DROPS_ALIKE))
def test_dropout_does_not_depend_on_the_place(name: str, preset: str) -> None:
    job = Job(case=name, dropout=0.2)
    one = pipelines(job, 1, preset=preset, stages=2)[0]
    two = pipelines(job, 2, preset=preset, stages=2)
    assert_equal_runs(two, one)


def test_dropout_in_four_processes_and_under_the_other_schedule() -> None:
    job = Job(case="bert", dropout=0.2)
    one = pipelines(job, 1, preset=GPIPE, stages=4)[0]
    assert_equal_runs(pipelines(job, 4, preset=GPIPE, stages=4), one)
    assert_equal_runs(pipelines(job, 2, preset=F1B, stages=4), one)


@pytest.mark.parametrize("name", ["resnet", more("vae"), more("gpt2")])
def test_rematerialisation_draws_the_same_numbers(name: str) -> None:
    job = Job(case=name, dropout=0.2)
    kept = pipelines(job, 1, preset=F1B, stages=4)[0]
    assert_equal_runs(
        pipelines(job, 2, preset=F1B, stages=4, activation_checkpointing="always"), kept
    )


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
