"""Checkpoints: plain files that go on with the same bits, and that every strategy can load."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.harness import processes
from tests.harness.rows import in_turn, more
from tests.harness.trainers import assert_same, fit, make_trainer, outcome, train_data, valid_data
from tests.modules.classifier import Classifier
from tests.references.replicated import Reference

pytestmark = pytest.mark.multi

ONE_MORE = pytest.mark.exhaustive  # case of what the other rows show
RULES = {
    "cyclic_dp": "freshest", "cyclic_zero": "freshest", "cyclic_dp_v1": "delayed",
    "lockstep_dp": "sync",
}  # fmt: skip
NUM_BATCHES, NUM_EPOCHS = 5, 3  # 15 steps


def train(
    module_args: tuple[str, str],
    strategy: Any,
    folder: Path | None = None,
    ckpt_path: Path | None = None,
    max_epochs: int = NUM_EPOCHS,
    **flags: Any,
) -> dict[str, Any]:
    """Train, with a checkpoint of every step if a folder is given, or from one."""
    module = Classifier(*module_args)
    if ckpt_path is not None:
        for p in module.parameters():
            p.data.zero_()  # so that all must come from the file
    callbacks = []
    if folder is not None:
        callbacks = [ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1,
                                     filename="{step}", save_last=False)]  # fmt: skip
    trainer = make_trainer(
        strategy, max_epochs=max_epochs, enable_checkpointing=folder is not None,
        callbacks=callbacks, **flags,
    )  # fmt: skip
    trainer.fit(module, train_data(module, NUM_BATCHES), valid_data(module), ckpt_path=ckpt_path)
    return outcome(trainer, module)


def resume(module_args: tuple[str, str], strategy: Any, ckpt_path: Path) -> dict[str, Any]:
    """Go on from a checkpoint."""
    return train(module_args, strategy, ckpt_path=ckpt_path)


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("n", "net", "optimizer", "preset", "slack", "stages"),
    [
        (2, "batchnorm_mlp", "sgd", "cyclic_dp", 0, 4),
        pytest.param(2, "batchnorm_mlp", "adamw", "cyclic_dp_v1", 0, 4, marks=ONE_MORE),
        pytest.param(2, "mlp", "adamw", "cyclic_dp", 2, 8, marks=ONE_MORE),
        pytest.param(4, "resnet", "sgd", "cyclic_dp", 0, 4, marks=ONE_MORE),
        pytest.param(4, "batchnorm_mlp", "adamw", "cyclic_dp", 2, 8, marks=ONE_MORE),
        pytest.param(4, "mlp", "sgd", "cyclic_dp_v1", 0, 4, marks=ONE_MORE),
        pytest.param(2, "batchnorm_mlp", "adamw", "cyclic_zero", 0, 4, marks=ONE_MORE),
        (3, "resnet", "sgd", "cyclic_zero", 2, 3),
        more(2, "batchnorm_mlp", "adamw", "lockstep_dp", 0, 4),
        (1, "mlp", "adamw", "cyclic_dp_v1", 0, 4),
        (4, "mlp", "counting", "cyclic_dp", 0, 2),  # two workers update nothing, and count nothing
    ],
)
def test_stop_anywhere_and_go_on_with_the_same_bits(
    n: int, net: str, optimizer: str, preset: str, slack: int, stages: int, tmp_path: Path
) -> None:
    args, strategy = (net, optimizer), {"preset": preset, "slack": slack, "stages": stages}
    whole = processes.run(train, n, args, strategy, tmp_path)
    run = Reference(rule=RULES[preset], slack=slack, n=n, num_batches=NUM_BATCHES,
                    num_epochs=NUM_EPOCHS)  # fmt: skip
    run.run(Classifier(*args), whole[0]["stage_of"]).compare(whole)  # writing changed nothing
    for step in (1, 5, 9):  # behind the first step, at an epoch's end, in mid epoch
        resumed = processes.run(resume, n, args, strategy, tmp_path / f"step={step}.ckpt")
        for rank, expected in zip(resumed, whole, strict=True):
            assert rank["global_step"] == expected["global_step"]
            assert rank["losses"] == expected["losses"][step:], f"from step {step}"
            assert_same(rank["weights"], expected["weights"], f"from step {step}")


@pytest.mark.parametrize(
    ("n", "preset"), in_turn([2, 4], ["cyclic_dp", "cyclic_dp_v1", "lockstep_dp"])
)
def test_a_file_holds_everything(n: int, preset: str, tmp_path: Path) -> None:
    args, strategy = ("batchnorm_mlp", "adamw"), {"preset": preset, "stages": 4}
    ranks = processes.run(train, n, args, strategy, tmp_path)
    saved = load(tmp_path / "step=15.ckpt")
    assert_same(saved["state_dict"], ranks[0]["weights"])
    parameters = dict(Classifier(*args).named_parameters())
    state = saved["optimizer_states"][0]["state"]
    assert list(state) == list(range(len(parameters)))
    for values, p in zip(state.values(), parameters.values(), strict=True):
        assert values["exp_avg"].shape == values["exp_avg_sq"].shape == p.shape
        assert int(values["step"]) == 15
    every_step = [load(tmp_path / f"step={k}.ckpt") for k in range(1, 16)]
    for k, each in enumerate(every_step, start=1):
        assert all(int(x["step"]) == k for x in each["optimizer_states"][0]["state"].values())
    assert saved["global_step"] == 15


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1"])
def test_the_weights_in_a_file_are_the_newest(preset: str, tmp_path: Path) -> None:
    args, strategy = ("batchnorm_mlp", "sgd"), {"preset": preset, "stages": 4}
    ranks = processes.run(train, 2, args, strategy, tmp_path)
    for step in (1, 2, 7, 10):
        run = Reference(rule=RULES[preset], n=2, num_batches=NUM_BATCHES, max_steps=step)
        run.run(Classifier(*args), ranks[0]["stage_of"])
        assert_same(load(tmp_path / f"step={step}.ckpt")["state_dict"], run.weights, f"{step}")


@pytest.mark.parametrize(
    ("preset", "n", "strategy"), in_turn(["cyclic_dp", "cyclic_dp_v1"], [(1, "auto"), (2, "ddp")])
)
def test_other_strategies_go_on_from_a_file(
    preset: str, n: int, strategy: str, tmp_path: Path
) -> None:
    args = ("mlp", "adamw")
    processes.run(train, 2, args, {"preset": preset, "stages": 4}, tmp_path)
    resumed = processes.run(resume, n, args, strategy, tmp_path / "step=10.ckpt")
    # what goes on is plain training from the file's weights and optimizer state
    saved = load(tmp_path / "step=10.ckpt")
    assert all(rank["global_step"] == 15 for rank in resumed)
    if n == 1:
        assert_same(resumed[0]["weights"], _plainly(args, saved))


def _plainly(args: tuple[str, str], saved: dict[str, Any]) -> dict[str, Any]:
    """Train the last epoch alone, in a loop of its own."""
    from tests.harness.trainers import weights_of
    from tests.modules.classifier import MicroBatches

    module = Classifier(*args)
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
    ("preset", "n", "strategy"), in_turn(["cyclic_dp", "cyclic_dp_v1"], [(2, "ddp"), (1, "auto")])
)
def test_going_on_from_a_file_of_another_strategy(
    preset: str, n: int, strategy: str, tmp_path: Path
) -> None:
    args = ("mlp", "adamw")
    processes.run(train, n, args, strategy, tmp_path)
    path = tmp_path / "step=10.ckpt"
    resumed = processes.run(resume, 2, args, {"preset": preset, "stages": 4}, path)
    saved = load(path)
    run = Reference(rule=RULES[preset], n=2, num_batches=NUM_BATCHES, saved=saved)
    run.run(Classifier(*args), resumed[0]["stage_of"]).compare(resumed)


@pytest.mark.parametrize(
    ("n", "other"),
    [(4, {"stages": 4}), (2, {"slack": 2, "stages": 4}), (2, {"preset": "cyclic_dp_v1"})],
    ids=["workers", "slack", "preset"],
)
def test_another_plan_says_so_and_goes_on_from_the_newest_weights(
    n: int, other: dict[str, Any], tmp_path: Path
) -> None:
    args = ("mlp", "adamw")
    processes.run(train, 2, args, {"stages": 4}, tmp_path)
    path = tmp_path / "step=10.ckpt"
    resumed = processes.run(resume_warned, n, args, other, path)
    assert "this run has another plan" in resumed[0]["warning"]
    assert all(rank["global_step"] == 15 for rank in resumed)
    rule = RULES[other.get("preset", "cyclic_dp")]
    run = Reference(rule=rule, slack=other.get("slack", 0), n=n, num_batches=NUM_BATCHES,
                    saved=load(path))  # fmt: skip
    run.run(Classifier(*args), resumed[0]["stage_of"]).compare(resumed)


@pytest.mark.parametrize(
    ("n", "strategy", "text"),
    [
        (2, {"preset": "lockstep_dp"}, "older versions of weights that are beside them are left"),
        (2, {"preset": "1f1b"}, "older versions of weights that are beside them are left"),
        (1, {"preset": "cyclic_dp"}, "older versions of weights that are beside them are left"),
        (2, "ddp", r"add the following callbacks: .*the strategy of .*newest weights alone"),
    ],
    ids=["lockstep_dp", "1f1b", "one worker", "ddp"],
)
def test_versions_that_are_left_out_are_named(
    n: int, strategy: Any, text: str, tmp_path: Path
) -> None:
    args = ("mlp", "adamw")
    processes.run(train, 2, args, {"preset": "cyclic_dp", "stages": 4}, tmp_path)
    resumed = processes.run(resume_warned, n, args, strategy, tmp_path / "step=10.ckpt")
    assert re.search(text, resumed[0]["warning"])
    assert all(rank["global_step"] == 15 for rank in resumed)


def test_nothing_is_said_where_all_versions_are_one(tmp_path: Path) -> None:
    args = ("mlp", "adamw")
    processes.run(train, 2, args, {"preset": "lockstep_dp"}, tmp_path)
    resumed = processes.run(resume_warned, 2, args, "ddp", tmp_path / "step=10.ckpt")
    assert "lightning_cyclic" not in resumed[0]["warning"]
    assert "was written under" not in resumed[0]["warning"]


def resume_warned(*args: Any) -> dict[str, Any]:
    """Go on from a checkpoint; return what was warned of, too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=r"The checkpoint was written under")
        warnings.filterwarnings("always", message=r"Be aware that when using `ckpt_path`")
        resumed = resume(*args)
    return resumed | {"warning": "\n".join(str(each.message) for each in caught)}


@pytest.mark.parametrize("preset", ["cyclic_dp", more("cyclic_dp_v1")])
def test_writing_in_mid_epoch_changes_no_numbers(preset: str, tmp_path: Path) -> None:
    args, strategy = ("resnet", "adamw"), {"preset": preset, "stages": 8}
    writing = processes.run(train, 2, args, strategy, tmp_path)
    silent = processes.run(fit, 2, partial(Classifier, *args), strategy, NUM_BATCHES,
                           {"max_epochs": NUM_EPOCHS})  # fmt: skip
    for rank, same in zip(writing, silent, strict=True):
        assert rank["losses"] == same["losses"]
        assert_same(rank["weights"], same["weights"])
