"""Options for old gradients end with the bits of their rules, in any number of processes.

One case by hand: pytest tests/training/test_old_gradients.py -k "feedback and adamw"
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.harness import processes
from tests.harness.rows import more
from tests.harness.trainers import assert_same, make_trainer, train_data, valid_data, weights_of
from tests.modules.classifier import Classifier, MicroBatches, loss_of
from tests.references import delayed as delayed_chain
from tests.references import sequential
from tests.references.delayed import Chain, fit
from tests.references.rules import ONE_EACH, STAGES_APART

pytestmark = pytest.mark.multi

NUM_STEPS = 11


def assert_follows(
    preset: str,
    num_ranks: int,
    make: Any,
    saved: tuple[str, int] | None = None,
    flags: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Compare every rank with the rule, and see that the options make a difference."""
    m = 1 if preset in ONE_EACH else 4
    strategy = {"preset": preset, "num_microbatches": m} | options
    function = partial(fit, make, strategy, NUM_STEPS, saved, **(flags or {}))
    ranks = processes.run(function, num_ranks, time_limit_s=90.0)
    if preset in STAGES_APART:
        follow = partial(delayed_chain.sequential, make, STAGES_APART[preset], m, NUM_STEPS)
    else:
        follow = partial(delayed_chain.predicted, make, preset, m, NUM_STEPS)
    expected = follow(**options)
    for r, weights in enumerate(ranks):
        assert_same(weights, expected, f"rank {r}")
    if not options:
        return
    name = "layers.0.weight"
    assert not torch.equal(expected[name], follow()[name])


# ---------------------------------------------------------------------- error feedback


@pytest.mark.parametrize(
    ("preset", "num_ranks", "optimizer"),
    [("pipedream_2bw", 2, "adamw"), ("cyclic_pipeline", 2, "sgd"),
     ("pipedream", 1, "adamw"), more("pipedream", 4, "sgd"), ("cyclic_mp", 2, "sgd")],
)  # fmt: skip
def test_error_feedback(preset: str, num_ranks: int, optimizer: str) -> None:
    make = partial(Chain, optimizer, "sawtooth")
    assert_follows(preset, num_ranks, make, error_feedback=True)


@pytest.mark.parametrize(("preset", "num_ranks"), [("pipedream_2bw", 2), ("pipedream", 1)])
def test_error_feedback_goes_on_from_a_checkpoint(
    preset: str, num_ranks: int, tmp_path: Any
) -> None:
    make = partial(Chain, "adamw", "sawtooth")
    assert_follows(preset, num_ranks, make, (str(tmp_path), 4), error_feedback=True)


def follow_replicas(
    rule: str, optimizer: str, num_workers: int, num_steps: int, stage_of: dict[str, int]
) -> dict[str, Tensor]:
    """Train by the rule of cyclic_dp or cyclic_dp_v1, with error feedback where reads are late."""
    torch.set_num_threads(1)
    module = Classifier("mlp", optimizer)
    named = dict(module.named_parameters())
    num_stages = 1 + max(stage_of.values())
    stages: list[Any] = [[] for _ in range(num_stages)]
    for n, p in named.items():
        stages[stage_of[n]].append(p)
    late = {
        n
        for n in named
        for i in range(num_workers)
        if not sequential.reads_newest(rule, i, stage_of[n], num_workers, num_stages, 0)
    }
    data = MicroBatches("vectors", num_workers * num_steps)
    before: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    configured = module.configure_optimizers()
    scheduled = isinstance(configured, dict)
    scheduler = configured["lr_scheduler"]["scheduler"] if scheduled else None

    def note() -> None:
        before.update({n: p.detach().clone() for n, p in named.items()})

    def correct(t: int) -> None:
        for n in late:
            update = before[n] - named[n].detach()
            named[n].data -= update - last.get(n, torch.zeros_like(update))
            last[n] = update
        if scheduler is not None:
            scheduler.step()

    sequential.train(
        module, stages, configured["optimizer"] if scheduled else configured,
        lambda _, t, i: loss_of(module.net, data[t * num_workers + i]),
        rule=rule, num_workers=num_workers, num_steps=num_steps, before_update=note,
        after_update=correct,
    )  # fmt: skip
    return {n: x.detach().clone() for n, x in module.state_dict().items()}


def fit_replicas(
    make: Any, strategy: dict[str, Any], saved: tuple[str, int] | None
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Train on this rank; with ``saved``, save behind that step and go on in a new Trainer."""
    path = None
    if saved is not None:
        folder, step = saved
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=step, save_top_k=-1)
        flags = {"callbacks": [saver], "enable_checkpointing": True, "max_steps": step + 2}
        module = make()
        make_trainer(strategy, **flags).fit(module, train_data(module, NUM_STEPS))
        path = f"{folder}/step={step}.ckpt"
    module = make()
    trainer = make_trainer(strategy, max_epochs=1, val_check_interval=4)
    trainer.fit(module, train_data(module, NUM_STEPS), valid_data(module), ckpt_path=path)
    return weights_of(module), dict(trainer.strategy.stage_of)


@pytest.mark.parametrize(
    ("preset", "rule", "num_workers", "optimizer", "step"),
    [
        ("cyclic_dp_v1", "delayed", 1, "adamw", 5),
        more("cyclic_dp_v1", "delayed", 2, "sgd", 5),
        more("cyclic_dp", "freshest", 2, "adamw", None),
        ("cyclic_dp", "freshest", 2, "adamw", 4),
    ],
)
def test_error_feedback_of_replicas(
    preset: str, rule: str, num_workers: int, optimizer: str, step: int | None, tmp_path: Any
) -> None:
    strategy = {"preset": preset, "stages": 3, "error_feedback": True}
    make = partial(Classifier, "mlp", optimizer)
    saved = None if step is None else (str(tmp_path), step)
    ranks = processes.run(fit_replicas, num_workers, make, strategy, saved)
    stage_of = ranks[0][1]
    expected = follow_replicas(rule, optimizer, num_workers, NUM_STEPS, stage_of)
    for weights, _ in ranks:
        assert_same(weights, expected)


# ---------------------------------------------------------------------- predictions


@pytest.mark.parametrize(("preset", "num_ranks"), [("spectrain", 2), more("pipeoptim", 1)])
def test_predictions_go_on_from_a_checkpoint(preset: str, num_ranks: int, tmp_path: Any) -> None:
    make = partial(Chain, "adamw", "sawtooth")
    assert_follows(preset, num_ranks, make, (str(tmp_path), 5))


# ---------------------------------------------------------------------- from another plan


def begun_by_another(
    make: Any, strategies: tuple[dict[str, Any], dict[str, Any]], folder: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Train under the first strategy, and from its checkpoint behind step 4 under the second."""
    first, second = strategies
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    flags = {"max_steps": 5, "callbacks": [saver], "enable_checkpointing": True}
    fit(make, first, NUM_STEPS, **flags)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        weights = fit(make, second, NUM_STEPS, ckpt_path=f"{folder}/step=4.ckpt")
    return weights, [str(w.message) for w in said if "another plan" in str(w.message)]


@pytest.mark.parametrize(
    ("preset", "num_ranks"), [("pipedream_2bw", 2), more("cyclic_pipeline", 1)]
)
def test_behind_a_checkpoint_of_another_plan_the_rule_begins_as_at_step_0(
    preset: str, num_ranks: int, tmp_path: Any
) -> None:
    make = partial(Chain, "adamw", "sawtooth")
    strategies = tuple({"preset": name, "num_microbatches": 4} for name in ("1f1b", preset))
    ranks = processes.run(begun_by_another, num_ranks, make, strategies, str(tmp_path))
    expected = delayed_chain.sequential(make, STAGES_APART[preset], 4, NUM_STEPS, num_sync=4)
    for weights, _ in ranks:
        assert_same(weights, expected)
    assert [len(said) for _, said in ranks] == [1, 0][:num_ranks]


def test_predictions_with_error_feedback() -> None:
    assert_follows("pipeoptim", 2, partial(Chain, "adamw", "sawtooth"), error_feedback=True)


def test_validation_within_an_epoch_changes_nothing() -> None:
    make = partial(Chain, "adamw", "sawtooth")
    assert_follows("pipeoptim", 2, make, flags={"val_check_interval": 3})


def test_predictions_begin_anew_from_a_checkpoint_of_another_plan(tmp_path: Any) -> None:
    make = partial(Chain, "adamw", "sawtooth")
    strategies = (
        {"preset": "1f1b", "num_microbatches": 1},
        {"preset": "pipeoptim", "num_microbatches": 1},
    )
    one = processes.run(begun_by_another, 1, make, strategies, str(tmp_path / "one"))
    two = processes.run(begun_by_another, 2, make, strategies, str(tmp_path / "two"))
    for weights, _ in two:
        assert_same(weights, one[0][0])
