"""One device cuts its batches: all else is as Lightning has it, and it keeps less activations."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic.plan import make_plan, programs_of
from lightning_cyclic.plan.dataflow import live_activations
from tests.harness import processes
from tests.harness.rows import more
from tests.harness.trainers import Said, assert_same, make_trainer, weights_of

pytestmark = pytest.mark.multi
NUM_STEPS = 5


class Skipping(LightningModule):
    """Gives no loss for micro-batches whose first number says so, and counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.steps = 0
        self.outputs: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.steps += 1
        loss = self.net(batch).square().mean()
        self.log("seen", loss)
        return None if batch[0, 0] < 0 else {"loss": loss, "rows": batch.sum(1)}

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def micro_batches(skipped: set[int]) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    data = list(torch.rand(2 * NUM_STEPS, 3, 4, generator=g))
    for k in skipped:
        data[k][0, 0] = -1
    return data


def fit(skipped: set[int], is_cut: bool, accumulate: int = 1) -> dict[str, Any]:
    module, data = Skipping(), micro_batches(skipped)
    if is_cut:
        batches = [torch.cat(data[2 * t : 2 * t + 2]) for t in range(NUM_STEPS)]
        strategy: Any = {"preset": "1f1b", "num_microbatches": 2}
    else:
        batches, strategy, accumulate = data, "auto", 2 * accumulate
    trainer = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return {
        "weights": weights_of(module), "steps": module.steps, "outputs": module.outputs,
        "global_step": trainer.global_step, "seen": float(trainer.callback_metrics["seen"]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("skipped", "accumulate"),
    [({1}, 1), (set(), 2), ({0, 5}, 1), ({2, 3}, 2), ({8, 9}, 1), ({0, 1, 2, 3, 8}, 2)],
    ids=str,
)
def test_steps_without_a_loss_are_skipped_as_on_one_device(
    skipped: set[int], accumulate: int
) -> None:
    (plain,) = processes.run(fit, 1, skipped, False, accumulate)
    (cut,) = processes.run(fit, 1, skipped, True, accumulate)
    assert_same(cut["weights"], plain["weights"])
    assert cut["global_step"] == plain["global_step"]
    assert cut["steps"] == plain["steps"] == 2 * NUM_STEPS  # none of them to look at the module
    for t, outputs in enumerate(cut["outputs"]):
        halves = [plain["outputs"][k] for k in (2 * t, 2 * t + 1) if k not in skipped]
        if not halves:
            assert outputs == {}  # as Lightning says it of a batch that is skipped
        else:
            assert torch.equal(outputs["rows"], torch.cat([half["rows"] for half in halves]))


class Texts(Skipping):
    """Takes texts, which cannot be cut."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(torch.tensor([[len(text)] * 4 for text in batch]) / 9, 0)


def fit_texts(strategy: Any) -> tuple[int, dict[str, Tensor], list[str]]:
    module = Texts()
    data = DataLoader([["a cat", "a dog", "two"]] * NUM_STEPS, batch_size=None)  # type: ignore[arg-type]
    trainer, said = make_trainer(strategy, max_epochs=1), Said()
    trainer.fit(module, data)
    return module.steps, weights_of(module), [s for s in said.lines if "not cut into" in s]


def test_a_batch_that_cannot_be_cut_is_one_micro_batch() -> None:
    (plain,) = processes.run(fit_texts, 1, "auto")
    (whole,) = processes.run(fit_texts, 1, {"preset": "gpipe", "num_microbatches": 3})
    assert plain[0] == whole[0] == NUM_STEPS
    assert_same(whole[1], plain[1])
    assert len(whole[2]) == 1


def connect(preset: str) -> bool:
    trainer, module = make_trainer({"preset": preset}), Skipping()
    trainer.strategy.connect(module)
    return trainer.lightning_module is module


@pytest.mark.parametrize("preset", ["cyclic_dp", "1f1b"])
def test_a_module_may_be_connected_by_hand(preset: str) -> None:
    assert processes.run(connect, 1, preset) == [True]


# ---------------------------------------------------------------------- memory


ROWS, WIDTH = 7, 12


class Uniform(LightningModule):
    """Counts the bytes that autograd keeps for backwards, and their peak."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        layers = [x for _ in range(num_layers) for x in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.net = nn.Sequential(*layers)
        self.meter = Meter()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def _keep(self, x: Tensor) -> Kept:
        kept = Kept(x)
        if x.shape[0] != ROWS:  # weights; activations have a row per sample
            return kept
        self.meter.add(x.nbytes)
        weakref.finalize(kept, self.meter.drop, x.nbytes)
        return kept


class Meter:
    """Count bytes that come and go, also behind the step: no state of the module."""

    alive = peak = 0

    def add(self, size: int) -> None:
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def drop(self, size: int) -> None:
        self.alive -= size


class Kept:
    """Stand for a tensor that autograd keeps."""

    def __init__(self, x: Tensor) -> None:
        self.tensor = x


def peak_of(preset: str, num: int) -> int:
    module = Uniform(2 * num)
    stages = [f"net.{4 * j}" for j in range(1, num)]
    strategy = {"preset": preset, "num_microbatches": num, "stages": stages, "verify": False}
    rows: Any = [torch.ones(num * ROWS, WIDTH) for _ in range(4)]
    make_trainer(strategy, max_epochs=1).fit(module, DataLoader(rows, batch_size=None))
    assert module.meter.alive == 0
    return module.meter.peak


@pytest.mark.parametrize("num", [more(2), 4, more(8)])
def test_activation_memory_is_that_of_the_timetable(num: int) -> None:
    (cyclic,) = processes.run(peak_of, 1, "cyclic_dp", num)
    (at_once,) = processes.run(peak_of, 1, "gpipe", num)
    given = cyclic / at_once
    assert given <= 1.05 * (num + 1) / (2 * num)  # with slots of equal length
    # one device runs the actions of a slot one after another, and so frees some earlier
    plan = make_plan(
        "cyclic_dp", placement="single", num_stages=num, num_workers=1, num_microbatches=num
    )
    alive = live_activations(programs_of(plan)[0])
    assert given == pytest.approx(alive / num**2, rel=0.05)
