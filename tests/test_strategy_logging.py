"""What users look at: logged values, checkpoint callbacks, early stopping, progress bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_cyclic.errors import CyclicError
from tests.harness import processes
from tests.harness.rows import in_turn
from tests.harness.trainers import assert_same, make_trainer, outcome, train_data, valid_data
from tests.modules.classifier import Batch, Classifier
from tests.references.delayed import Chain
from tests.references.delayed import loader as steps

pytestmark = pytest.mark.multi

PRESETS = ["cyclic_dp", "cyclic_dp_v1", "lockstep_dp"]


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


def fit_logging(preset: str, num_batches: int, accumulate: int) -> dict[str, Any]:
    module, reading = Logging("batchnorm_mlp"), Reading()
    flags = {"callbacks": [reading], "accumulate_grad_batches": accumulate}
    trainer = make_trainer(preset, max_epochs=2, **flags)
    trainer.fit(module, train_data(module, num_batches), valid_data(module))
    return outcome(trainer, module) | {"steps": reading.steps, "epochs": reading.epochs}


@pytest.mark.parametrize(("n", "preset"), in_turn([2, 4], PRESETS))
def test_logged_values(preset: str, n: int) -> None:
    ranks = processes.run(fit_logging, n, preset, 4, 1)
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


@pytest.mark.parametrize("preset", PRESETS)
def test_logged_values_while_gradients_accumulate(preset: str) -> None:
    ranks = processes.run(fit_logging, 2, preset, 5, 2)
    losses = torch.tensor([rank["losses"] for rank in ranks])
    for rank in ranks:
        for b in (1, 3, 4, 6, 8, 9):  # where a window closes
            seen = rank["steps"][b]
            assert seen["mean_step"] == ranks[0]["steps"][b]["mean_step"]
            assert seen["mean_step"] == pytest.approx(float(losses[:, b].mean()))
        for e, seen in enumerate(rank["epochs"]):
            assert seen["epoch_mean"] == ranks[0]["epochs"][e]["epoch_mean"]
            assert seen["epoch_mean"] == pytest.approx(float(losses[:, 5 * e : 5 * e + 5].mean()))


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


def fit_logging_in(hook: str, strategy: dict[str, Any]) -> tuple[list[Any], str]:
    """Return what metrics were behind each step and at the end, and with what the fit failed."""
    reading, module = Reading(), InHook(hook)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[reading, LogsItself()])
    try:
        trainer.fit(module, steps(2, 3))
    except CyclicError as error:
        return [], str(error)
    return [*(x.get("n_step") for x in reading.steps), _numbers(trainer.callback_metrics)["n"]], ""


HOOKS = ["on_before_optimizer_step", "configure_gradient_clipping", "callback"]


@pytest.mark.parametrize(
    ("hook", "preset"),
    [("on_before_zero_grad", "cyclic_pipeline"), ("optimizer_step", "cyclic_zero"),
     ("optimizer_step", "cyclic_pipeline"), ("on_before_optimizer_step", "lockstep_dp"),
     ("configure_gradient_clipping", "1f1b")],
)  # fmt: skip
def test_what_hooks_of_the_optimizer_log_is_of_its_step(hook: str, preset: str) -> None:
    for seen, error in processes.run(fit_logging_in, 2, hook, {"preset": preset}):
        assert (seen, error) == ([1.0, 2.0, 3.0, 2.0], "")


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
    for seen, error in processes.run(fit_logging_in, 2, hook, strategy):
        assert seen == []
        assert f"self.log('n', ...) was called in {name}, which runs when an update" in error


def fit_with_checkpoints(preset: str, folder: Path) -> dict[str, Any]:
    module = Logging("batchnorm_mlp", "adamw")
    best = ModelCheckpoint(folder / "best", monitor="val_loss", save_last=True, save_top_k=2,
                           filename="{epoch}-{step}")  # fmt: skip
    often = ModelCheckpoint(folder / "often", every_n_train_steps=3, save_top_k=-1,
                            filename="{step}")  # fmt: skip
    rates = LearningRateMonitor("step")
    trainer = make_trainer(
        preset, max_epochs=3, enable_checkpointing=True, callbacks=[best, often, rates],
        logger=CSVLogger(folder / "logs", flush_logs_every_n_steps=1), log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, train_data(module, 4), valid_data(module))
    return outcome(trainer, module) | {
        "best": best.best_model_path, "last": best.last_model_path,
        "score": float(best.best_model_score), "log": trainer.logger.log_dir,
    }  # fmt: skip


def fit_plainly(preset: str) -> dict[str, Any]:
    module = Logging("batchnorm_mlp", "adamw")
    trainer = make_trainer(preset, max_epochs=3)
    trainer.fit(module, train_data(module, 4), valid_data(module))
    return outcome(trainer, module)


@pytest.mark.parametrize("preset", PRESETS[:1])
def test_checkpoint_callbacks_and_loggers(preset: str, tmp_path: Path) -> None:
    ranks = processes.run(fit_with_checkpoints, 2, preset, tmp_path)
    for rank in ranks:
        for what in ("best", "last", "score", "log"):
            assert rank[what] == ranks[0][what]
    assert sorted(p.name for p in (tmp_path / "often").iterdir()) == [
        "step=12.ckpt", "step=3.ckpt", "step=6.ckpt", "step=9.ckpt"
    ]  # fmt: skip
    assert Path(ranks[0]["best"]).is_file()
    assert Path(ranks[0]["last"]).is_file()
    newest = torch.load(tmp_path / "often" / "step=12.ckpt", weights_only=True)
    assert_same(newest["state_dict"], ranks[0]["weights"])
    lines = (Path(ranks[0]["log"]) / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("lr-AdamW")
    rates = [line.split(",")[column] for line in lines[1:] if line.split(",")[column]]
    assert [float(rate) for rate in rates] == pytest.approx(ranks[0]["rates"])
    plain = processes.run(fit_plainly, 2, preset)
    for rank, same in zip(ranks, plain, strict=True):  # writing changes no numbers
        assert rank["losses"] == same["losses"]
        assert_same(rank["weights"], same["weights"])


def fit_until_it_stops(preset: str, monitor: str) -> dict[str, Any]:
    module = Logging("mlp")
    stopping = EarlyStopping(monitor, mode="max", patience=1)  # a loss: it soon gets "worse"
    trainer = make_trainer(preset, max_epochs=20, callbacks=[stopping])
    trainer.fit(module, train_data(module, 3), valid_data(module))
    return outcome(trainer, module) | {"stopped": stopping.stopped_epoch}


@pytest.mark.parametrize(("preset", "monitor"), in_turn(PRESETS, ["val_loss", "mean_epoch"]))
def test_early_stopping(preset: str, monitor: str) -> None:
    ranks = processes.run(fit_until_it_stops, 2, preset, monitor)
    assert 0 < ranks[0]["epoch"] < 20
    for rank in ranks:
        for what in ("epoch", "stopped", "global_step"):
            assert rank[what] == ranks[0][what]
        assert_same(rank["weights"], ranks[0]["weights"])
