"""What users look at: logged values, checkpoint callbacks, early stopping, progress bars."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from tests.harness.rows import in_turn, more
from tests.harness.runs import Result, run, trained
from tests.harness.trainers import assert_same
from tests.modules.classifier import Batch, Classifier, micro_batches
from tests.references.delayed import Chain
from tests.references.delayed import loader as steps

pytestmark = pytest.mark.multi


class Logging(Classifier):
    """Logs its loss in every way."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        both = {"on_step": True, "on_epoch": True}
        self.log("own", loss, **both, prog_bar=True)
        self.log("mean", loss, **both, sync_dist=True)
        self.log("largest", loss, **both, sync_dist=True, reduce_fx="max")
        self.log("epoch_mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class Reading(Callback):
    """Reads the metrics wherever a callback may."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.steps.append(_numbers(trainer.callback_metrics))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append(_numbers(trainer.callback_metrics))


def _numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(x) for name, x in metrics.items()}


def read(trainer: Any, module: Logging) -> dict[str, Any]:
    (reading,) = (c for c in trainer.callbacks if isinstance(c, Reading))
    return vars(reading) | {"losses": module.losses}


def train(
    preset: str, n: int = 2, num_batches: int = 4, optimizer: str = "adamw", **flags: Any
) -> list[Result]:
    flags = {"callbacks": [Reading()], "look": read, "max_epochs": 2} | flags
    return trained(
        partial(Logging, "batchnorm_mlp", optimizer), {"preset": preset}, n,
        data=partial(micro_batches, "vectors", num_batches),
        valid=partial(micro_batches, "vectors", 2, 1), **flags,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("n", "preset"), [(2, "cyclic_dp"), (3, "cyclic_dp_v1"), (2, "lockstep_dp")]
)
def test_logged_values(preset: str, n: int) -> None:
    ranks = [rank.found for rank in train(preset, n)]
    losses = torch.tensor([rank["losses"] for rank in ranks])  # workers x steps
    for rank, own in zip(ranks, losses, strict=True):
        for t, (seen, first) in enumerate(zip(rank["steps"], ranks[0]["steps"], strict=True)):
            assert seen["own_step"] == float(own[t])
            for name in ("mean_step", "largest_step"):
                assert seen[name] == first[name]
            assert seen["largest_step"] == float(losses[:, t].max())
            assert seen["mean_step"] == pytest.approx(float(losses[:, t].mean()))
        for e, (seen, first) in enumerate(zip(rank["epochs"], ranks[0]["epochs"], strict=True)):
            for name in ("mean_epoch", "largest_epoch", "epoch_mean", "val_loss"):
                assert seen[name] == first[name]
            here = losses[:, 4 * e : 4 * e + 4]
            assert seen["epoch_mean"] == pytest.approx(float(here.mean()))
            assert seen["largest_epoch"] == float(here.max())
            assert seen["own_epoch"] == pytest.approx(float(own[4 * e : 4 * e + 4].mean()))


@pytest.mark.parametrize("preset", ["cyclic_dp", more("cyclic_dp_v1"), "lockstep_dp"])
def test_logged_values_while_gradients_accumulate(preset: str) -> None:
    ranks = [rank.found for rank in train(preset, num_batches=5, accumulate_grad_batches=2)]
    losses = torch.tensor([rank["losses"] for rank in ranks])
    for rank in ranks:
        for b in (1, 3, 4, 6, 8, 9):  # where a window closes
            seen = rank["steps"][b]
            assert seen["mean_step"] == ranks[0]["steps"][b]["mean_step"]
            assert seen["mean_step"] == pytest.approx(float(losses[:, b].mean()))
        for e, seen in enumerate(rank["epochs"]):
            assert seen["epoch_mean"] == ranks[0]["epochs"][e]["epoch_mean"]
            assert seen["epoch_mean"] == pytest.approx(float(losses[:, 5 * e : 5 * e + 5].mean()))


# ---------------------------------------------------------------------- hooks of the optimizer


class InHook(Chain):
    """Logs how often one of the optimizer's hooks has run.

    Args:
        hook: its name; "callback" is on_before_optimizer_step of a callback.
    """

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook, self.count = hook, 0

    def note(self, hook: str, log: Any = None) -> None:
        if hook == self.hook:
            self.count += 1
            (log or self.log)("n", float(self.count), on_step=True, on_epoch=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note("on_before_zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step")

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.note("configure_gradient_clipping")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
        optimizer.step(closure)
        self.note("optimizer_step")


class LogsItself(Callback):
    """Logs by a callback's own ``self.log``."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        module.note("callback", self.log)


def seen_by_step(trainer: Any, module: InHook) -> list[float | None]:
    """Return what metrics were behind each step, and at the end."""
    (reading,) = (c for c in trainer.callbacks if isinstance(c, Reading))
    behind = float(trainer.callback_metrics["n"])
    return [*(x.get("n_step") for x in reading.steps), behind]


def logging_in(hook: str, strategy: dict[str, Any]) -> list[Result]:
    callbacks = [Reading(), LogsItself()]
    return run(
        partial(InHook, hook), strategy, data=partial(steps, 2, 3), look=seen_by_step,
        callbacks=callbacks,
    )  # fmt: skip


HOOKS = ["on_before_optimizer_step", "configure_gradient_clipping", "callback"]


@pytest.mark.parametrize(
    ("hook", "preset"),
    [("on_before_zero_grad", "cyclic_pipeline"), ("optimizer_step", "cyclic_zero"),
     ("optimizer_step", "cyclic_pipeline"), ("on_before_optimizer_step", "lockstep_dp"),
     ("configure_gradient_clipping", "1f1b")],
)  # fmt: skip
def test_what_hooks_of_the_optimizer_log_is_of_its_step(hook: str, preset: str) -> None:
    for end in logging_in(hook, {"preset": preset}):
        assert (end.found, end.text) == ([1.0, 2.0, 3.0, 2.0], "")


@pytest.mark.parametrize(
    ("hook", "strategy"),
    [
        *in_turn(HOOKS, [{"preset": p} for p in ("cyclic_dp", "cyclic_zero", "cyclic_pipeline")]),
        (HOOKS[0], {"preset": "cyclic_dp_v1"}),
        (HOOKS[0], {"preset": "lockstep_dp", "stages": 1}),  # which one rank updates alone
    ],
)
def test_what_hooks_of_a_late_update_log_is_refused(hook: str, strategy: dict[str, Any]) -> None:
    name = HOOKS[0] if hook == "callback" else hook
    for end in logging_in(hook, strategy):
        assert f"self.log('n', ...) was called in {name}, which runs when an update" in end.text


# ---------------------------------------------------------------------- callbacks and loggers


def written(trainer: Any, module: Logging) -> dict[str, Any]:
    best, _ = trainer.checkpoint_callbacks
    return {
        "best": best.best_model_path, "last": best.last_model_path,
        "score": float(best.best_model_score), "log": trainer.logger.log_dir,
        "rates": module.rates,
    }  # fmt: skip


def test_checkpoint_callbacks_and_loggers(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_last=True, save_top_k=2,
                           filename="{epoch}-{step}")  # fmt: skip
    often = ModelCheckpoint(tmp_path / "often", every_n_train_steps=3, save_top_k=-1,
                            filename="{step}")  # fmt: skip
    ranks = train(
        "cyclic_dp", max_epochs=3, enable_checkpointing=True, look=written,
        callbacks=[best, often, LearningRateMonitor("step")], log_every_n_steps=1,
        logger=CSVLogger(tmp_path / "logs", flush_logs_every_n_steps=1),
    )  # fmt: skip
    first = ranks[0].found
    for rank in ranks:
        assert rank.found == first
    assert sorted(p.name for p in (tmp_path / "often").iterdir()) == [
        "step=12.ckpt", "step=3.ckpt", "step=6.ckpt", "step=9.ckpt"
    ]  # fmt: skip
    assert Path(first["best"]).is_file()
    assert Path(first["last"]).is_file()
    newest = torch.load(tmp_path / "often" / "step=12.ckpt", weights_only=True)
    assert_same(newest["state_dict"], ranks[0].weights)
    lines = (Path(first["log"]) / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("lr-AdamW")
    rates = [line.split(",")[column] for line in lines[1:] if line.split(",")[column]]
    assert [float(rate) for rate in rates] == pytest.approx(first["rates"])


def stopped(trainer: Any, module: Any) -> tuple[int, int]:
    return trainer.current_epoch, trainer.early_stopping_callback.stopped_epoch


@pytest.mark.parametrize(
    ("preset", "monitor"),
    [("cyclic_dp", "val_loss"), ("cyclic_dp_v1", "mean_epoch"), more("lockstep_dp", "val_loss")],
)
def test_all_ranks_stop_early_together(preset: str, monitor: str) -> None:
    stopping = EarlyStopping(monitor, mode="max", patience=1)  # a loss: it soon gets "worse"
    ranks = train(preset, 2, 3, "sgd", max_epochs=20, callbacks=[stopping], look=stopped)
    assert 0 < ranks[0].found[0] < 20
    for rank in ranks:
        assert (rank.found, rank.global_step) == (ranks[0].found, ranks[0].global_step)
        assert_same(rank.weights, ranks[0].weights)
