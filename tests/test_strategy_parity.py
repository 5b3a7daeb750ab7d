"""Bitwise equality of real multi-process training with the sequential reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.harness import processes
from tests.harness.trainers import assert_same, fit
from tests.modules.classifier import Classifier
from tests.references.replicated import Reference

pytestmark = pytest.mark.multi

RULES = {"cyclic_dp": "freshest", "cyclic_dp_v1": "delayed", "lockstep_dp": "sync"}
NUM_STEPS = 13


@pytest.mark.parametrize(
    ("n", "net", "optimizer", "preset", "slack", "stages"),
    [
        (1, "mlp", "sgd", "cyclic_dp", 0, 1),
        (1, "mlp", "adamw", "cyclic_dp", 2, 8),
        (1, "mlp", "sgd", "cyclic_dp_v1", 0, 8),
        (1, "resnet", "sgd", "cyclic_dp", 0, 1),
        (1, "resnet", "adamw", "cyclic_dp_v1", 0, 8),
        (1, "gpt2", "adamw", "cyclic_dp", 0, 8),
        (2, "mlp", "sgd", "cyclic_dp", 0, 2),
        (2, "resnet", "sgd", "cyclic_dp_v1", 0, 2),
        (2, "gpt2", "sgd", "cyclic_dp", 0, "auto"),
        (2, "resnet", "sgd", "lockstep_dp", 0, 2),
        (4, "mlp", "adamw", "cyclic_dp", 0, 4),
        (4, "resnet", "adamw", "cyclic_dp", 2, 8),
        (4, "gpt2", "adamw", "cyclic_dp", 0, 4),
        (4, "gpt2", "adamw", "cyclic_dp_v1", 0, 4),
    ],
)
def test_every_worker_ends_with_the_bits_of_the_sequential_run(
    n: int, net: str, optimizer: str, preset: str, slack: int, stages: Any
) -> None:
    module = partial(Classifier, net, optimizer)
    strategy = {"preset": preset, "slack": slack, "stages": stages}
    validation_in_the_middle = {"val_check_interval": 5}
    ranks = processes.run(fit, n, module, strategy, NUM_STEPS, validation_in_the_middle)
    stage_of = ranks[0]["stage_of"]
    if stages != "auto" and (n, preset, slack) != (1, "cyclic_dp", 0):  # which is plain training
        assert set(stage_of.values()) == set(range(stages))
    assert all(rank["global_step"] == NUM_STEPS for rank in ranks)
    run = Reference(rule=RULES[preset], n=n, slack=slack, num_batches=NUM_STEPS)
    run.run(module(), stage_of).compare(ranks)


def test_the_same_module_trains_under_every_strategy() -> None:
    module = partial(Classifier, "batchnorm_mlp", "adamw")
    names = ["ddp", "cyclic_dp", "cyclic_dp_v1", "lockstep_dp"]
    runs = {name: processes.run(fit, 2, module, name, 8, {}) for name in names}
    runs["auto"] = processes.run(fit, 1, module, "auto", 8, {})
    for name, ranks in runs.items():
        assert all(rank["global_step"] == 8 for rank in ranks), name
        if name != "ddp":  # whose workers have BatchNorm statistics of their own
            assert_same(ranks[-1]["weights"], ranks[0]["weights"], name)
    firsts = [ranks[0]["losses"][0] for ranks in runs.values()]
    assert firsts == firsts[:1] * len(runs)
