"""A loader that shuffles goes on, behind a checkpoint, as it would have without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests import processes
from tests.corpus import assert_same, make_trainer, weights_of
from tests.rows import chosen

pytestmark = pytest.mark.multi
ROWS, EPOCHS = 24, 4
PIPELINES = [
    {"preset": "1f1b", "stages": ["net.2"], "num_microbatches": 2},
    {"preset": "pipedream_2bw", "stages": ["net.2"], "num_microbatches": 2},
    {"preset": "cyclic_mp", "stages": ["net.2"], "num_microbatches": 2},
]


class Rows(LightningModule):
    """Notes which rows it is given, and when."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def on_train_batch_start(self, batch: Any, *args: Any) -> None:
        self.seen.append(batch[0][:, 0].tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(strategy: Any, folder: str, epochs: int, goes_on: bool) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(ROWS, 4, generator=g), torch.randn(ROWS, 1, generator=g))
    # another rank's generator may be elsewhere, and that of a process that goes on always is
    torch.manual_seed(17 * goes_on + 3 * processes.here().rank)
    module = Rows()
    torch.manual_seed(100 + 17 * goes_on + 3 * processes.here().rank)
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, every_n_epochs=1)
    trainer = make_trainer(
        strategy, max_epochs=epochs, callbacks=[saver], enable_checkpointing=True
    )
    path = str(Path(folder, f"epoch={EPOCHS // 2 - 1}.ckpt")) if goes_on else None
    trainer.fit(module, DataLoader(data, 4, shuffle=True), DataLoader(data, 12), ckpt_path=path)
    return {"weights": weights_of(module), "seen": module.seen}


@pytest.mark.parametrize(
    "strategy", chosen(PIPELINES, PIPELINES[::2]), ids=lambda s: str(s["preset"])
)
def test_epochs_behind_a_checkpoint_have_the_rows_of_an_unbroken_run(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    whole = processes.run(fit, 2, strategy, str(tmp_path), EPOCHS, False)
    resumed = processes.run(fit, 2, strategy, str(tmp_path), EPOCHS, True)
    reader = 1  # the rank of the first stage
    half = len(whole[reader]["seen"]) // 2
    orders = whole[reader]["seen"]
    assert len({str(orders[k : k + 6]) for k in range(0, 24, 6)}) == EPOCHS  # all are shuffled
    assert resumed[reader]["seen"] == orders[half:]
    for rank in resumed:
        assert_same(rank["weights"], whole[0]["weights"])


@pytest.mark.parametrize("preset", ["gpipe", "cyclic_pipeline"])
def test_so_it_is_on_one_process(preset: str, tmp_path: Path) -> None:
    strategy = {"preset": preset, "stages": ["net.2"], "num_microbatches": 2}
    (whole,) = processes.run(fit, 1, strategy, str(tmp_path), EPOCHS, False)
    (resumed,) = processes.run(fit, 1, strategy, str(tmp_path), EPOCHS, True)
    assert resumed["seen"] == whole["seen"][len(whole["seen"]) // 2 :]
    assert_same(resumed["weights"], whole["weights"])


def test_each_replica_goes_on_with_its_own_rows(tmp_path: Path) -> None:
    strategy = {"preset": "cyclic_dp", "stages": 2}
    whole = processes.run(fit, 2, strategy, str(tmp_path), EPOCHS, False)
    resumed = processes.run(fit, 2, strategy, str(tmp_path), EPOCHS, True)
    assert whole[0]["seen"] != whole[1]["seen"]
    for one, other in zip(resumed, whole, strict=True):
        assert one["seen"] == other["seen"][len(other["seen"]) // 2 :]
        assert_same(one["weights"], other["weights"])
