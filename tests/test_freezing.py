"""Parameters frozen and unfrozen within a fit: the same on every rank, resumed, or refused."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_cyclic.errors import CyclicError
from tests.conformance.harness import Batches
from tests.conformance.modules import SIZE, Plain, Thawing, vectors
from tests.harness import processes
from tests.harness.trainers import assert_same, make_trainer, weights_of

pytestmark = pytest.mark.multi
NUM_STEPS, NUM_EPOCHS = 4, 2
CUT = {"stages": ["net.2"], "num_microbatches": 2}


def batches(strategy: Any) -> DataLoader[Any]:
    """Return the batches of a pipeline, or of this rank where each has its own."""
    n, r = processes.here().num_ranks, processes.here().rank
    groups = [
        [2 * t, 2 * t + 1] if "num_microbatches" in strategy else [n * t + r]
        for t in range(NUM_STEPS)
    ]
    return DataLoader(Batches(vectors, groups), batch_size=None)


def train(
    kind: type[Plain], strategy: Any, folder: str | None = None, file: str | None = None,
    num_epochs: int = NUM_EPOCHS, **flags: Any,
) -> dict[str, Any]:  # fmt: skip
    callbacks = []
    if folder is not None:
        callbacks = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1, every_n_epochs=1)]
    module = kind()
    trainer = make_trainer(
        strategy, max_epochs=num_epochs, callbacks=callbacks,
        enable_checkpointing=folder is not None, **flags,
    )  # fmt: skip
    data = batches(strategy)
    trainer.fit(module, data, data, ckpt_path=file)
    return {"weights": weights_of(module), "stage_of": dict(trainer.strategy.stage_of)}


class Deep(Thawing):
    """Has layers for more stages."""

    def make_net(self) -> nn.Module:
        layers = [nn.Linear(SIZE, SIZE) for _ in range(4)]
        return nn.Sequential(*layers, nn.Linear(SIZE, 4))


class Counting(Thawing):
    """Counts process groups behind each batch."""

    def on_train_start(self) -> None:
        self.groups: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.groups.append(len(dist.distributed_c10d._world.pg_map))


def groups_of(strategy: Any) -> list[int]:
    module = Counting()
    data = batches(strategy)
    make_trainer(strategy, max_epochs=NUM_EPOCHS).fit(module, data, data)
    return module.groups


@pytest.mark.parametrize(
    "strategy",
    [
        {"preset": "cyclic_dp", "stages": ["net.2"]},
        {"preset": "cyclic_dp", "stages": ["net.2"], "transport": "edges"},
        {"preset": "1f1b", **CUT},
    ],
    ids=["named", "edges", "pipeline"],
)
def test_unfreezing_leaves_no_process_groups_behind(strategy: Any) -> None:
    for groups in processes.run(groups_of, 2, strategy):
        assert len(groups) == NUM_EPOCHS * NUM_STEPS
        assert len(set(groups[1:])) == 1, groups


class InTheOptimizer(Thawing):
    """Gives the optimizer all parameters from the beginning, frozen or not."""

    def configure_optimizers(self) -> Any:
        self.net[0].requires_grad_(False)
        return torch.optim.AdamW(
            [{"params": self.net[:4].parameters()}, {"params": self.net[4].parameters()}], 0.05
        )


@pytest.mark.parametrize("preset", ["pipedream", "pipeoptim"])
def test_pipelines_that_predict_or_stash_agree_with_one_process(preset: str) -> None:
    strategy = {"preset": preset, "stages": ["net.2"], "num_microbatches": 1}
    (alone,) = processes.run(train, 1, InTheOptimizer, strategy)
    for rank in processes.run(train, 2, InTheOptimizer, strategy):
        assert_same(rank["weights"], alone["weights"])


def test_three_workers_that_hold_what_they_use_agree_with_those_that_hold_all() -> None:
    plan = {"stages": ["net.2", "net.3"], "slack": 2}
    whole = processes.run(train, 3, Deep, {"preset": "cyclic_dp", **plan})
    for rank in processes.run(train, 3, Deep, {"preset": "cyclic_zero", **plan}):
        assert_same(rank["weights"], whole[0]["weights"])


def test_an_unfrozen_layer_goes_to_the_stage_that_uses_it() -> None:
    ranks = processes.run(train, 2, Thawing, {"preset": "cyclic_dp", "stages": ["net.2"]})
    stages = {"net.0": 0, "net.2": 1, "net.4": 1}
    for rank in ranks:
        assert {n.rpartition(".")[0]: j for n, j in rank["stage_of"].items()} == stages


class ThawsByEpoch(Plain):
    """Trains its first layer in odd epochs only."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch % 2 == 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


@pytest.mark.parametrize(
    "strategy",
    [{"preset": "cyclic_zero", "stages": ["net.2"]}, {"preset": "cyclic_mp", **CUT}],
    ids=lambda s: s["preset"],
)
def test_resumed_where_something_else_is_trained(strategy: Any, tmp_path: Path) -> None:
    def check(epoch: int) -> None:
        file = str(tmp_path / f"epoch={epoch}.ckpt")
        for rank in processes.run(train, 2, ThawsByEpoch, strategy, None, file, 4):
            assert_same(rank["weights"], whole[0]["weights"])

    whole = processes.run(train, 2, ThawsByEpoch, strategy, str(tmp_path), None, 4)
    check(0)  # saved before the first layer was ever trained; it is, in the next step
    check(1)  # saved behind a step that trained it; it is not, in the next one


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


def finetune(strategy: Any, num_ranks: int, epochs: int) -> dict[str, Any]:
    module, r = FinetunesNorms(), processes.here().rank
    groups = [[num_ranks * t + r] for t in range(2 * NUM_STEPS // num_ranks)]
    flags = {"accumulate_grad_batches": 2 // num_ranks}
    trainer = make_trainer(strategy, max_epochs=epochs, **flags)
    trainer.fit(module, DataLoader(Batches(vectors, groups), batch_size=None))
    return weights_of(module)


def test_statistics_that_come_with_finetuning_are_those_of_one_process() -> None:
    (plain,) = processes.run(finetune, 1, "auto", 1, 3)
    assert plain["net.1.num_batches_tracked"] == 2 * 2 * NUM_STEPS
    for weights in processes.run(
        finetune, 2, {"preset": "lockstep_dp", "stages": ["net.1"]}, 2, 3
    ):
        assert_same(weights, plain)


def test_statistics_that_come_with_finetuning_reach_all_ranks() -> None:
    strategy = {"preset": "cyclic_dp", "stages": ["net.1"]}
    found = processes.run(finetune, 2, strategy, 2, 3)
    for weights in processes.run(finetune, 2, strategy | {"relay_buffers": "all"}, 2, 3):
        assert_same(weights, found[0])
    assert_same(found[1], found[0])


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


def attempt(kind: type[Plain], strategy: Any, flags: dict[str, Any]) -> str:
    with pytest.raises(CyclicError) as caught:
        train(kind, strategy, **flags)
    return str(caught.value)


ADDED_UP = {"accumulate_grad_batches": 2}


@pytest.mark.parametrize(
    ("kind", "strategy", "flags", "said"),
    [
        (ThawsOtherOnes, {"preset": "cyclic_dp"}, {}, OTHERS),
        (ThawsOtherOnes, {"preset": "cyclic_mp", **CUT}, {}, OTHERS),
        (ThawsWithinAStep, {"preset": "cyclic_dp"}, ADDED_UP, "between batches that are added up"),
        (
            ThawsATie,
            {"preset": "pipedream_2bw", **CUT},
            {},
            r"'net.0.weight', which stages \[0, 1",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_on_every_rank(
    kind: type[Plain], strategy: Any, flags: dict[str, Any], said: str
) -> None:
    for text in processes.run(attempt, 2, kind, strategy, flags, time_limit_s=40):
        assert re.search(said, text), text


@pytest.mark.parametrize(
    "strategy", [{"preset": "cyclic_dp"}, {"preset": "1f1b", **CUT}], ids=lambda s: s["preset"]
)
def test_a_rank_that_freezes_alone_says_for_whom_it_waits(strategy: Any) -> None:
    """The other one is in its step by then: nobody asks it before each step."""
    strategy = strategy | {"timeout": timedelta(seconds=3)}
    texts = processes.run(attempt, 2, ThawsOnOneRank, strategy, {}, time_limit_s=60)
    said = "for all ranks to freeze or unfreeze parameters, as it did with 'net.0.weight'"
    ways = [  # whoever is first to give up
        "rank 1 .*waited 3 s for rank 0 .* parameters, as it did with 'net.0.weight', in step 4",
        f"(?s)rank 0 .*waited 3 s for rank 1 .*rank 1 .* waits itself {said}",
    ]
    assert all(any(re.search(way, text) for way in ways) for text in texts), texts
