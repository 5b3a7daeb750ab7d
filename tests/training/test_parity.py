"""Every preset ends with the bits of one process: the plain Trainer's, or those of its rule.

What is trained here are whole networks in every place: one process, one worker for each stage or
for several, replicas, groups. Modules with habits of their own are in test_modules.py and in the
conformance matrix. One row by hand: pytest tests/training/test_parity.py -k "gpt2 and cyclic_mp"
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.harness import processes
from tests.harness.pipelines import (
    Job,
    Outcome,
    assert_equals_plain,
    fit,
    pipelines,
    reference,
)
from tests.harness.rows import in_words, more
from tests.harness.trainers import assert_same
from tests.modules import changed
from tests.references.rules import ONE_EACH, WHOLE, Reference

pytestmark = pytest.mark.multi

AGAIN = {"activation_checkpointing": "always"}
BUT_LAST = {"activation_checkpointing": "except_last"}


@pytest.mark.parametrize("name", ["resnet", "unet", "gru", "gpt2", "t5"])
def test_training_changes_what_is_trained(name: str) -> None:
    module, weights = Job(case=name).make(), reference(Job(case=name))["weights"]
    for n, p in module.named_parameters():
        assert not p.requires_grad or not torch.equal(weights[n], p), n


# ---------------------------------------------------------------------- with a flush


@pytest.mark.parametrize(
    ("name", "preset", "num_ranks", "options"),
    [
        ("resnet", "gpipe", 1, {"stages": 4}),
        more("resnet", "gpipe", 1, {"stages": 1}),
        more("gpt2", "1f1b", 1, {"stages": 4}),
        ("gru", "1f1b", 2, {"stages": 4}),
        ("unet", "gpipe", 4, {"stages": 4}),  # whose skips pass by two workers
        more("resnet", "1f1b", 4, {"stages": 4}),
        more("gpt2", "1f1b", 4, {"stages": 4}),
        ("t5", "gpipe", 2, {"stages": 4, **BUT_LAST}),  # of whose stages three share a weight
        # several stages of each worker
        ("gpt2", "interleaved_1f1b", 2, {"stages": 4}),  # of which the first and last share one
        ("resnet", "interleaved_1f1b", 2, {"stages": 6, "num_microbatches": 3}),
        more("unet", "interleaved_1f1b", 2, {"stages": 4, **BUT_LAST}),
        more("resnet", "interleaved_1f1b", 4, {"stages": 4, "replicas": 2}),
        more("t5", "interleaved_1f1b", 2, {"stages": 4}),
        more("gru", "interleaved_1f1b", 2, {"stages": 4, "num_microbatches": 5}),
        more("resnet", "interleaved_1f1b", 1, {"stages": 4}),
        # backwards in two halves
        ("gpt2", "zb_h1", 2, {"stages": 2}),
        ("t5", "zb_v", 2, {"stages": 4}),
        ("resnet", "zb_v", 2, {"stages": 4, "num_microbatches": 3}),
        ("unet", "dualpipe_v", 2, {"stages": 4, **BUT_LAST}),
        more("gpt2", "zb_h1", 4, {"stages": 4}),
        more("resnet", "zb_h1", 4, {"stages": 4}),
        more("gpt2", "zb_v", 2, {"stages": 4}),
        more("gru", "zb_v", 2, {"stages": 4, "num_microbatches": 5}),
        more("gpt2", "zb_v", 4, {"stages": 4, "replicas": 2}),
        more("t5", "zb_h1", 2, {"stages": 4, **AGAIN}),
        more("resnet", "dualpipe_v", 2, {"stages": 4}),
        more("gpt2", "zb_v", 1, {"stages": 4}),
        more("bert", "zb_v", 2, {"stages": 4}),
        more("bert", "zb_h1", 4, {"stages": 4}),
        more("bert", "interleaved_1f1b", 2, {"stages": 4}),
        more("resnet", "zb_v", 4, {"stages": 8, "num_microbatches": 8}),
        more("gpt2", "zb_v", 4, {"stages": 8}),
        more("t5", "dualpipe_v", 4, {"stages": 8, "num_microbatches": 8}),
        more("gpt2", "interleaved_1f1b", 4, {"stages": 8}),
        more("bert", "interleaved_1f1b", 4, {"stages": 8}),
        # run again
        ("resnet", "1f1b", 2, {"stages": 4, **AGAIN}),
        more("gpt2", "1f1b", 2, {"stages": 2, **AGAIN}),
        more("unet", "1f1b", 2, {"stages": 2, **BUT_LAST}),
        # replicas
        more("resnet", "gpipe", 4, {"stages": 2, "replicas": 2}),
        ("resnet", "gpipe", 2, {"stages": 1, "replicas": 2}),
        ("gpt2", "1f1b", 2, {"stages": 4, "replicas": 2, "num_microbatches": 3}),
        more("gpt2", "1f1b", 4, {"stages": 2, "replicas": 2}),
        more("resnet", "1f1b", 4, {"stages": 2, "replicas": 2, **AGAIN}),
        # numbers of micro-batches
        more("resnet", "gpipe", 2, {"stages": 4, "num_microbatches": 1}),
        more("resnet", "gpipe", 2, {"stages": 4, "num_microbatches": 7}),
        more("resnet", "1f1b", 2, {"stages": 4, "num_microbatches": 1}),
        ("resnet", "1f1b", 2, {"stages": 4, "num_microbatches": 7}),
    ],
    ids=in_words,
)
def test_pipelines_with_a_flush_equal_the_plain_trainer(
    name: str, preset: str, num_ranks: int, options: dict[str, Any]
) -> None:
    replicas = options.get("replicas", 1)
    job = Job(
        case=name, num_microbatches=replicas * options.get("num_microbatches", 4 // replicas)
    )
    ranks = pipelines(job, num_ranks, preset=preset, **options)
    assert {rank["num_stages"] for rank in ranks} == {options["stages"]}
    assert_equals_plain(ranks, job, exact_metrics=replicas == 1)


CLIPPED = (("gradient_clip_val", 0.05),)
CHANGED = ["scheduled", "adapted", "compiled", "checkpointed", "frozen"]
BY_DEFAULT = {("adapted", "zb_v", 2), ("compiled", "zb_h1", 2), ("checkpointed", "zb_v", 2)}


@pytest.mark.parametrize(
    ("name", "preset", "num_ranks"),
    [
        row if row in BY_DEFAULT else more(*row)
        for name in CHANGED
        for preset in ("interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")
        for num_ranks in (2, 4)
        for row in [(name, preset, num_ranks)]
    ],
)
def test_models_as_users_change_them_equal_the_plain_trainer(
    name: str, preset: str, num_ranks: int
) -> None:
    job = Job(case="gpt2", module=getattr(changed, name), flags=CLIPPED)
    blocks = [f"model.transformer.h.{k}" for k in (1, 2, 3)]  # where they may be checkpointed
    strategy: dict[str, Any] = {"preset": preset, "stages": blocks, "num_microbatches": 4}
    if num_ranks == 4:  # with two replicas, as four blocks make four stages
        strategy |= {"replicas": 2, "num_microbatches": 2}
    ranks = pipelines(job, num_ranks, **strategy)
    assert_equals_plain(ranks, job, exact_metrics=num_ranks == 2)


@pytest.mark.parametrize(
    ("name", "num_ranks", "options"),
    [
        ("gpt2", 2, {}), more("gru", 2, {}), more("t5", 2, {}), more("siamese", 2, {}),
        more("inception", 2, {}), ("inception", 3, {"bandwidth": "1Mbit/s"}),
        more("inception", 3, {"bandwidth": "10Gbit/s"}),
    ],
    ids=in_words,
)  # fmt: skip
def test_stages_that_the_strategy_chooses_equal_the_plain_trainer(
    name: str, num_ranks: int, options: dict[str, Any]
) -> None:
    job = Job(case=name)
    ranks = processes.run(fit, num_ranks, job, {"preset": "1f1b", "stages": num_ranks} | options)
    assert ranks[0]["num_stages"] == num_ranks
    assert_equals_plain(ranks, job)


# ---------------------------------------------------------------------- by the rule


@pytest.mark.parametrize(
    ("name", "preset", "num_ranks", "options"),
    [
        # workers that run whole micro-batches
        ("unet", "cyclic_dp", 2, {"stages": "auto"}),
        ("cls_token", "cyclic_dp_v1", 2, {"stages": 2}),
        ("resnet", "lockstep_dp", 2, {"stages": 2}),
        ("gpt2", "cyclic_zero", 2, {"stages": 8}),
        ("resnet", "cyclic_dp", 4, {"stages": 4, "slack": 2}),
        more("gpt2", "cyclic_dp", 4, {"stages": 4}),
        more("gpt2", "cyclic_dp_v1", 4, {"stages": 4}),
        # one worker, and one device that runs several micro-batches
        more("gpt2", "cyclic_dp", 1, {"stages": 4, "num_microbatches": 1}),
        ("resnet", "cyclic_dp", 1, {"stages": 4, "num_microbatches": 1, "slack": 2}),
        more("resnet", "cyclic_dp_v1", 1, {"stages": 4, "num_microbatches": 1}),
        ("resnet", "cyclic_dp", 1, {"stages": 4}), more("gpt2", "cyclic_dp_v1", 1, {"stages": 4}),
        more("vit", "lockstep_dp", 1, {"stages": 4}),
        ("resnet", "cyclic_pipeline", 1, {"stages": 4, "placement": "single", **AGAIN}),
        # groups of workers that run side by side
        more("resnet", "cyclic_dp", 2, {"stages": 4, "group_size": 2}),
        more("gpt2", "cyclic_dp", 4, {"stages": 4, "group_size": 2}),
        more("gpt2", "cyclic_dp_v1", 4, {"stages": 2, "group_size": 2}),
        ("resnet", "cyclic_zero", 4, {"stages": 4, "group_size": 2}),
        more("gpt2", "cyclic_zero", 4, {"stages": 4, "group_size": 2}),
        more("vit", "lockstep_dp", 4, {"stages": 2, "group_size": 4}),
        # stages apart
        ("resnet", "cyclic_pipeline", 2, {"stages": 2}),
        ("unet", "cyclic_pipeline", 4, {"stages": 4}),
        more("resnet", "cyclic_pipeline", 1, {"stages": 4}),
        more("vit", "pipedream_2bw", 2, {"stages": 2}),
        more("resnet", "pipedream_2bw", 4, {"stages": 4}),
        ("resnet", "pipedream_2bw", 1, {"stages": 4}),
        ("bert", "pipedream", 2, {"stages": 4}), more("vit", "pipedream", 4, {"stages": 4}),
        more("resnet", "pipedream", 1, {"stages": 4}),
        # workers that take turns with stages
        ("resnet", "cyclic_mp", 3, {"stages": 2}), ("gru", "cyclic_mp", 2, {"stages": 2}),
        more("unet", "cyclic_mp", 4, {"stages": 4}),
        # parameters that stages share
        ("gpt2", "cyclic_pipeline", 2, {"stages": 2}),
        more("gpt2", "pipedream_2bw", 4, {"stages": 4}), more("t5", "pipedream", 2, {"stages": 2}),
        # replicas, between which statistics travel; whose stages share a parameter
        ("resnet", "cyclic_pipeline", 4, {"stages": 2, "replicas": 2}),
        ("gpt2", "pipedream_2bw", 4, {"stages": 2, "replicas": 2}),
        more("unet", "pipedream", 4, {"stages": 2, "replicas": 2}),
        more("vit", "pipedream_2bw", 2, {"stages": 2, "replicas": 2}),  # of one worker each
    ],
    ids=in_words,
)  # fmt: skip
def test_every_rank_has_the_bits_of_its_rule(
    name: str, preset: str, num_ranks: int, options: dict[str, Any]
) -> None:
    replicas, m = options.get("replicas", 1), options.get("num_microbatches", 4)
    if preset in WHOLE and num_ranks > 1:
        m = num_ranks
    elif preset == "pipedream":
        m = replicas
    job = Job(case=name, num_microbatches=m)
    ranks = pipelines(job, num_ranks, preset=preset, **options)
    assert all(rank["global_step"] == job.num_steps * job.num_epochs for rank in ranks)
    plan = ranks[0]["plan"]
    assert options["stages"] in ("auto", plan.num_stages)
    assert plan.num_groups == num_ranks // options.get("group_size", 1)
    if preset not in WHOLE and replicas == 1:
        assert all(rank["metrics"] == ranks[0]["metrics"] for rank in ranks)
    Reference(job, ranks[0]["stage_of"]).train(plan).compare(ranks)


# ---------------------------------------------------------------------- predicted weights


class Twins(Job):
    """Give every micro-batch to both replicas: half of each gradient twice is one of them."""

    def batch(self, k: int) -> Any:
        return super().batch(k // 2)


@cache
def alone(preset: str, num_stages: int) -> Outcome:
    """Return what one process has that runs all stages."""
    job = Job(case="vit", num_microbatches=1)
    return pipelines(job, 1, preset=preset, stages=num_stages)[0]


@pytest.mark.parametrize(
    ("preset", "num_ranks", "options"),
    [
        ("pipeoptim", 2, {"stages": 4}), ("spectrain", 2, {"stages": 4}),
        more("pipeoptim", 4, {"stages": 4}),
        ("spectrain", 4, {"stages": 2, "replicas": 2}),
        more("pipeoptim", 4, {"stages": 2, "replicas": 2}),
    ],
    ids=in_words,
)  # fmt: skip
def test_predicted_weights_are_the_same_in_every_place(
    preset: str, num_ranks: int, options: dict[str, Any]
) -> None:
    job = Job(case="vit", num_microbatches=1)
    one = alone(preset, options["stages"])
    if "replicas" in options:
        job = Twins(case="vit", num_microbatches=2)
    for rank in pipelines(job, num_ranks, preset=preset, **options):
        assert_same(rank["weights"], one["weights"])
        assert rank["global_step"] == one["global_step"]


def test_presets_of_one_update_for_each_micro_batch_train_differently() -> None:
    heads = [alone(preset, 4)["weights"]["model.classifier.weight"] for preset in ONE_EACH]
    for k, a in enumerate(heads):
        assert all(not torch.equal(a, b) for b in heads[:k])
