"""Schedulers, accumulation, clipping and Trainer flags, bit by bit against the reference."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.harness import processes
from tests.harness.rows import in_turn
from tests.harness.trainers import assert_same, fit, make_trainer, outcome, train_data, valid_data
from tests.modules.classifier import Classifier, sgd
from tests.references.replicated import Reference

pytestmark = pytest.mark.multi

RULES = {"cyclic_dp": "freshest", "cyclic_dp_v1": "delayed", "lockstep_dp": "sync"}
PRESETS = list(RULES)


# ---------------------------------------------------------------------- schedulers


class PerEpoch(Classifier):
    """Lowers its rate behind each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"},
        }


@pytest.mark.parametrize("preset", PRESETS[::2])
def test_rates_per_epoch(preset: str) -> None:
    ranks = processes.run(fit, 2, PerEpoch, {"preset": preset, "stages": 4}, 4, {"max_epochs": 3})
    run = Reference(rule=RULES[preset], n=2, num_batches=4, num_epochs=3,
                    each_epoch=lambda module, scheduler: scheduler.step())  # fmt: skip
    run.run(PerEpoch(), ranks[0]["stage_of"]).compare(ranks)
    assert [rank["rates"] for rank in ranks] == [run.rates] * 2
    assert len(set(run.rates)) == 3


# ---------------------------------------------------------------------- accumulation


@pytest.mark.parametrize(
    ("preset", "net"),
    in_turn(["cyclic_dp", "cyclic_dp_v1", "lockstep_dp"], ["mlp", "batchnorm_mlp"]),
)
def test_accumulating_with_an_incomplete_last_window(preset: str, net: str) -> None:
    module = partial(Classifier, net, "adamw")
    flags = {"max_epochs": 3, "accumulate_grad_batches": 2}
    ranks = processes.run(fit, 2, module, {"preset": preset, "stages": 4}, 7, flags)
    assert [rank["global_step"] for rank in ranks] == [12, 12]
    run = Reference(rule=RULES[preset], n=2, num_batches=7, num_epochs=3, accumulate=2)
    run.run(module(), ranks[0]["stage_of"]).compare(ranks)


def test_accumulating_on_four_workers_with_slack() -> None:
    module = partial(Classifier, "batchnorm_mlp", "sgd")
    flags = {"max_epochs": 2, "accumulate_grad_batches": 3}
    ranks = processes.run(fit, 4, module, {"slack": 2, "stages": 8}, 8, flags)
    run = Reference(rule="freshest", slack=2, n=4, num_batches=8, num_epochs=2, accumulate=3)
    run.run(module(), ranks[0]["stage_of"]).compare(ranks)


# ---------------------------------------------------------------------- clipping

CLIP_AT = 0.02


def by_value(all_of_them: list[nn.Parameter], stages: list[list[nn.Parameter]]) -> None:
    clip_grad_value_(all_of_them, CLIP_AT / 10)


def by_norm(all_of_them: list[nn.Parameter], stages: list[list[nn.Parameter]]) -> None:
    clip_grad_norm_(all_of_them, CLIP_AT)


def by_norm_of_each_stage(all_of_them: list[nn.Parameter], stages: list[Any]) -> None:
    for parameters in stages:
        clip_grad_norm_(parameters, CLIP_AT)


@pytest.mark.parametrize(
    ("n", "preset", "clip", "how"),
    [
        (2, "cyclic_dp", None, by_value),
        (2, "cyclic_dp", "stage", by_norm_of_each_stage),
        (2, "cyclic_dp", "global", by_norm),
        (4, "cyclic_dp_v1", None, by_norm),
        (1, "cyclic_dp_v1", "global", by_norm),
        (4, "lockstep_dp", None, by_norm),
    ],
)
def test_clipping(n: int, preset: str, clip: str | None, how: Any) -> None:
    flags = {"gradient_clip_val": CLIP_AT}
    if how is by_value:
        flags = {"gradient_clip_val": CLIP_AT / 10, "gradient_clip_algorithm": "value"}
    strategy = {"preset": preset, "clip_norm": clip, "stages": 5}
    ranks = processes.run(fit, n, Classifier, strategy, 12, flags)
    run = Reference(rule=RULES[preset], n=n, num_batches=12, clip=how)
    run.run(Classifier(), ranks[0]["stage_of"]).compare(ranks)
    unclipped = Reference(rule=RULES[preset], n=n, num_batches=12)
    assert unclipped.run(Classifier(), ranks[0]["stage_of"]).losses != run.losses


class Meets(Callback):
    """All workers meet behind each step, as they do to write a checkpoint."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            assert trainer.strategy.broadcast(trainer.global_step) == trainer.global_step


@pytest.mark.parametrize(
    ("n", "preset", "net", "stages", "accumulate", "callbacks"),
    [
        (2, "cyclic_dp", "batchnorm_mlp", 2, 1, []),
        (2, "cyclic_zero", "batchnorm_mlp", 2, 2, []),  # updates meet inside a step
        (4, "cyclic_zero", "batchnorm_mlp", 3, 1, []),
        (3, "cyclic_dp", "batchnorm_mlp", 3, 2, [Meets()]),  # updates meet at the end of each
        (2, "cyclic_zero", "batchnorm_mlp", 2, 1, [Meets()]),
        (3, "cyclic_zero", "mlp", 4, 2, [Meets()]),
        (2, "cyclic_dp_v1", "mlp", 5, 1, [Meets()]),
    ],
)
def test_clipping_by_the_norm_of_all_while_buffers_travel_and_where_all_meet(
    n: int, preset: str, net: str, stages: int, accumulate: int, callbacks: list[Callback]
) -> None:
    make = partial(Classifier, net)
    flags = {
        "gradient_clip_val": CLIP_AT, "accumulate_grad_batches": accumulate,
        "callbacks": callbacks,
    }  # fmt: skip
    strategy = {"preset": preset, "clip_norm": "global", "stages": stages}
    ranks = processes.run(fit, n, make, strategy, 12, flags, time_limit_s=40)
    rule = RULES.get(preset, "freshest")
    run = Reference(rule=rule, n=n, num_batches=12, accumulate=accumulate, clip=by_norm)
    run.run(make(), ranks[0]["stage_of"]).compare(ranks)


def warnings_of_fit(flags: dict[str, Any], options: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=r"gradient_clip_val clips")
        fit(Classifier, options, 2, flags)
    return [str(each.message) for each in caught]


def test_clipping_of_freshest_weights_says_once_what_it_does() -> None:
    flags = {"gradient_clip_val": CLIP_AT}
    (said,), others = processes.run(warnings_of_fit, 2, flags, {})
    assert "clips each stage by its own norm" in said
    assert others == []
    chosen = processes.run(warnings_of_fit, 2, flags, {"clip_norm": "stage"})
    assert chosen == [[], []]


# ---------------------------------------------------------------------- Trainer flags


FLAGS = [
    {"fast_dev_run": 3},
    {"max_epochs": 2, "limit_train_batches": 0.5, "limit_val_batches": 0},
    {"max_epochs": 3, "val_check_interval": 4, "check_val_every_n_epoch": None},
    {"max_epochs": 9, "max_steps": 4, "accumulate_grad_batches": 2},
    {"max_epochs": 2, "min_steps": 13},
]


@pytest.mark.parametrize(
    ("flags", "preset"),
    in_turn(FLAGS, ["cyclic_dp", "cyclic_dp_v1"]),
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)),
)
def test_flags_mean_what_they_mean_under_ddp(flags: dict[str, Any], preset: str) -> None:
    expected = processes.run(fit, 2, Classifier, "ddp", 6, flags)
    ranks = processes.run(fit, 2, Classifier, preset, 6, flags)
    for rank, same in zip(ranks, expected, strict=True):
        for what in ("global_step", "epoch"):
            assert rank[what] == same[what], what
        assert len(rank["losses"]) == len(same["losses"])
        assert rank["metrics"].keys() == same["metrics"].keys()
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    assert_same(ranks[1]["weights"], ranks[0]["weights"])


@pytest.mark.parametrize("preset", PRESETS)
def test_stopping_in_mid_epoch_leaves_the_weights_of_that_step(preset: str) -> None:
    module = partial(Classifier, "batchnorm_mlp", "adamw")
    strategy = {"preset": preset, "stages": 4}
    ranks = processes.run(fit, 2, module, strategy, 13, {"max_steps": 7})
    assert [rank["global_step"] for rank in ranks] == [7, 7]
    run = Reference(rule=RULES[preset], n=2, num_batches=13, max_steps=7)
    run.run(module(), ranks[0]["stage_of"]).compare(ranks)


# ---------------------------------------------------------------------- behind the fit


def fit_twice(preset: str, anew: bool) -> dict[str, Any]:
    module = Classifier("batchnorm_mlp")
    trainer = make_trainer({"preset": preset, "stages": 4}, max_epochs=1)
    trainer.fit(module, train_data(module, 6), valid_data(module))
    if anew:
        trainer = make_trainer({"preset": preset, "stages": 4}, max_epochs=1)
    else:
        trainer.fit_loop.max_epochs = 2
    trainer.fit(module, train_data(module, 6), valid_data(module))
    return outcome(trainer, module)


@pytest.mark.parametrize(("preset", "anew"), in_turn(PRESETS, [False, True]))
def test_two_fits_in_a_row(preset: str, anew: bool) -> None:
    ranks = processes.run(fit_twice, 2, preset, anew)
    module, stage_of = Classifier("batchnorm_mlp"), ranks[0]["stage_of"]
    first = Reference(rule=RULES[preset], n=2, num_batches=6).run(module, stage_of)
    second = Reference(rule=RULES[preset], n=2, num_batches=6).run(module, stage_of)
    for i, rank in enumerate(ranks):
        assert rank["losses"] == first.losses[i] + second.losses[i]
        assert_same(rank["weights"], second.weights)
