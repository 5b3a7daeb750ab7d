"""MemoryTimeline on one device: what it writes, what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

from lightning_cyclic import ConfigurationError, MemoryTimeline
from lightning_cyclic.runtime.memory_blocks import KINDS
from tests.harness.trainers import assert_same, weights_of
from tests.references import pruned as t

pytestmark = t.PLAIN_LIGHTNING
WIDTH, ROWS = 12, 8


class Mlp(LightningModule):
    """Fails, or leaves its epoch, in a step."""

    def __init__(self, fails: int = -1, leaves: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 1)
        )
        self.fails, self.leaves = fails, leaves

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.leaves else None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.fails:
            raise ValueError("its reason")
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(*timelines: MemoryTimeline, module: LightningModule | None = None, **flags: Any) -> Any:
    module = module or Mlp()
    quiet = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1,
    }  # fmt: skip
    trainer = Trainer(callbacks=[*timelines], **(quiet | flags))
    g = torch.Generator().manual_seed(1)
    rows: Any = [torch.randn(ROWS, WIDTH, generator=g) for _ in range(6)]
    trainer.fit(module, DataLoader(rows, batch_size=None))
    return module


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    assert _get_current_dispatch_mode_stack() == []


def test_no_bit_changes() -> None:
    timeline = MemoryTimeline(range(6))
    assert_same(weights_of(fit(timeline)), weights_of(fit()))
    assert timeline.timeline is not None
    assert [span.step for span in timeline.timeline.spans] == list(range(6))
    assert timeline.timeline.steady == (1, 1)  # optimizers make their states in the first
    assert timeline.planned is None


def test_files_and_table(tmp_path: Path) -> None:
    timeline = MemoryTimeline((2, 3), tmp_path / "memory")
    fit(timeline)
    data = json.loads((tmp_path / "memory" / "rank0.json").read_text())
    assert [step["step"] for step in data["steps"]] == [2, 3]
    assert data["steady"] == {"from_step": 2, "period": 1}
    weights = 4 * (WIDTH * WIDTH + WIDTH + 2 * WIDTH + WIDTH + 1)
    most = data["steps"][1]["most"]
    assert (most["parameters"], most["gradients"]) == (weights, weights)
    assert most["optimizer"] == 2 * weights + 6 * 4
    assert most["inputs"] == 4 * ROWS * WIDTH
    assert {block["kind"] for block in data["blocks"]} <= set(KINDS)
    assert (tmp_path / "memory" / "rank0.png").read_bytes().startswith(b"\x89PNG")
    lines = timeline.report().splitlines()
    assert lines[0] == "Memory of Mlp, SingleDeviceStrategy, rank 0 of 1"
    assert "From step 2 on, each step makes, uses and frees the same blocks." in lines
    (row,) = (line.split() for line in lines if line.startswith("  parameters "))
    assert row[:6] == ["parameters", "6", f"{weights}", "B", f"{weights}", "B"]


def test_batches_whose_gradients_are_added_up_are_one_step() -> None:
    timeline = MemoryTimeline((0, 1, 2))
    fit(timeline, accumulate_grad_batches=2)
    assert timeline.timeline is not None
    assert [span.step for span in timeline.timeline.spans] == [0, 1, 2]
    kinds = [x.kind for x in timeline.timeline.blocks if x.is_found and x.step == 2]
    assert kinds.count("inputs") == 2


def test_nothing_is_watched_behind_an_error() -> None:
    module = Mlp(fails=2)
    with pytest.raises(ValueError, match="its reason"):
        fit(MemoryTimeline((1, 2)), module=module)
    module.fails = -1
    plain = Mlp()
    fit(module=plain)
    fit(module=module)  # as it goes on


def test_a_batch_that_a_hook_leaves_out() -> None:
    timeline = MemoryTimeline((1, 2, 3))
    fit(timeline, module=Mlp(leaves=2))
    assert timeline.timeline is not None
    assert [span.step for span in timeline.timeline.spans] == [1, 2]


def test_steps_that_do_not_come() -> None:
    timeline = MemoryTimeline((99,))
    with pytest.warns(UserWarning, match=r"none of steps \[99\]: training ended behind step 5"):
        fit(timeline)
    with pytest.raises(ConfigurationError, match="no step has been watched; allowed: behind a"):
        timeline.report()


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize("steps", [(), (1.5,), (-1,), (True,)])
def test_steps(steps: Any) -> None:
    with pytest.raises(ConfigurationError, match="allowed: whole numbers from 0 on, at least one"):
        MemoryTimeline(steps)


def test_two_of_them() -> None:
    with pytest.raises(ConfigurationError, match="one step by two of them; allowed: one Memory"):
        fit(MemoryTimeline(), MemoryTimeline())


def test_compiled_modules() -> None:
    module = Mlp()
    module.net[3].compile(backend="eager")
    with pytest.raises(ConfigurationError, match=r"watch 'net.3', which torch.compile has"):
        fit(MemoryTimeline(), module=module)


@pytest.mark.parametrize(
    ("device", "kind", "message"),
    [  # none of which can be made here
        ("xla", SingleDeviceStrategy, "memory of 'xla'; allowed: cpu and cuda devices; remove it"),
        (
            "cpu",
            FSDPStrategy,
            "training by FSDPStrategy, which keeps .*; allowed: one device, DDP",
        ),
    ],
)
def test_devices_and_strategies(device: str, kind: type, message: str) -> None:
    strategy = type(kind.__name__, (kind,), {"root_device": torch.device(device)})
    trainer = SimpleNamespace(strategy=strategy.__new__(strategy), callbacks=[])
    with pytest.raises(ConfigurationError, match=message):
        MemoryTimeline().setup(trainer, Mlp(), "fit")
