"""Runs of local steps as users have them: what a module, its batches and callbacks may do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

from tests.harness.local_steps import NUM_STEPS, RULES, assert_is, expected, fit
from tests.harness.processes import here
from tests.harness.rows import more
from tests.harness.runs import saving
from tests.harness.trainers import assert_same
from tests.modules.classifier import Classifier, MicroBatches, adamw, loader, micro_batches

pytestmark = pytest.mark.multi


class Plain(Classifier):
    def __init__(self) -> None:
        super().__init__("batchnorm_mlp", "adamw")


class Idle(Plain):
    """Has a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)


class Grouped(Plain):
    """Trains weights and biases at rates of their own, which a scheduler changes."""

    def configure_optimizers(self) -> Any:
        weights, biases = (
            [p for p in self.parameters() if (p.dim() > 1) is is_matrix]
            for is_matrix in (True, False)
        )
        optimizer = adamw([{"params": weights}, {"params": biases, "lr": 0.02}])
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, [lambda t: 1 / (1 + t), lambda t: (1 + t % 3) / 3]
        )
        return {
            "optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}
        }  # fmt: skip


class Compiled(Plain):
    """Has a block that torch.compile has wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].compile(backend="eager")


class Ending(MicroBatches):
    """Its last batch, of each worker, has fewer rows."""

    def __getitem__(self, k: int) -> Any:
        x, y = super().__getitem__(k)
        is_last = k >= self.num - here().num_ranks
        return (x[:3], y[:3]) if is_last else (x, y)


def ending() -> Any:
    return loader(Ending("vectors", NUM_STEPS * here().num_ranks))


@pytest.mark.parametrize(
    ("make", "name", "flags", "numbers"),
    [
        (Idle, "every 3", {}, {}), (Grouped, "late", {}, {}),
        (Compiled, "late", {}, {}), more(Compiled, "every 3", {}, {}),
        (Plain, "every 4", {"data": ending}, {"last_rows": 3}),
        (Plain, "late", {"precision": "bf16-true"}, {"dtype": torch.bfloat16}),
        more(Plain, "in turn", {"precision": "bf16-true"}, {"dtype": torch.bfloat16}),
        more(Idle, "late in turn", {}, {}), more(Grouped, "in turn", {}, {}),
    ],
)  # fmt: skip
def test_bits_are_those_of_workers_one_after_the_other(
    make: Any, name: str, flags: dict[str, Any], numbers: dict[str, Any]
) -> None:
    ranks = fit(RULES[name][0], 2, make=make, **flags)
    assert_is(ranks, expected(name, 2, ranks[0].stage_of, make=make, **numbers))


# ---------------------------------------------------------------------- other numbers of ranks


def test_another_number_of_ranks_goes_on_from_the_outer_weights(tmp_path: Path) -> None:
    """Own weights of workers that there are no more, or not yet, are nobody's."""
    fit(RULES["every 3"][0], 2, **saving(tmp_path, every=4))
    file = tmp_path / "step=4.ckpt"
    expects = ["The checkpoint ", "Be aware that when using"]
    ranks = fit(RULES["every 3"][0], 4, ckpt_path=file, max_steps=5, expects=expects)
    saved = torch.load(file)["state_dict"]
    for rank in ranks:
        assert rank.global_step == 5  # none of which is in outer weights
        outer = {n: rank.weights[n] for n in rank.stage_of}
        assert_same(outer, {n: saved[n] for n in outer})
    (text,) = [x for x in ranks[0].warned if "own weights of its 2 workers are left out" in x]
    assert "goes on from its newest weights" in text


# ---------------------------------------------------------------------- callbacks


class Telling(Plain):
    """Logs a metric that gets worse on one rank, and better on the other."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        step = float(self.trainer.global_step)
        self.log("mine", step if here().rank else -step)


@pytest.mark.parametrize("name", ["every 3", "late"])
def test_metrics_that_differ_by_rank_end_all_ranks_alike(name: str, tmp_path: Path) -> None:
    """As under DDP, one rank that would stop stops all; and files are written by all or none."""
    stop = EarlyStopping("mine", mode="min", patience=1)
    saver = ModelCheckpoint(tmp_path, "{step}", monitor="mine", mode="min")
    valid = partial(micro_batches, "vectors", 1, 1)
    ranks = fit(
        RULES[name][0], 2, make=Telling, valid=valid, val_check_interval=2, min_epochs=0,
        callbacks=[stop, saver], enable_checkpointing=True, look=steps_of,
        expects=["It is recommended to use"],
    )  # fmt: skip
    assert {rank.global_step for rank in ranks} == {4}
    assert len(list(tmp_path.glob("*.ckpt"))) == 1


def steps_of(trainer: Any, module: Any) -> int:
    steps: int = trainer.global_step
    return steps
