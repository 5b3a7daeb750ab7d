"""Pipelines without a flush end with the bits of their rule, whatever the module.

One case by hand: pytest tests/test_flow_parity.py -k "cyclic_mp and unet"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.harness import processes
from tests.harness.pipelines import CLOSE, Job, Outcome, pipelines, prepare
from tests.harness.trainers import assert_same
from tests.references import asynchronous

pytestmark = pytest.mark.multi

RULES = {
    "pipedream_2bw": "delayed", "cyclic_pipeline": "freshest", "pipedream": "stashed",
    "cyclic_mp": "freshest",
}  # fmt: skip


def fit(job: Job, strategy: dict[str, Any], *callbacks: Callback, **flags: Any) -> Outcome:
    """Train on this rank, and tell the stages, too."""
    run = prepare(job, strategy, callbacks, **flags)
    run.trainer.fit(run.module, run.batches)
    return run.outcome() | {"stage_of": run.trainer.strategy.stage_of}


def sequential(
    job: Job, rule: str, stage_of: dict[str, int], replicas: int = 1,
    decide: Callable[[Any], Any] = lambda optimizer: optimizer,
) -> Outcome:  # fmt: skip
    """Train by the rule, one micro-batch after the other; return weights and mean losses.

    Args:
        job: what is trained on.
        rule: of the weights that are read.
        stage_of: parameter -> stage.
        replicas: replicas.
        decide: wraps the optimizer, to look at the gradients of all stages together.
    """
    torch.set_num_threads(1)
    module: Any = job.make()
    module.log = module.log_dict = lambda *args, **kwargs: None
    num_stages, losses = 1 + max(stage_of.values()), []
    stages: list[list[nn.Parameter]] = [[] for _ in range(num_stages)]
    for name, p in module.named_parameters():
        stages[stage_of[name]].append(p)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured, None
    if isinstance(configured, tuple):
        (optimizer,), (scheduler,) = configured
        scheduler = scheduler["scheduler"]

    def loss(module: Any, t: int, i: int) -> Tensor:
        output = module.training_step(job.batch(t % job.num_steps * job.num_microbatches + i), 0)
        value: Tensor = output["loss"] if isinstance(output, dict) else output
        losses.append(float(value.detach()))
        return value

    asynchronous.train(
        module, stages, decide(optimizer), loss, rule=rule, num_microbatches=job.num_microbatches,
        num_steps=job.num_steps * job.num_epochs,
        after_update=lambda t: scheduler and scheduler.step(), replicas=replicas,
    )  # fmt: skip
    each = torch.tensor(losses, dtype=torch.float64).reshape(-1, job.num_microbatches)
    state = {n: x.detach().clone() for n, x in module.state_dict().items()}
    return {"weights": state, "losses": each.mean(1)}


@pytest.mark.parametrize(
    ("name", "preset", "num_ranks", "num_stages", "replicas"),
    [
        ("resnet", "cyclic_pipeline", 2, 2, 1), ("vit", "pipedream_2bw", 2, 2, 1),
        ("bert", "pipedream", 2, 2, 1),
        ("unet", "cyclic_pipeline", 4, 4, 1), ("resnet", "pipedream_2bw", 4, 4, 1),
        ("vit", "pipedream", 4, 4, 1),
        ("resnet", "cyclic_pipeline", 1, 4, 1), ("resnet", "pipedream_2bw", 1, 4, 1),
        ("resnet", "pipedream", 1, 4, 1),
        # workers that take turns with stages
        ("resnet", "cyclic_mp", 3, 2, 1), ("gru", "cyclic_mp", 2, 2, 1),
        ("unet", "cyclic_mp", 4, 4, 1),
        # parameters that stages share
        ("gpt2", "cyclic_pipeline", 2, 2, 1), ("gpt2", "pipedream_2bw", 4, 4, 1),
        ("t5", "pipedream", 2, 2, 1),
        # replicas, between which statistics travel; whose stages share a parameter
        ("resnet", "cyclic_pipeline", 4, 2, 2), ("gpt2", "pipedream_2bw", 4, 2, 2),
        ("unet", "pipedream", 4, 2, 2),
        ("vit", "pipedream_2bw", 2, 2, 2),  # one worker has all stages of a replica
    ],
)  # fmt: skip
def test_every_rank_follows_the_rule(
    name: str, preset: str, num_ranks: int, num_stages: int, replicas: int
) -> None:
    job = Job(case=name, num_microbatches=replicas if preset == "pipedream" else 4)
    plan = {"preset": preset, "stages": num_stages, "replicas": replicas}
    if replicas == 1:
        del plan["replicas"]
    ranks = pipelines(job, num_ranks, function=fit, **plan)
    args = job, RULES[preset], ranks[0]["stage_of"], replicas
    (expected,) = processes.run(sequential, 1, *args)
    for r, rank in enumerate(ranks):
        assert rank["global_step"] == job.num_steps * job.num_epochs
        same = {n: rank["weights"][n] for n in expected["weights"]}
        assert_same(same, expected["weights"], f"rank {r}")
    last = slice(job.num_steps - 1, None, job.num_steps)  # steps of epochs
    ends = [torch.tensor(rank["logged"][last]).double() for rank in ranks]
    if replicas > 1:  # each has logged its own micro-batches
        ends = [torch.stack(ends).mean(0)]
    else:
        assert all(rank["metrics"] == ranks[0]["metrics"] for rank in ranks)
    for each in ends:
        torch.testing.assert_close(each, expected["losses"][last], rtol=CLOSE, atol=CLOSE)
    if replicas == 1 and num_ranks == num_stages:  # else it has begun the next step before
        logged = torch.tensor(ranks[0]["logged"]).double()
        torch.testing.assert_close(logged, expected["losses"], rtol=CLOSE, atol=CLOSE)
