"""Local steps: DiLoCo, to the bits of a reference that knows nothing of the package."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn

from lightning_cyclic import (
    ConfigurationError,
    CyclicStrategy,
    LocalSteps,
    PipelineStrategy,
    PlanError,
    make_plan,
)
from lightning_cyclic.plan import program_of
from lightning_cyclic.plan.actions import Kind
from tests.harness.local_steps import (
    LOST,
    MAKE,
    MODULE,
    NUM_STEPS,
    RULES,
    assert_is,
    expected,
    fit,
)
from tests.harness.rows import more
from tests.harness.runs import Result, run, saving, trained
from tests.harness.trainers import assert_same
from tests.modules.classifier import Classifier, micro_batches, one_each
from tests.references.local_steps import LocalReference
from tests.references.scaled import precision

pytestmark = pytest.mark.multi

# ---------------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("name", "n", "options"),
    [
        ("every 3", 2, {}), ("in turn", 4, {}), ("every 3", 1, {}),
        ("far in turn", 2, {"sharding": "optimizer"}), more("every 4", 4, {}),
        more("each", 2, {}), more("two at once", 3, {}), more("in turn", 1, {}),
        more("every 3", 4, {"sharding": "optimizer"}), more("every 3", 2, {"transport": "edges"}),
    ],
)  # fmt: skip
def test_bits_are_those_of_workers_one_after_the_other(
    name: str, n: int, options: dict[str, Any]
) -> None:
    ranks = fit(RULES[name][0], n, more=options)
    assert_is(ranks, expected(name, n, ranks[0].stage_of))


def test_each_worker_clips_its_own_gradients() -> None:
    ranks = fit(RULES["every 4"][0], 2, gradient_clip_val=0.1)
    assert_is(ranks, expected("every 4", 2, ranks[0].stage_of, clip=0.1))


def test_batches_are_added_up_to_a_step() -> None:
    ranks = fit(RULES["every 4"][0], 2, accumulate_grad_batches=2)
    reference = LocalReference(
        n=2, num_steps=NUM_STEPS // 2, every=4, moments=RULES["every 4"][1], accumulate=2
    )
    assert_is(ranks, reference.run(MAKE(), ranks[0].stage_of))


class Freezing(Callback):
    """Train the first layer, but in some steps."""

    def __init__(self, first: int, end: int) -> None:
        self.steps = range(first, end)

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        module.net[0].requires_grad_(trainer.global_step not in self.steps)


@pytest.mark.parametrize("steps", [(0, 2), (6, NUM_STEPS)])
def test_what_is_frozen_within_a_period_goes_back_to_the_outer_weights(
    steps: tuple[int, int],
) -> None:
    ranks = fit(RULES["every 4"][0], 2, callbacks=[Freezing(*steps)])
    reference = LocalReference(
        n=2, num_steps=NUM_STEPS, every=4, moments=RULES["every 4"][1], frozen=("net.0.", *steps)
    )
    assert_is(ranks, reference.run(MAKE(), ranks[0].stage_of))


def test_validation_looks_at_outer_weights_and_changes_nothing() -> None:
    valid = partial(micro_batches, "vectors", 1, 1)
    ranks = fit(RULES["every 3"][0], 2, valid=valid, val_check_interval=1)
    reference = expected("every 3", 2, ranks[0].stage_of)
    assert_is(ranks, reference)
    for rank in ranks:
        assert len(rank.found["seen"]) == NUM_STEPS
        for seen, outer in zip(rank.found["seen"], reference.outer, strict=True):
            assert_same({n: seen[n] for n in outer}, outer)


class Exact(LightningModule):
    """A layer whose gradients, and steps of 1/8, have few digits: nothing is ever rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for p in self.parameters():
            nn.init.ones_(p)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch) * batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.125)


def small_numbers(k: int) -> Tensor:
    return torch.tensor([[k % 3, 1.0], [k % 5, 2.0]])


def test_an_exchange_in_each_step_is_plain_sgd_where_nothing_is_rounded() -> None:
    # else p - (p - lr * g), of which the outer step is made, is not lr * g to the last bit
    rule = LocalSteps(every=1, outer_lr=1.0, outer_momentum=0.0)
    data = partial(one_each, small_numbers, 5)
    own, plain = (
        trained(Exact, {"preset": preset, **given}, 2, data=data)
        for preset, given in (("diloco", {"weights": rule}), ("lockstep_dp", {}))
    )
    for w in range(2):
        assert_same(own[w].weights, plain[w].weights)
        assert own[w].losses == plain[w].losses


# ---------------------------------------------------------------------- messages


@pytest.mark.parametrize("name", ["every 3", more("far in turn")])
def test_messages_are_those_of_the_program(name: str) -> None:
    ranks = fit(RULES[name][0], 2)
    program = program_of(ranks[0].found["plan"])
    for w, rank in enumerate(ranks):
        sends = [
            a.payload for t in range(NUM_STEPS) for a in program.step(w, t) if a.kind is Kind.SEND
        ]
        assert {k: v for k, v in rank.found["messages"].items() if k in sends} == Counter(sends)


# ---------------------------------------------------------------------- checkpoints


@cache
def written(folder: Path, name: str) -> list[Result]:
    return fit(RULES[name][0], 2, **saving(folder))


@pytest.mark.parametrize(
    ("name", "step"),
    [("every 3", 4), ("in turn", 6), more("every 3", 3), more("every 4", 7), more("in turn", 1)],
)
def test_a_run_goes_on_in_the_middle_of_a_period(name: str, step: int, tmp_path: Path) -> None:
    whole = written(tmp_path, name)
    file = tmp_path / f"step={step}.ckpt"
    ranks = fit(RULES[name][0], 2, ckpt_path=file, make=partial(nothing_of, MODULE))
    reference = expected(name, 2, whole[0].stage_of)
    assert_is(whole, reference)
    assert_is(ranks, reference, NUM_STEPS - step)
    saved = torch.load(file)["state_dict"]
    outer = reference.outer[step - 1]
    assert_same({n: saved[n] for n in outer}, outer)


def nothing_of(args: tuple[str, str]) -> Classifier:
    """Make a module whose weights must all come from a file."""
    module = Classifier(*args)
    for p in module.parameters():
        p.data.zero_()
    return module


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"every": 0}, "every=0 of LocalSteps; allowed: whole numbers from 1 on; use every=50"),
        ({"every": 2.0}, "every=2.0 of LocalSteps"),
        ({"every": True}, "every=True of LocalSteps"),
        ({"outer_lr": 0}, "outer_lr=0 of LocalSteps; allowed: numbers above 0; use outer_lr=0.7"),
        ({"outer_lr": "1"}, "outer_lr='1' of LocalSteps"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0 of LocalSteps; allowed: numbers from 0 to"),
        ({"in_turn": 1}, "in_turn=1 of LocalSteps; allowed: True or False"),
    ],
)
def test_numbers_that_are_none_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as refused:
        LocalSteps(**given)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("preset", "numbers", "words"),
    [
        ("cyclic_dp", {}, "schedule='cyclic' does not fit weights 'local' .* 'lockstep'"),
        ("diloco", {"sharding": "full"}, "sharding='full' does not fit weights 'local'"),
        ("diloco", {"num_microbatches": 4}, "num_microbatches=4 does not fit .* allowed: 2"),
        ("diloco", {"group_size": 2}, "group_size=2 does not fit"),
        ("diloco", {"norms": "owners"}, "norms='owners' does not fit"),
        ("1f1b", {}, "placement='pipelined' does not fit weights 'local' .* 'replicated'"),
    ],
)
def test_plans_that_do_not_fit_are_refused(
    preset: str, numbers: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        make_plan(preset, weights=LocalSteps(), num_stages=2, num_workers=2, **numbers)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"relay_buffers": "all"}, "relay_buffers='all' with preset 'diloco'"),
        ({"error_feedback": True}, "error_feedback=True with preset 'diloco'"),
        ({"memory_limit_bytes": 10**9, "disk": "/tmp"}, "no plan of memory counts yet"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        CyclicStrategy("diloco", **options)


def test_one_process_does_not_keep_the_weights_of_several() -> None:
    (end,) = run(
        MAKE, {"preset": "diloco", "num_microbatches": 2}, 1,
        data=partial(micro_batches, "vectors", 2),
    )  # fmt: skip
    assert end.error == "PlanError"
    assert "placement='single' does not fit weights 'local'" in end.text


@pytest.mark.parametrize(
    ("flags", "options", "words"),
    [
        ({"callbacks": [WeightAveraging()]}, {}, "of which each worker trains one of its own"),
        ({"plugins": [precision()]}, {}, "does not fit precision='16-mixed', whose loss scale"),
        ({}, {"save_distributed_checkpoint": True}, "does not fit save_distributed_checkpoint"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    flags: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    ends = run(
        MAKE, {"preset": "diloco", **options}, 2, data=partial(micro_batches, "vectors", 2),
        **flags,
    )  # fmt: skip
    for end in ends:
        assert end.error == "ConfigurationError"
        assert words in end.text


# ---------------------------------------------------------------------- names


def test_numbers_choose_the_preset_that_goes_alike() -> None:
    every = LocalSteps(every=9)
    assert CyclicStrategy(every).preset == "diloco"
    assert CyclicStrategy(LocalSteps(in_turn=True)).preset == "streaming_diloco"
    plan = CyclicStrategy(every)._options.plan(2, num_workers=2)
    assert plan.local == every
    with pytest.raises(ConfigurationError, match=r"one of CyclicStrategy"):
        PipelineStrategy(every)


def test_a_fit_that_ends_within_a_period_says_so() -> None:
    warned = fit(RULES["every 3"][0], 2)[0].warned
    assert [x for x in warned if "Training ended 2 steps behind a period" in x]
    assert not [x for x in fit(RULES["every 4"][0], 1)[0].warned if x.startswith(LOST[0])]
    of_stages = fit(RULES["in turn"][0], 1)[0].warned  # the first was exchanged in step 5 of 8
    assert [x for x in of_stages if "Training ended 2 steps" in x and "in_turn=False" in x]
