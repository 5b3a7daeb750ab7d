"""Modules that are not a plain chain: branches, shared and glued parameters; dropout."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness import processes
from tests.harness.rows import in_turn
from tests.harness.trainers import assert_same, fit
from tests.modules.classifier import Batch, Classifier, mlp
from tests.references.replicated import Reference

pytestmark = pytest.mark.multi

RULES = {"cyclic_dp": "freshest", "cyclic_dp_v1": "delayed", "lockstep_dp": "sync"}


class UsedSometimes(Classifier):
    """Has a branch that every third step takes, on every worker."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(12, 12)
        self.head = nn.Linear(3, 3)

    def loss(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        if self.takes_branch(x, batch_idx):
            x = self.branch(x)
        return F.cross_entropy(self.head(self.net(x)), y)

    def takes_branch(self, x: Tensor, batch_idx: int) -> bool:
        return batch_idx % 3 == 0


class UsedLater(UsedSometimes):
    """Has a branch that the first step, which finds the stages, does not take."""

    def takes_branch(self, x: Tensor, batch_idx: int) -> bool:
        return batch_idx % 3 == 1


class UsedSomewhere(UsedSometimes):
    """Has a branch that depends on the data, so that workers differ; all take it at first."""

    def takes_branch(self, x: Tensor, batch_idx: int) -> bool:
        return batch_idx == 0 or bool(x.sum() > 0)


class UsedByOneWorker(UsedSometimes):
    """Has a branch that depends on the data from the first step on."""

    def takes_branch(self, x: Tensor, batch_idx: int) -> bool:
        return bool(x.sum() > 0)


class Glued(Classifier):
    """Uses parameters in its own code, at the beginning, between modules, and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(12))
        self.mix = nn.Parameter(torch.eye(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(3, 3)

    def loss(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.head(self.net(x + self.shift) @ self.mix)
        return F.cross_entropy(self.scale * logits, y) + 1e-3 * self.shift.square().sum()


class Tied(Classifier):
    """Uses the weight of its first layer in its last but one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net[16].weight = self.net[0].weight


MODULES = [
    UsedSometimes, UsedLater, UsedSomewhere, Glued, Tied,
]  # fmt: skip


@pytest.mark.parametrize(("module", "preset"), in_turn(MODULES, ["cyclic_dp", "cyclic_dp_v1"]))
def test_modules_of_every_kind(module: Any, preset: str) -> None:
    ranks = processes.run(fit, 2, module, {"preset": preset, "stages": 4}, 13, {})
    assert len(set(ranks[0]["stage_of"].values())) == 4
    run = Reference(rule=RULES[preset], n=2, num_batches=13)
    run.run(module(), ranks[0]["stage_of"]).compare(ranks)


@pytest.mark.parametrize("module", [UsedSomewhere, Glued, Tied], ids=lambda m: m.__name__)
def test_modules_on_four_workers(module: Any) -> None:
    ranks = processes.run(fit, 4, module, {"stages": 8, "slack": 1}, 13, {})
    run = Reference(rule="freshest", slack=1, n=4, num_batches=13)
    run.run(module(), ranks[0]["stage_of"]).compare(ranks)


@pytest.mark.parametrize("stages", [1, ["net.4", "net.10"]], ids=["one stage", "named stages"])
def test_a_branch_that_workers_take_differently_from_the_first_step_on(stages: Any) -> None:
    strategy = {"preset": "cyclic_dp_v1", "stages": stages}
    ranks = processes.run(fit, 2, UsedByOneWorker, strategy, 13, {})
    run = Reference(rule="delayed", n=2, num_batches=13)
    run.run(UsedByOneWorker(), ranks[0]["stage_of"]).compare(ranks)


@pytest.mark.parametrize("preset", ["cyclic_dp", "lockstep_dp"])
def test_stages_by_name(preset: str) -> None:
    strategy = {"preset": preset, "stages": ["net.4", "net.10", "net.18"]}
    ranks = processes.run(fit, 2, Classifier, strategy, 12, {})
    stage_of = ranks[0]["stage_of"]
    assert [stage_of[f"net.{k}.weight"] for k in (0, 2, 4, 8, 10, 16, 18)] == [
        0, 0, 1, 1, 2, 2, 3
    ]  # fmt: skip
    run = Reference(rule=RULES[preset], n=2, num_batches=12)
    run.run(Classifier(), stage_of).compare(ranks)


# ---------------------------------------------------------------------- randomness


class Dropping(Classifier):
    """Has dropout behind every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(dropout=0.3)


def fit_seeded(seed: int, preset: str) -> dict[str, Any]:
    torch.manual_seed(seed)
    return fit(partial(_keeping_the_seed, seed), {"preset": preset, "stages": 4}, 12, {})


def _keeping_the_seed(seed: int) -> Dropping:
    module = Dropping()
    torch.manual_seed(seed)
    return module


@pytest.mark.parametrize("preset", ["cyclic_dp", "lockstep_dp"])
def test_dropout_depends_on_seed_step_and_micro_batch_alone(preset: str) -> None:
    ranks = processes.run(fit_seeded, 2, 7, preset)
    again = processes.run(fit_seeded, 2, 7, preset)
    other = processes.run(fit_seeded, 2, 8, preset)
    for rank, same in zip(ranks, again, strict=True):
        assert_same(rank["weights"], same["weights"])
    assert other[0]["losses"] != ranks[0]["losses"]

    module = Dropping()
    step = {"t": 0, "i": 0, "draws": 0}

    def seed_of(t: int, i: int) -> int:
        step.update(t=t, i=i, draws=0)
        return key(t, i, "stage 0")  # the first step finds the stages, and draws as one of them

    def before_draw(module: nn.Module, args: Any) -> None:
        if step["t"]:  # behind it each dropout lies between the modules that stages begin with
            torch.manual_seed(key(step["t"], step["i"], f"draw {step['draws']}"))
        step["draws"] += 1

    def key(t: int, i: int, what: str) -> int:
        digest = hashlib.blake2b(f"7,{t},{i},{what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    for m in module.net:
        if isinstance(m, nn.Dropout):
            m.register_forward_pre_hook(before_draw)
    run = Reference(rule=RULES[preset], n=2, num_batches=12, seed_of=seed_of)
    run.run(module, ranks[0]["stage_of"]).compare(ranks)
