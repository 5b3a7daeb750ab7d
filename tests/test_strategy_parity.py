"""Bitwise equality of real multi-process training with the sequential reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.strategy import CyclicStrategy
from tests import corpus, processes, sequential
from tests.corpus import Classifier, MicroBatches, assert_same, loader, make_trainer

RULES = {"cyclic_dp": "freshest", "cyclic_dp_v1": "delayed", "lockstep_dp": "sync"}
NUM_STEPS = 13

pytestmark = pytest.mark.multi


def fit(
    net: str, optimizer: str, preset: str, slack: int, stages: Any, **flags: Any
) -> dict[str, Any]:
    """Train on this rank, with validation in the middle."""
    module = Classifier(net, optimizer)
    strategy = CyclicStrategy(preset, slack=slack, stages=stages)
    trainer = make_trainer(strategy, max_epochs=1, val_check_interval=5, **flags)
    data = MicroBatches(module.kind, NUM_STEPS * trainer.world_size)
    valid = MicroBatches(module.kind, 2 * trainer.world_size, seed=1)
    trainer.fit(module, loader(data), loader(valid))
    return {
        "weights": corpus.weights_of(module),
        "stage_of": corpus.stages_of(trainer),
        "losses": module.losses,
        "global_step": trainer.global_step,
    }


def reference(
    net: str, optimizer: str, rule: str, slack: int, n: int, stage_of: dict[str, int]
) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Return the weights of the sequential run and the losses by worker."""
    module = Classifier(net, optimizer)
    data = MicroBatches(module.kind, NUM_STEPS * n)
    make_optimizer, scheduled = corpus.OPTIMIZERS[optimizer]
    made = make_optimizer(module.parameters())
    scheduler = corpus.warm_up(made) if scheduled else None
    losses: list[list[float]] = [[] for _ in range(n)]

    def loss(_: nn.Module, t: int, i: int) -> Tensor:
        value = corpus.loss_of(module.net, data[t * n + i])
        losses[i].append(float(value.detach()))
        return value

    sequential.train(
        module, by_stage(module, stage_of), made, loss, rule=rule, num_workers=n,
        num_steps=NUM_STEPS, slack=slack,
        after_update=lambda t: scheduler.step() if scheduler else None,
    )  # fmt: skip
    return corpus.weights_of(module), losses


def by_stage(module: nn.Module, stage_of: dict[str, int]) -> list[list[nn.Parameter]]:
    num_stages = 1 + max(stage_of.values())
    stages: list[list[nn.Parameter]] = [[] for _ in range(num_stages)]
    for name, p in module.named_parameters():
        stages[stage_of[name]].append(p)
    return stages


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
        (2, "mlp", "adamw", "cyclic_dp", 2, 8),
        (2, "mlp", "adamw", "cyclic_dp_v1", 0, 2),
        (2, "resnet", "adamw", "cyclic_dp", 0, 8),
        (2, "resnet", "sgd", "cyclic_dp_v1", 0, 2),
        (2, "gpt2", "sgd", "cyclic_dp", 0, 2),
        (2, "gpt2", "adamw", "cyclic_dp_v1", 0, 8),
        (4, "mlp", "adamw", "cyclic_dp", 0, 4),
        (4, "mlp", "sgd", "cyclic_dp_v1", 0, 8),
        (4, "resnet", "sgd", "cyclic_dp", 0, 4),
        (4, "resnet", "adamw", "cyclic_dp", 2, 8),
        (4, "gpt2", "sgd", "cyclic_dp", 2, 8),
        (4, "gpt2", "adamw", "cyclic_dp", 0, 4),
        (4, "gpt2", "adamw", "cyclic_dp_v1", 0, 4),
        (2, "resnet", "sgd", "lockstep_dp", 0, 2),
        (4, "gpt2", "adamw", "lockstep_dp", 0, 8),
        (2, "gpt2", "sgd", "cyclic_dp", 0, "auto"),
    ],
)
def test_every_worker_ends_with_the_bits_of_the_sequential_run(
    n: int, net: str, optimizer: str, preset: str, slack: int, stages: Any
) -> None:
    ranks = processes.run(fit, n, net, optimizer, preset, slack, stages)
    stage_of = ranks[0]["stage_of"]
    if stages != "auto" and (n, preset, slack) != (1, "cyclic_dp", 0):  # which is plain training
        assert set(stage_of.values()) == set(range(stages))
    weights, losses = reference(net, optimizer, RULES[preset], slack, n, stage_of)
    for i, rank in enumerate(ranks):
        assert rank["global_step"] == NUM_STEPS
        assert rank["stage_of"] == stage_of
        assert rank["losses"] == losses[i], f"losses of worker {i}"
        assert_same(rank["weights"], weights, f"worker {i}")
