"""Half precision where workers run whole micro-batches: the scale of each step, and what it skips.

The reference is one process under autocast that goes by the rule, micro-batch by micro-batch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_cyclic.errors import PeerError, StepError
from tests.harness import processes
from tests.harness.trainers import (
    assert_same,
    make_trainer,
    outcome,
    train_data,
    valid_data,
    weights_of,
)
from tests.modules.classifier import Classifier, MicroBatches
from tests.references import sequential
from tests.references.replicated import by_stage
from tests.references.scaled import Scaled, precision

pytestmark = pytest.mark.multi

RULES = {
    "cyclic_dp": "freshest", "cyclic_zero": "freshest", "cyclic_dp_v1": "delayed",
    "lockstep_dp": "sync",
}  # fmt: skip
NUM_STEPS, MAX_NORM = 14, 0.02


def fit(
    strategy: Any, net: str, optimizer: str, num_batches: int, flags: dict[str, Any],
    file: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    module = Classifier(net, optimizer)
    trainer = make_trainer(strategy, **{"max_epochs": 1, "plugins": [precision()]} | flags)
    trainer.fit(module, train_data(module, num_batches), valid_data(module), ckpt_path=file)
    state = trainer.precision_plugin.scaler.state_dict()
    return outcome(trainer, module) | {"scaler": (state["scale"], state["_growth_tracker"])}


def saving(folder: Path, **how: Any) -> dict[str, Any]:
    """Return flags of a run that writes files of all its steps, or epochs."""
    saver = ModelCheckpoint(folder, save_top_k=-1, **how)
    return {"callbacks": [saver], "enable_checkpointing": True}


def reference(
    net: str, optimizer: str, stage_of: dict[str, int], rule: str, n: int, *,
    slack: int = 0, max_norm: float | None = None, accumulate: int = 1, together: bool = False,
    num_batches: int = NUM_STEPS,
) -> dict[str, Any]:  # fmt: skip
    module: Any = Classifier(net, optimizer)
    data = MicroBatches(module.kind, num_batches * n)
    stages = by_stage(module, stage_of)
    made = module.configure_optimizers()
    parts = made if isinstance(made, dict) else {"optimizer": made}
    scheduler = parts.get("lr_scheduler")
    scaled = Scaled(
        parts["optimizer"], stages, together=together or rule != "freshest", max_norm=max_norm,
        late=0 if rule == "sync" or n == 1 else 1,
    )  # fmt: skip

    def loss(module: Any, t: int, i: int) -> Tensor:
        for b in range(accumulate):
            with torch.autocast("cpu", torch.float16):
                value = module.loss(data[(t * accumulate + b) * n + i], b)
            value = value / accumulate * scaled.scale(t)
            if b < accumulate - 1:
                (value / n).backward()
        return value

    sequential.train(
        module, stages, scaled, loss, rule=rule, num_workers=n,  # type: ignore[arg-type]
        num_steps=num_batches // accumulate, slack=slack,
        after_update=lambda t: scheduler["scheduler"].step() if scheduler else None,
    )  # fmt: skip
    return {
        "weights": weights_of(module), "skipped": scaled.skipped, "scaler": scaled.states[-1]
    }  # fmt: skip


def compare(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for r, rank in enumerate(ranks):
        assert_same(rank["weights"], expected["weights"], f"worker {r}")
        assert rank["scaler"] == expected["scaler"]
    assert max(expected["skipped"]) > 0  # else nothing has been tested
    assert min(expected["skipped"]) == 0


@pytest.mark.parametrize(
    ("preset", "n", "num_stages", "net", "optimizer", "more"),
    [
        ("cyclic_dp", 1, 4, "mlp", "sgd", {}),
        ("cyclic_dp", 2, 8, "mlp", "sgd", {"slack": 2}),
        ("cyclic_zero", 2, 4, "mlp", "adamw", {}),
        ("cyclic_dp_v1", 2, 4, "mlp", "adamw", {}),
        ("lockstep_dp", 2, 4, "mlp", "adamw", {}),
    ],
)
def test_scales_and_skipped_updates_follow_the_rule(
    preset: str, n: int, num_stages: int, net: str, optimizer: str, more: dict[str, int]
) -> None:
    strategy = {"preset": preset, "stages": num_stages} | more
    ranks = processes.run(fit, n, strategy, net, optimizer, NUM_STEPS, {})
    args = (net, optimizer, ranks[0]["stage_of"], RULES[preset], n)
    (expected,) = processes.run(partial(reference, **more), 1, *args)
    compare(ranks, expected)


@pytest.mark.parametrize(
    ("preset", "clip", "n"),
    [("cyclic_dp", "global", 2), ("cyclic_dp_v1", None, 4), ("lockstep_dp", None, 2),
     ],
)  # fmt: skip
def test_where_all_stages_are_clipped_together_one_overflow_skips_them_all(
    preset: str, clip: str | None, n: int
) -> None:
    strategy = {"preset": preset, "stages": 4, "clip_norm": clip}
    flags = {"gradient_clip_val": MAX_NORM}
    ranks = processes.run(fit, n, strategy, "mlp", "adamw", NUM_STEPS, flags)
    args = ("mlp", "adamw", ranks[0]["stage_of"], RULES[preset], n)
    function = partial(reference, max_norm=MAX_NORM, together=True)
    (expected,) = processes.run(function, 1, *args)
    compare(ranks, expected)
    assert set(expected["skipped"]) == {0, 4}


def test_batches_that_are_added_up_have_one_scale() -> None:
    strategy, flags = {"preset": "cyclic_zero", "stages": 4}, {"accumulate_grad_batches": 2}
    ranks = processes.run(fit, 2, strategy, "batchnorm_mlp", "sgd", 2 * NUM_STEPS, flags)
    args = ("batchnorm_mlp", "sgd", ranks[0]["stage_of"], RULES["cyclic_zero"], 2)
    function = partial(reference, accumulate=2, num_batches=2 * NUM_STEPS)
    (expected,) = processes.run(function, 1, *args)
    compare(ranks, expected)


def test_flushes_in_the_middle_change_no_scale() -> None:
    strategy, flags = {"preset": "cyclic_zero", "stages": 4}, {"val_check_interval": 2}
    ranks = processes.run(fit, 2, strategy, "mlp", "sgd", NUM_STEPS, flags)
    args = ("mlp", "sgd", ranks[0]["stage_of"], RULES["cyclic_zero"], 2)
    (expected,) = processes.run(reference, 1, *args)
    compare(ranks, expected)


def test_a_resumed_run_goes_on_with_the_scales(tmp_path: Path) -> None:
    args = {"preset": "cyclic_zero", "stages": 4}, "mlp", "adamw", NUM_STEPS
    flags = saving(tmp_path, filename="{step}", every_n_train_steps=4) | {"max_steps": 6}
    processes.run(fit, 2, *args, flags)
    ranks = processes.run(fit, 2, *args, {}, str(tmp_path / "step=4.ckpt"))
    args = ("mlp", "adamw", ranks[0]["stage_of"], "freshest", 2)
    (expected,) = processes.run(reference, 1, *args)
    compare(ranks, expected)


class Halving(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.trainer.strategy.updated_parameters:
            if p.grad is not None:
                p.grad.mul_(0.5)


def attempt(strategy: Any) -> str:
    module = Halving("mlp", "sgd")
    flags = {"gradient_clip_val": MAX_NORM, "plugins": [precision()]}
    try:
        make_trainer(strategy, max_epochs=1, **flags).fit(module, train_data(module, 8))
    except (StepError, PeerError) as error:
        return str(error)
    return "nothing was refused"


def test_gradients_that_a_hook_changes_behind_their_norms_are_refused() -> None:
    for said in processes.run(attempt, 2, {"preset": "cyclic_dp_v1", "stages": 4}):
        assert "changed in step 0 before they were clipped" in said


@pytest.mark.parametrize("first", ["lockstep_dp", "auto"])
def test_checkpoints_are_exchanged_with_plain_lightning(first: str, tmp_path: Path) -> None:
    """Two workers in lockstep, and one device that accumulates, have the same scales and bits."""
    runs = {"lockstep_dp": (2, {"preset": "lockstep_dp", "stages": 4}, 1), "auto": (1, "auto", 2)}
    second = next(name for name in runs if name != first)

    def run(name: str, epochs: int, folder: str, file: str | None = None) -> list[dict[str, Any]]:
        n, strategy, accumulate = runs[name]
        flags = saving(tmp_path / folder, filename="{epoch}") | {
            "max_epochs": epochs, "accumulate_grad_batches": accumulate,
        }  # fmt: skip
        # with a schedule torch warns: the first step overflows
        return processes.run(fit, n, strategy, "mlp", "sgd", 6 * accumulate, flags, file)

    run(first, 1, "a")
    given = run(second, 2, "b", str(tmp_path / "a" / "epoch=0.ckpt"))
    expected, *_ = run("auto", 2, "c")
    for rank in given:
        assert_same(rank["weights"], expected["weights"])
        assert rank["scaler"] == expected["scaler"]
