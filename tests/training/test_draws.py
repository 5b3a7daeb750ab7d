"""What is drawn depends on seed, step, micro-batch and place in the module alone."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.pipelines import Job, assert_equal_runs, pipelines
from tests.harness.rows import in_words, more
from tests.harness.trainers import assert_same
from tests.modules.plain import Images, Logging, accuracy
from tests.references.rules import Reference

pytestmark = pytest.mark.multi

AGAIN = {"activation_checkpointing": "always"}


@pytest.mark.parametrize(
    ("name", "preset"),
    [("vae", "1f1b"), ("t5", "gpipe"), more("gru", "gpipe"), more("cls_token", "1f1b")],
)
def test_dropout_does_not_depend_on_the_place(name: str, preset: str) -> None:
    job = Job(case=name, dropout=0.2, num_epochs=1)
    (one,) = pipelines(job, 1, preset=preset, stages=2)
    assert_equal_runs(pipelines(job, 2, preset=preset, stages=2), one)


@pytest.mark.parametrize(
    ("num_ranks", "plan"),
    [(2, {"preset": "1f1b", **AGAIN}), more(2, {"preset": "1f1b"}), more(4, {"preset": "gpipe"})],
    ids=in_words,
)
def test_dropout_under_the_other_schedule_and_run_again(
    num_ranks: int, plan: dict[str, Any]
) -> None:
    job = Job(case="bert", dropout=0.2, num_epochs=1)
    (one,) = pipelines(job, 1, preset="gpipe", stages=4)
    assert_equal_runs(pipelines(job, num_ranks, stages=4, **plan), one)


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
    each_step = pipelines(job, 1, preset="gpipe", stages=2)[0]["logged"]
    assert len(set(each_step)) == len(each_step) == job.num_steps
    two = pipelines(replace(job, num_microbatches=2), 1, preset="gpipe", stages=2)[0]["logged"]
    assert abs(two[0] - each_step[0]) > 1e-4  # of equal micro-batches the mean would be either


@pytest.mark.parametrize(("preset", "num_ranks"), [("1f1b", 1), ("cyclic_dp", 2)])
def test_a_seed_means_the_same_numbers_and_another_seed_others(
    preset: str, num_ranks: int
) -> None:
    job = Job(case="vae", num_epochs=1, num_microbatches=2)
    first, again, other = (
        pipelines(replace(job, seed=seed), num_ranks, preset=preset, stages=2)[0]
        for seed in (5, 5, 6)
    )
    assert_equal_runs([again], first)
    assert other["logged"][0] != first["logged"][0]


# ---------------------------------------------------------------------- whole micro-batches


class Block(nn.Module):
    """Draws inside a module with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.linear(x)) + 0.1 * torch.randn(12))


class Random(Logging):
    """Draws in modules and between them: from activations, from the batch, from nothing."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(accuracy())
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.drops = nn.ModuleList(nn.Dropout(0.2) for _ in range(4))
        self.head = nn.Linear(12, 4)

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        x, y = batch[0][:, 0, 0].repeat(1, 2)[:, :12], batch[1]
        x = x + 0.1 * torch.rand_like(x)
        h = x + 0.1 * torch.randn_like(x)
        for block, drop in zip(self.blocks, self.drops, strict=True):
            h = drop(block(h)) + F.dropout(x, 0.5)
            h = h * (1 + 0.1 * random.random() + 0.1 * np.random.rand()) + torch.rand(1)
        logits = self.head(F.dropout(h, 0.1))
        return self.note(F.cross_entropy(logits, y) * (1 + random.random()), logits, y)


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1", more("lockstep_dp")])
def test_what_is_drawn_is_the_same_on_one_device_and_in_many_processes(preset: str) -> None:
    job = Job(case="resnet", module=Random, num_steps=9, num_epochs=1, num_microbatches=2)
    plan = {"preset": preset, "stages": ["blocks.2"]}
    (one,) = pipelines(job, 1, **plan)
    ranks = pipelines(job, 2, **plan)
    assert one["plan"].placement == "single"
    size = len(job.batch(0)[0])  # a step's loss is the mean over samples
    sums = (torch.tensor([rank["returned"] for rank in ranks]) * size).sum(0)
    assert torch.equal(sums / (2 * size), torch.tensor(one["returned"]))
    for i, rank in enumerate(ranks):
        assert rank["stage_of"] == one["stage_of"]
        assert_same(rank["weights"], one["weights"], f"worker {i}")


class Dropping(Logging):
    """Has dropout behind every layer."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__(accuracy())
        layers = [x for _ in range(8) for x in (nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.3))]
        self.net = nn.Sequential(nn.Linear(192, 12), *layers, nn.Linear(12, 4))

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        logits = self.net(batch[0].flatten(1))
        return self.note(F.cross_entropy(logits, batch[1]), logits, batch[1])


@pytest.mark.parametrize("preset", ["cyclic_dp", more("lockstep_dp")])
def test_dropout_depends_on_seed_step_and_micro_batch_alone(preset: str) -> None:
    job = Job(case="resnet", module=Dropping, num_steps=9, num_epochs=1, num_microbatches=2)
    ranks = pipelines(job, 2, preset=preset, stages=3)
    reference = Reference(job, ranks[0]["stage_of"])
    step = {"t": 0, "i": 0, "draws": 0}

    def before(t: int, i: int) -> None:
        step.update(t=t, i=i, draws=0)
        torch.manual_seed(key(t, i, "stage 0"))  # the first step, which finds stages, is one

    def before_draw(module: nn.Module, args: Any) -> None:
        if step["t"]:  # behind it each dropout lies between the modules that stages begin with
            torch.manual_seed(key(step["t"], step["i"], f"draw {step['draws']}"))
        step["draws"] += 1

    def key(t: int, i: int, what: str) -> int:
        digest = hashlib.blake2b(f"{job.seed},{t},{i},{what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    reference.before = before
    for m in reference.module.net:
        if isinstance(m, nn.Dropout):
            m.register_forward_pre_hook(before_draw)
    reference.train(ranks[0]["plan"]).compare(ranks)


class Masked(Dropping):
    """Keeps the mask of each batch."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.outs: list[Tensor] = []

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        self.outs.append(F.dropout(torch.ones(64)))
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.register_buffer("masks", torch.stack(self.outs))


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_zero"])
def test_each_batch_of_each_step_and_worker_draws_something_else(preset: str) -> None:
    job = Job(case="resnet", module=Masked, num_steps=6, num_epochs=1, num_microbatches=2,
              flags=(("accumulate_grad_batches", 2),))  # fmt: skip
    ranks = pipelines(job, 2, preset=preset)
    drawn = [tuple(mask.tolist()) for rank in ranks for mask in rank["weights"]["masks"]]
    assert len(drawn) == 12
    assert len(set(drawn)) == 12
