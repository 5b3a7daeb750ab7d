"""Exchanges of local steps that are used some steps later: the bits of a plain loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_cyclic import LocalSteps, PlanError, TopK
from tests.harness.local_steps import NUM_STEPS, RULES, assert_is, expected, fit
from tests.harness.rows import more
from tests.harness.runs import saving
from tests.harness.trainers import assert_same
from tests.modules.classifier import Classifier, micro_batches

pytestmark = pytest.mark.multi


@pytest.mark.parametrize(
    ("name", "n", "options"),
    [
        ("late", 2, {}), ("later in turn", 4, {}), ("late in turn", 2, {"sharding": "optimizer"}),
        more("late", 1, {}), more("late in turn", 3, {}), more("late, all outer", 2, {}),
        more("late", 4, {"sharding": "optimizer"}), more("late", 2, {"transport": "edges"}),
    ],
    ids=str,
)  # fmt: skip
def test_bits_are_those_of_workers_one_after_the_other(
    name: str, n: int, options: dict[str, Any]
) -> None:
    ranks = fit(RULES[name][0], n, more=options)
    assert_is(ranks, expected(name, n, ranks[0].stage_of))


def test_differences_are_encoded_and_used_later() -> None:
    make, codec = partial(Classifier, "wide_mlp", "adamw"), TopK(density=0.1)
    ranks = fit(RULES["late"][0], 2, make=make, more={"compress": codec})
    assert_is(ranks, expected("late", 2, ranks[0].stage_of, make=make, codec=codec))


def test_validation_waits_for_exchanges_and_changes_nothing() -> None:
    valid = partial(micro_batches, "vectors", 1, 1)
    ranks = fit(RULES["late"][0], 2, valid=valid, val_check_interval=1)
    reference = expected("late", 2, ranks[0].stage_of)
    assert_is(ranks, reference)
    for rank in ranks:
        for seen, outer in zip(rank.found["seen"], reference.outer, strict=True):
            assert_same({n: seen[n] for n in outer}, outer)


class Freezing(Callback):
    """Stop training the first layer between an exchange and its use."""

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        module.net[0].requires_grad_(trainer.global_step < 4)


def test_what_is_frozen_since_goes_back_to_the_outer_weights() -> None:
    ranks = fit(RULES["late"][0], 2, callbacks=[Freezing()])
    frozen = ("net.0.", 4, NUM_STEPS)
    assert_is(ranks, expected("late", 2, ranks[0].stage_of, frozen=frozen))


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("name", "step"),
    [("late", 3), ("late in turn", 6), more("late", 4), more("late", 5), more("later in turn", 5)],
)
def test_a_run_goes_on_between_an_exchange_and_its_use(
    name: str, step: int, tmp_path: Path
) -> None:
    whole = fit(RULES[name][0], 2, **saving(tmp_path, every=step))
    ranks = fit(RULES[name][0], 2, ckpt_path=tmp_path / f"step={step}.ckpt")
    reference = expected(name, 2, whole[0].stage_of)
    assert_is(whole, reference)
    assert_is(ranks, reference, NUM_STEPS - step)
    saved = torch.load(tmp_path / f"step={step}.ckpt")["state_dict"]
    outer = reference.outer[step - 1]
    assert_same({n: saved[n] for n in outer}, outer)


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"delay": -1}, "delay=-1 of LocalSteps; allowed: whole numbers from 0 on; use delay=1"),
        ({"delay": True}, "delay=True of LocalSteps"),
        ({"delay": 50}, "delay=50 of LocalSteps with every=50, .* allowed: 0 to 49; use delay=49"),
        ({"delay": 1, "mixing": 1}, "mixing=1 of LocalSteps; allowed: numbers from 0 to below 1"),
        ({"mixing": 0.5}, "mixing=0.5 of LocalSteps with delay=0, .* use mixing=0, or delay=1"),
    ],
)
def test_numbers_that_are_none_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        LocalSteps(**given)


def test_half_of_the_own_weights_stays_where_nobody_says() -> None:
    assert LocalSteps().mixing == 0
    assert LocalSteps(delay=1).mixing == 0.5
