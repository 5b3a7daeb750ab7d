"""Batches that are added up where weights are sharded: each is a round of the plan.

The bits are those of replicas, which add them up beside a plan of one round, so that one mechanism
is the other's oracle; those of the rule are in test_schedules.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.conformance.harness import Batches
from tests.conformance.modules import CLASSES, SIZE, Plain, vectors
from tests.harness import processes
from tests.harness.rows import more
from tests.harness.trainers import assert_same, make_trainer, weights_of
from tests.modules.classifier import Resumable

pytestmark = pytest.mark.multi


class Dropping(Plain):
    """Draws, logs a value that is reduced, and has BatchNorm in its second stage if it is asked.

    Args:
        normalises: whether it has.
    """

    def __init__(self, normalises: bool = False) -> None:
        self.normalises = normalises
        super().__init__()
        self.totals: list[float] = []

    def make_net(self) -> nn.Module:
        between = nn.BatchNorm1d(SIZE) if self.normalises else nn.Tanh()
        return nn.Sequential(
            nn.Linear(SIZE, SIZE), nn.Dropout(0.3), nn.Linear(SIZE, SIZE), between,
            nn.Dropout(0.2), nn.Linear(SIZE, CLASSES),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.totals.append(float(self.trainer.callback_metrics["loss"]))


class Looks(Callback):
    """Meets all workers behind each step, and sees what validation finds."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            assert trainer.strategy.broadcast(trainer.global_step) == trainer.global_step

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen += [float(p.detach().double().sum()) for p in pl_module.parameters()]


def batches(num: int = 6) -> DataLoader[Any]:
    here = processes.here()
    groups = [[here.num_ranks * t + here.rank] for t in range(num)]
    return DataLoader(Batches(vectors, groups), batch_size=None)


BY_VALUE = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
BY_STAGE = {"gradient_clip_val": 0.1, "clip_norm": "stage"}


def fit_dropping(preset: str, flags: dict[str, Any]) -> dict[str, Any]:
    looks, flags = Looks(), dict(flags)
    strategy = {"preset": preset, "stages": ["net.2"]}
    if clip := flags.pop("clip_norm", None):
        strategy["clip_norm"] = clip
    module = Dropping()
    trainer = make_trainer(
        strategy, **({"max_epochs": 2, "accumulate_grad_batches": 2, "callbacks": [looks]} | flags)
    )
    trainer.fit(module, batches(), batches(2))
    return {
        "weights": weights_of(module), "seen": looks.seen, "totals": module.totals,
        "global_step": trainer.global_step,
    }  # fmt: skip


@pytest.mark.parametrize(
    "flags", [BY_VALUE, BY_STAGE | {"val_check_interval": 2}], ids=["value", "stage"]
)
def test_draws_values_that_are_reduced_and_flags(flags: dict[str, Any]) -> None:
    whole = processes.run(fit_dropping, 2, "cyclic_dp", flags, time_limit_s=40)
    apart = processes.run(fit_dropping, 2, "cyclic_zero", flags, time_limit_s=40)
    for one, other in zip(apart, whole, strict=True):
        assert_same(one.pop("weights"), other.pop("weights"))
        assert one == other
        assert one["seen"]


def go_on(preset: str, folder: str, resumed: bool) -> dict[str, Any]:
    module = Dropping(normalises=True)
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = make_trainer(
        {"preset": preset, "stages": ["net.2"], "slack": 2}, max_epochs=2, callbacks=[saver],
        enable_checkpointing=True, accumulate_grad_batches=2,
    )  # fmt: skip
    # of three steps of an epoch, the last has one batch
    data = Resumable(batches(5).dataset, batch_size=None)
    trainer.fit(module, data, ckpt_path=str(Path(folder, "step=2.ckpt")) if resumed else None)
    return weights_of(module)


@pytest.mark.parametrize(
    ("wrote", "reads"), [("cyclic_dp", "cyclic_zero"), ("cyclic_zero", "cyclic_dp")]
)
def test_each_goes_on_from_checkpoints_of_the_other(
    wrote: str, reads: str, tmp_path: Path
) -> None:
    unbroken = processes.run(go_on, 2, wrote, str(tmp_path), False, time_limit_s=40)
    for rank in processes.run(go_on, 2, reads, str(tmp_path), True, time_limit_s=40):
        assert_same(rank, unbroken[0])


# ---------------------------------------------------------------------- refused by name


class Stream(IterableDataset[Any]):
    """Batches whose number is not known before they end.

    Args:
        num: of them.
    """

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[Any]:
        here = processes.here()
        return (vectors(here.num_ranks * t + here.rank) for t in range(self.num))


class Stops(Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, out: Any, batch: Any, k: int
    ) -> None:
        trainer.should_stop = k == 2


class Saves(Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, out: Any, batch: Any, k: int
    ) -> None:
        if k == 2:
            trainer.save_checkpoint("never.ckpt")


class Skips(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


class Widens(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.accumulate_grad_batches = 3


def attempt(preset: str, what: str) -> str:
    module = {"skips": Skips, "widens": Widens}.get(what, Plain)()
    made = {"stops": [Stops()], "saves": [Saves()]}.get(what, [])
    own = processes.here().rank + 2 if what == "differs" else 2
    length = {"no length": 6, "short": 5}.get(what)
    data = batches() if length is None else DataLoader(Stream(length), batch_size=None)
    more = {"val_check_interval": 3} if what == "validates" else {}
    more |= {"limit_train_batches": 6} if what == "short" else {}
    more |= {"max_time": "00:01:00:00"} if what == "is timed" else {}
    trainer = make_trainer(
        {"preset": preset, "stages": ["net.2"]}, max_epochs=1, callbacks=made,
        accumulate_grad_batches=own, num_sanity_val_steps=0, **more,
    )  # fmt: skip
    try:
        trainer.fit(module, data, batches(2) if what == "validates" else None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{trainer.global_step} steps"


MIDDLE = "StepError: validation, a checkpoint or the end of an epoch came behind 1 of the batches"
PLANNED = "but it was to have 2"
TIMED = "StepError: broadcast waits for all workers, but was called behind"


@pytest.mark.parametrize(
    ("preset", "what", "said"),
    [
        ("cyclic_dp", "validates", MIDDLE), ("cyclic_zero", "stops", MIDDLE),
        ("cyclic_dp", "saves", MIDDLE), more("cyclic_zero", "skips", MIDDLE),
        ("cyclic_zero", "short", MIDDLE),
        more("cyclic_dp", "is timed", TIMED), ("cyclic_zero", "is timed", TIMED),
        ("cyclic_zero", "no length", "ConfigurationError: accumulate_grad_batches"),
        ("cyclic_zero", "widens", PLANNED),
        ("cyclic_zero", "differs", "ranks have different accumulate_grad_batches"),
        ("cyclic_dp", "no length", "3 steps"),
    ],
    ids=lambda x: x if " " not in x or len(x) < 12 else "",
)  # fmt: skip
def test_what_nobody_can_know_or_leave_in_its_middle(preset: str, what: str, said: str) -> None:
    texts = processes.run(attempt, 2, preset, what, time_limit_s=40, after_failure_s=20)
    assert any(text.startswith(said) or said in text for text in texts), texts
    if "steps" not in said:  # who is not the first to say so has heard of it
        assert all("Error: " in text for text in texts), texts
