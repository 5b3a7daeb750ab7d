"""Learning rates are foretold as schedulers then give them, and nothing is disturbed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader

from lightning_cyclic.plugin.future_rates import Outlook

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.* is deprecated"),
]

FURTHEST, NUM_STEPS = 4, 12


def in_sequence(optimizer: Any) -> Any:
    first = schedulers.LinearLR(optimizer, 0.1, total_iters=3)
    then = schedulers.CosineAnnealingLR(optimizer, T_max=9)
    return schedulers.SequentialLR(optimizer, [first, then], milestones=[4])


def chained(optimizer: Any) -> Any:
    both = [schedulers.StepLR(optimizer, 3, 0.5), schedulers.ExponentialLR(optimizer, 0.9)]
    return schedulers.ChainedScheduler(both, optimizer)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, [lambda t: 1 / (t + 1), lambda t: t + 1.0]),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda t: 0.9),
    "step": lambda o: schedulers.StepLR(o, 3, 0.5),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 7),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: schedulers.OneCycleLR(o, [0.1, 0.2], total_steps=20),
    "cycle": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 8),
    "sequence": in_sequence,
    "chain": chained,
}


class Module(LightningModule):
    """Two layers, in groups of their own."""

    def __init__(self, make: Callable[[Any], Any], **config: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)
        self.make, self.config = make, config

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.second(self.first(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        groups = [{"params": m.parameters(), "lr": lr} for m, lr in self.parts()]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        config = {"scheduler": self.make(optimizer), "interval": "step"} | self.config
        return {"optimizer": optimizer, "lr_scheduler": config}

    def parts(self) -> list[tuple[nn.Module, float]]:
        return [(self.first, 0.1), (self.second, 0.3)]


class Stepping(Module):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


class Watcher(Callback):
    """Foretells in every step, and notes what came."""

    def __init__(self) -> None:
        self.outlook: Any = None
        self.foretold: list[list[list[float]]] = []
        self.came: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.outlook is None:
            self.outlook = Outlook(trainer, FURTHEST)
        before = repr(trainer.lr_scheduler_configs[0].scheduler.state_dict())
        self.came.append([group["lr"] for group in optimizer.param_groups])
        t = len(self.came) - 1
        self.outlook.remember(t)
        self.foretold.append(self.outlook.rows(t, FURTHEST))
        assert repr(trainer.lr_scheduler_configs[0].scheduler.state_dict()) == before
        assert self.came[-1] == [group["lr"] for group in optimizer.param_groups]


def train(module: Module, num_epochs: int = 2) -> Watcher:
    watcher = Watcher()
    trainer = Trainer(
        accelerator="cpu", max_epochs=num_epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watcher],
        limit_train_batches=NUM_STEPS // num_epochs, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randn(NUM_STEPS, 3), batch_size=1))
    assert len(watcher.came) == NUM_STEPS
    return watcher


@pytest.mark.parametrize("frequency", [1, 2])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_is_foretold_comes(name: str, frequency: int) -> None:
    watcher = train(Module(SCHEDULERS[name], frequency=frequency))
    for t, rows in enumerate(watcher.foretold):
        assert rows[: NUM_STEPS - 1 - t] == watcher.came[t + 1 : t + 1 + FURTHEST]
    assert len({tuple(row) for row in watcher.came}) > 1  # or nothing was to be foretold


def test_no_more_is_asked_than_was_given() -> None:
    watcher = train(Module(SCHEDULERS["step"]))
    outlook = watcher.outlook
    assert outlook.rows(NUM_STEPS - 1, 2) == watcher.foretold[-1][:2]
    assert outlook.rows(NUM_STEPS - 2 - FURTHEST, 1) is None
    other = Outlook(None, FURTHEST)  # type: ignore[arg-type]
    other.put_state(7, outlook.state(NUM_STEPS - 1))
    assert other.rows(7, FURTHEST) == watcher.foretold[-1]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            Module(
                lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=10.0),
                monitor="loss", interval="step",
            ),
            "ReduceLROnPlateau needs a metric",
        ),
        (Stepping(SCHEDULERS["step"]), r"Stepping.lr_scheduler_step may need more"),
        (Module(SCHEDULERS["step"], interval="epoch"), "has no scheduler that moves with each"),
    ],
)  # fmt: skip
def test_what_cannot_be_foretold_stays_and_is_said_once(module: Module, text: str) -> None:
    with pytest.warns(UserWarning, match=text) as said:
        watcher = train(module)
    assert sum("lookahead_lrs" in str(w.message) for w in said) == 1
    for rows, came in zip(watcher.foretold, watcher.came, strict=True):
        assert rows == [came] * FURTHEST
