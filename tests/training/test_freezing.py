"""Parameters frozen and unfrozen within a fit: the same on every rank, resumed, or refused."""

from __future__ import annotations

import re
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from tests.conformance.harness import Batches
from tests.conformance.modules import SIZE, Plain, Thawing, vectors
from tests.harness import runs
from tests.harness.processes import here
from tests.harness.rows import more
from tests.harness.runs import Result
from tests.harness.trainers import assert_same

pytestmark = pytest.mark.multi
NUM_STEPS = 3
CUT = {"stages": ["net.2"], "num_microbatches": 2}


def batches(joined: bool, num_steps: int = NUM_STEPS) -> DataLoader[Any]:
    """Return the batches of a pipeline, or of this rank where each has its own."""
    n, r = here().num_ranks, here().rank
    groups = [[2 * t, 2 * t + 1] if joined else [n * t + r] for t in range(num_steps)]
    return DataLoader(Batches(vectors, groups), batch_size=None)


def train(
    kind: type[Plain], strategy: dict[str, Any], n: int = 2, *, how: Any = runs.trained,
    **flags: Any,
) -> list[Result]:  # fmt: skip
    """Train two epochs, with validation behind each."""
    data = partial(batches, "num_microbatches" in strategy)
    found: list[Result] = how(
        kind, strategy, n, data=data, valid=data, **({"max_epochs": 2} | flags)
    )
    return found


# ---------------------------------------------------------------------- what is left behind


class Counting(Thawing):
    """Counts process groups behind each batch, and behind the fit."""

    def on_train_start(self) -> None:
        self.groups: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.groups.append(len(dist.distributed_c10d._world.pg_map))

    @staticmethod
    def counted(trainer: Any, module: Counting) -> list[int]:
        return [*module.groups, len(dist.distributed_c10d._world.pg_map)]


@pytest.mark.parametrize(
    "strategy",
    [
        more({"preset": "cyclic_dp", "stages": ["net.2"]}),
        {"preset": "cyclic_dp", "stages": ["net.2"], "transport": "edges"},
        {"preset": "1f1b", **CUT, "replicas": 2},
    ],
    ids=["named", "edges", "pipeline"],
)
def test_neither_unfreezing_nor_a_fit_leaves_process_groups_behind(strategy: Any) -> None:
    for rank in train(Counting, strategy, 2 * strategy.get("replicas", 1), look=Counting.counted):
        *within, behind = rank.found
        assert len(within) == 2 * NUM_STEPS
        assert len(set(within[1:])) == 1, within
        assert behind == 1 < within[0]  # the default one


def test_an_unfrozen_layer_goes_to_the_stage_that_uses_it() -> None:
    stages = {"net.0": 0, "net.2": 1, "net.4": 1}
    for rank in train(Thawing, {"preset": "cyclic_dp", "stages": ["net.2"]}):
        assert {n.rpartition(".")[0]: j for n, j in rank.stage_of.items()} == stages


# ---------------------------------------------------------------------- the same everywhere


class InTheOptimizer(Thawing):
    """Gives the optimizer all parameters from the beginning, frozen or not."""

    def configure_optimizers(self) -> Any:
        self.net[0].requires_grad_(False)
        return torch.optim.AdamW(
            [{"params": self.net[:4].parameters()}, {"params": self.net[4].parameters()}], 0.05
        )


class Deep(Thawing):
    """Has layers for more stages."""

    def make_net(self) -> nn.Module:
        layers = [nn.Linear(SIZE, SIZE) for _ in range(4)]
        return nn.Sequential(*layers, nn.Linear(SIZE, 4))


@pytest.mark.parametrize("preset", ["pipedream", more("pipeoptim")])
def test_pipelines_that_predict_or_stash_agree_with_one_process(preset: str) -> None:
    strategy = {"preset": preset, "stages": ["net.2"], "num_microbatches": 1}
    (alone,) = train(InTheOptimizer, strategy, 1)
    for rank in train(InTheOptimizer, strategy):
        assert_same(rank.weights, alone.weights)


def test_three_workers_that_hold_what_they_use_agree_with_those_that_hold_all() -> None:
    plan = {"stages": ["net.2", "net.3"], "slack": 2}
    whole, *_ = train(Deep, {"preset": "cyclic_dp", **plan}, 3)
    for rank in train(Deep, {"preset": "cyclic_zero", **plan}, 3):
        assert_same(rank.weights, whole.weights)


class ThawsByEpoch(Plain):
    """Trains its first layer in odd epochs only."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch % 2 == 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


@pytest.mark.parametrize(
    "strategy",
    [{"preset": "cyclic_zero", "stages": ["net.2"]}, more({"preset": "cyclic_mp", **CUT})],
    ids=lambda s: s["preset"],
)
def test_resumed_where_something_else_is_trained(strategy: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, every_n_epochs=1)
    saving = {"callbacks": [saver], "enable_checkpointing": True}
    whole, *_ = train(ThawsByEpoch, strategy, max_epochs=3, **saving)
    # saved before the first layer was ever trained; it is, in the next step
    # saved behind a step that trained it; it is not, in the next one
    for epoch in (0, 1):
        file = tmp_path / f"epoch={epoch}.ckpt"
        for rank in train(ThawsByEpoch, strategy, max_epochs=3, ckpt_path=file):
            assert_same(rank.weights, whole.weights)


# ---------------------------------------------------------------------- statistics


class Backbone(BaseFinetuning):
    """Freezes a backbone for an epoch, its statistics as well."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[:2], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[:2], optimizer, lr=0.05)


class FinetunesNorms(Plain):
    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, 4))

    def configure_callbacks(self) -> list[Any]:
        return [Backbone()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05)


def finetune(strategy: Any, n: int = 2) -> list[Result]:
    data = partial(batches, False, 2 * NUM_STEPS // n)
    flags = {"accumulate_grad_batches": 2 // n, "max_epochs": 3}
    return runs.trained(FinetunesNorms, strategy, n, data=data, **flags)


def test_statistics_that_come_with_finetuning_are_those_of_one_process() -> None:
    (plain,) = finetune("auto", 1)
    assert plain.weights["net.1.num_batches_tracked"] == 2 * 2 * NUM_STEPS
    for rank in finetune({"preset": "lockstep_dp", "stages": ["net.1"]}):
        assert_same(rank.weights, plain.weights)


def test_statistics_that_come_with_finetuning_reach_all_ranks() -> None:
    strategy = {"preset": "cyclic_dp", "stages": ["net.1"]}
    found = finetune(strategy)
    for rank in finetune(strategy | {"relay_buffers": "all"}):
        assert_same(rank.weights, found[0].weights)
    assert_same(found[1].weights, found[0].weights)


# ---------------------------------------------------------------------- refused by name


class ThawsOtherOnes(Plain):
    def on_train_epoch_start(self) -> None:
        self.net[2 * self.global_rank].requires_grad_(self.current_epoch == 0)


OTHERS = "parameter 'net.0.bias' is trained on rank 1 and frozen on rank 0; allowed: the same"


class ThawsOnOneRank(Plain):
    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch == 0 or self.global_rank == 0)


class ThawsWithinAStep(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)


class ThawsATie(Plain):
    """Has two layers in two stages that share a weight."""

    def make_net(self) -> nn.Module:
        layers = [nn.Linear(SIZE, SIZE) for _ in range(3)]
        layers[2].weight = layers[0].weight
        return nn.Sequential(*layers, nn.Tanh(), nn.Linear(SIZE, 4))

    def on_train_epoch_start(self) -> None:
        self.net[0].weight.requires_grad_(self.current_epoch == 0)


@pytest.mark.parametrize(
    ("kind", "strategy", "batches_per_step", "said"),
    [
        (ThawsOtherOnes, {"preset": "cyclic_dp"}, 1, OTHERS),
        more(ThawsOtherOnes, {"preset": "cyclic_mp", **CUT}, 1, OTHERS),
        (ThawsWithinAStep, {"preset": "cyclic_dp"}, 2, "between batches that are added up"),
        (ThawsATie, {"preset": "pipedream_2bw", **CUT}, 1, "'net.0.weight', which stages [0, 1"),
    ],
)
def test_what_cannot_be_followed_is_refused_on_every_rank(
    kind: type[Plain], strategy: Any, batches_per_step: int, said: str
) -> None:
    flags = {"accumulate_grad_batches": batches_per_step}
    for end in train(kind, strategy, how=runs.run, **flags):
        assert said in end.text


@pytest.mark.parametrize(
    "strategy",
    [more({"preset": "cyclic_dp"}), {"preset": "1f1b", **CUT}],
    ids=lambda s: s["preset"],
)
def test_a_rank_that_freezes_alone_says_for_whom_it_waits(strategy: Any) -> None:
    """The other one is in its step by then: nobody asks it before each step."""
    strategy = strategy | {"timeout": timedelta(seconds=3)}
    said = "for all ranks to freeze or unfreeze parameters, as it did with 'net.0.weight'"
    ways = [  # whoever is first to give up
        "rank 1 .*waited 3 s for rank 0 .* parameters, as it did with 'net.0.weight', in step "
        f"{NUM_STEPS}",
        f"(?s)rank 0 .*waited 3 s for rank 1 .*rank 1 .* waits itself {said}",
    ]
    for end in train(ThawsOnOneRank, strategy, how=runs.run):
        assert any(re.search(way, end.text) for way in ways), end.text
