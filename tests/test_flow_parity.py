"""Pipelines without a flush end with the bits of their rule, whatever the module.

One case by hand: pytest tests/test_flow_parity.py -k "four_processes and unet"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests import asynchronous, processes
from tests.corpus import assert_same
from tests.rows import more
from tests.stagewise_runs import CLOSE, Job, Outcome, pipelines, prepare

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


def assert_follows(ranks: list[Outcome], job: Job, preset: str) -> None:
    """Compare every rank with the rule; rank 0, with the last stage, knows losses at once."""
    (expected,) = processes.run(sequential, 1, job, RULES[preset], ranks[0]["stage_of"])
    for r, rank in enumerate(ranks):
        assert rank["global_step"] == job.num_steps * job.num_epochs
        assert_same(
            {n: rank["weights"][n] for n in expected["weights"]}, expected["weights"], f"rank {r}"
        )
        ends = torch.tensor(rank["logged"][job.num_steps - 1 :: job.num_steps])
        torch.testing.assert_close(
            ends.double(), expected["losses"][job.num_steps - 1 :: job.num_steps],
            rtol=CLOSE, atol=CLOSE,
        )  # fmt: skip
    if len(ranks) == ranks[0]["num_stages"]:  # else it has begun the next step before
        logged = torch.tensor(ranks[0]["logged"]).double()
        torch.testing.assert_close(logged, expected["losses"], rtol=CLOSE, atol=CLOSE)
    assert all(rank["metrics"] == ranks[0]["metrics"] for rank in ranks)


def untied(preset: str, *names: str) -> list[tuple[str, str]]:
    return [(name, preset) for name in names]


@pytest.mark.parametrize(
    ("name", "preset"),
    [*untied("cyclic_pipeline", "resnet", "llama"), *untied("pipedream_2bw", "vit"),
     *untied("pipedream", "bert"),
     *(more(*row) for row in [*untied("cyclic_pipeline", "gru"), *untied("pipedream_2bw", "unet"),
                              *untied("pipedream", "resnet")])],
)  # fmt: skip
def test_two_processes(name: str, preset: str) -> None:
    job = Job(case=name, num_microbatches=1 if preset == "pipedream" else 4)
    assert_follows(pipelines(job, 2, preset=preset, stages=2, function=fit), job, preset)


@pytest.mark.parametrize(
    ("name", "preset"), [("unet", "cyclic_pipeline"), ("resnet", "pipedream_2bw"),
                         ("vit", "pipedream")]
)  # fmt: skip
def test_four_processes(name: str, preset: str) -> None:
    job = Job(case=name, num_microbatches=1 if preset == "pipedream" else 4)
    assert_follows(pipelines(job, 4, preset=preset, stages=4, function=fit), job, preset)


@pytest.mark.parametrize("preset", ["pipedream_2bw", "cyclic_pipeline", "pipedream"])
def test_one_process(preset: str) -> None:
    job = Job(case="resnet", num_microbatches=1 if preset == "pipedream" else 3)
    assert_follows(pipelines(job, 1, preset=preset, stages=4, function=fit), job, preset)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_ranks"), [("resnet", 2, 3), ("gru", 2, 2), ("unet", 4, 4)]
)
def test_workers_that_take_turns_with_stages(name: str, num_stages: int, num_ranks: int) -> None:
    job = Job(case=name)
    ranks = pipelines(job, num_ranks, preset="cyclic_mp", stages=num_stages, function=fit)
    assert_follows(ranks, job, "cyclic_mp")


@pytest.mark.parametrize(
    ("name", "preset", "num_ranks"),
    [("gpt2", "cyclic_pipeline", 2), ("gpt2", "pipedream_2bw", 4), ("t5", "pipedream", 2)],
)
def test_parameters_that_stages_share(name: str, preset: str, num_ranks: int) -> None:
    job = Job(case=name, num_microbatches=1 if preset == "pipedream" else 4)
    ranks = pipelines(job, num_ranks, preset=preset, stages=num_ranks, function=fit)
    assert_follows(ranks, job, preset)
