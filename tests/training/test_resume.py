"""Checkpoints: plain files that go on with the same bits, and that every strategy can load."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.rows import more
from tests.harness.runs import Result, saving, trained
from tests.harness.trainers import assert_same, weights_of
from tests.modules.classifier import Classifier, MicroBatches, micro_batches
from tests.references.replicated import Reference
from tests.references.rules import WHOLE

pytestmark = pytest.mark.multi

NUM_BATCHES, NUM_EPOCHS = 4, 2
NUM_STEPS, END = 8, 4  # of all; where the first epoch ends
MODULE = ("batchnorm_mlp", "adamw")
OTHER_PLAN = ["The checkpoint was written under", "Be aware that when using `ckpt_path`"]


def zeroed(net: str, optimizer: str) -> Classifier:
    """Make a module whose weights must all come from a file."""
    module = Classifier(net, optimizer)
    for p in module.parameters():
        p.data.zero_()
    return module


def losses_of(trainer: Any, module: Classifier) -> list[float]:
    return module.losses


def train(
    strategy: Any, n: int, args: tuple[str, str] = MODULE, file: Path | None = None, **flags: Any
) -> list[Result]:
    """Train, from a file if one is given."""
    kind = "images" if args[0] == "resnet" else "vectors"
    return trained(
        partial(Classifier if file is None else zeroed, *args), strategy, n, look=losses_of,
        data=partial(micro_batches, kind, NUM_BATCHES), valid=partial(micro_batches, kind, 1, 1),
        max_epochs=NUM_EPOCHS, ckpt_path=file, **flags,
    )  # fmt: skip


class Written:
    """A run that wrote a file of every step."""

    def __init__(self, folder: Path, strategy: Any, n: int, args: tuple[str, str]) -> None:
        self.folder, self.strategy, self.n, self.args = folder, strategy, n, args
        self.ranks = train(strategy, n, args, **saving(folder))

    def file(self, step: int) -> Path:
        return self.folder / f"step={step}.ckpt"

    def saved(self, step: int) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.file(step), weights_only=True)
        return found

    def on(self, step: int, strategy: Any = None, n: int = 0, **flags: Any) -> list[Result]:
        """Go on from a file, in another way if one is given."""
        chosen = strategy or self.strategy
        return train(chosen, n or self.n, self.args, self.file(step), **flags)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Written]:
    """Return what trains once in each way."""

    @cache
    def once(preset: str, n: int, args: tuple[str, str], stages: int, slack: int) -> Written:
        options: Any = {"preset": preset, "slack": slack, "stages": stages}
        folder = tmp_path_factory.mktemp(preset)
        return Written(folder, options if preset in WHOLE else preset, n, args)

    def write(
        preset: str, n: int = 2, args: tuple[str, str] = MODULE, stages: int = 4, slack: int = 0
    ) -> Written:
        return once(preset, n, args, stages, slack)

    return write


def assert_follows(ranks: list[Result], args: tuple[str, str], **rule: Any) -> None:
    """Compare weights and losses of every rank with those of a rule, from a file or not."""
    reference = Reference(n=len(ranks), num_batches=NUM_BATCHES, **rule)
    reference.run(Classifier(*args), ranks[0].stage_of)
    for i, rank in enumerate(ranks):
        assert rank.found == reference.losses[i], f"losses of worker {i}"
        assert_same(rank.weights, reference.weights, f"worker {i}")


# ---------------------------------------------------------------------- with the same bits


@pytest.mark.parametrize(
    ("preset", "n", "net", "optimizer", "stages", "slack", "steps"),
    [
        ("cyclic_dp", 2, "batchnorm_mlp", "adamw", 4, 0, (1, END, END + 2)),
        ("cyclic_zero", 2, "batchnorm_mlp", "sgd", 3, 2, (END, END + 2)),
        ("cyclic_dp_v1", 1, "mlp", "adamw", 4, 0, (1, END, END + 2)),
        # one worker updates nothing, and counts nothing
        ("cyclic_dp", 3, "mlp", "counting", 2, 0, (END + 2,)),
        *(more(*row, (1, END, END + 2)) for row in [
            ("cyclic_dp_v1", 2, "batchnorm_mlp", "adamw", 4, 0),
            ("cyclic_dp", 2, "mlp", "adamw", 8, 2), ("cyclic_dp", 4, "resnet", "sgd", 4, 0),
            ("cyclic_dp", 4, "batchnorm_mlp", "adamw", 8, 2),
            ("cyclic_dp_v1", 4, "mlp", "sgd", 4, 0), ("cyclic_zero", 3, "resnet", "sgd", 3, 2),
            ("cyclic_zero", 2, "batchnorm_mlp", "adamw", 4, 0),
            ("lockstep_dp", 2, "batchnorm_mlp", "adamw", 4, 0),
        ]),
    ],
)  # fmt: skip
def test_stop_anywhere_and_go_on_with_the_same_bits(
    preset: str, n: int, net: str, optimizer: str, stages: int, slack: int,
    steps: tuple[int, ...], written: Callable[..., Written],
) -> None:  # fmt: skip
    run = written(preset, n, (net, optimizer), stages, slack)
    rule = WHOLE[preset]
    # writing changed nothing
    assert_follows(run.ranks, run.args, rule=rule, slack=slack, num_epochs=NUM_EPOCHS)
    for step in steps:  # behind the first step, at an epoch's end, in mid epoch
        for rank, expected in zip(run.on(step), run.ranks, strict=True):
            assert rank.global_step == expected.global_step == NUM_STEPS
            assert rank.found == expected.found[step:], f"from step {step}"
            assert_same(rank.weights, expected.weights, f"from step {step}")


# ---------------------------------------------------------------------- what is in a file


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1", "lockstep_dp"])
def test_a_file_holds_everything(preset: str, written: Callable[..., Written]) -> None:
    run = written(preset)
    assert_same(run.saved(NUM_STEPS)["state_dict"], run.ranks[0].weights)
    parameters = dict(Classifier(*MODULE).named_parameters())
    for step in range(1, NUM_STEPS + 1):
        saved = run.saved(step)
        state = saved["optimizer_states"][0]["state"]
        assert saved["global_step"] == step
        assert list(state) == list(range(len(parameters)))
        for values, p in zip(state.values(), parameters.values(), strict=True):
            assert values["exp_avg"].shape == values["exp_avg_sq"].shape == p.shape
            assert int(values["step"]) == step


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1"])
def test_the_weights_in_a_file_are_the_newest(
    preset: str, written: Callable[..., Written]
) -> None:
    run = written(preset)
    for step in (1, 2, END, END + 2):
        reference = Reference(rule=WHOLE[preset], n=2, num_batches=NUM_BATCHES, max_steps=step)
        reference.run(Classifier(*MODULE), run.ranks[0].stage_of)
        assert_same(run.saved(step)["state_dict"], reference.weights, f"{step}")


# ---------------------------------------------------------------------- under another strategy


def test_plain_training_goes_on_from_a_file(written: Callable[..., Written]) -> None:
    run = written("cyclic_dp")
    (rank,) = run.on(END, "auto", 1, expects=OTHER_PLAN)
    assert rank.global_step == NUM_STEPS
    assert_same(rank.weights, _plainly(run.saved(END)))


def _plainly(saved: dict[str, Any]) -> dict[str, Any]:
    """Train the last epoch alone, in a loop of its own."""
    module = Classifier(*MODULE)
    parts = module.configure_optimizers()
    optimizer, scheduler = parts["optimizer"], parts["lr_scheduler"]["scheduler"]
    module.load_state_dict(saved["state_dict"])
    optimizer.load_state_dict(saved["optimizer_states"][0])
    scheduler.load_state_dict(saved["lr_schedulers"][0])
    data = MicroBatches(module.kind, NUM_BATCHES)
    for k in range(NUM_BATCHES):
        optimizer.zero_grad()
        module.loss(data[k], k).backward()
        optimizer.step()
        scheduler.step()
    return weights_of(module)


@pytest.mark.parametrize(
    ("of", "n", "preset"), [("ddp", 2, "cyclic_dp"), ("auto", 1, "cyclic_dp_v1")]
)
def test_going_on_from_a_file_of_another_strategy(
    of: str, n: int, preset: str, written: Callable[..., Written]
) -> None:
    run = written(of, n)
    ranks = run.on(END, {"preset": preset, "stages": 4}, 2)
    assert_follows(ranks, MODULE, rule=WHOLE[preset], saved=run.saved(END))


@pytest.mark.parametrize(
    ("n", "other"),
    [(3, {"stages": 4}), (2, {"slack": 2, "stages": 4}), (2, {"preset": "cyclic_dp_v1"})],
    ids=["workers", "slack", "preset"],
)
def test_another_plan_says_so_and_goes_on_from_the_newest_weights(
    n: int, other: dict[str, Any], written: Callable[..., Written]
) -> None:
    run = written("cyclic_dp")
    ranks = run.on(END, other, n, expects=OTHER_PLAN)
    assert any("this run has another plan" in text for text in ranks[0].warned)
    rule, slack = WHOLE[other.get("preset", "cyclic_dp")], other.get("slack", 0)
    assert_follows(ranks, MODULE, rule=rule, slack=slack, saved=run.saved(END))


OLDER = "older versions of weights that are beside them are left"


@pytest.mark.parametrize(
    ("n", "strategy", "text"),
    [
        more(2, {"preset": "lockstep_dp"}, OLDER),
        (2, {"preset": "1f1b"}, OLDER),
        (1, {"preset": "cyclic_dp"}, OLDER),
        (2, "ddp", r"add the following callbacks: .*the strategy of .*newest weights alone"),
    ],
    ids=["lockstep_dp", "1f1b", "one worker", "ddp"],
)
def test_versions_that_are_left_out_are_named(
    n: int, strategy: Any, text: str, written: Callable[..., Written]
) -> None:
    ranks = written("cyclic_dp").on(END, strategy, n, expects=OTHER_PLAN)
    assert re.search(text, "\n".join(ranks[0].warned))
    assert all(rank.global_step == NUM_STEPS for rank in ranks)


def test_nothing_is_said_where_all_versions_are_one(written: Callable[..., Written]) -> None:
    said = "\n".join(written("lockstep_dp").on(END, "ddp", 2, expects=OTHER_PLAN)[0].warned)
    assert "lightning_cyclic" not in said
    assert "was written under" not in said
