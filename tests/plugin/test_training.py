"""The stages that a run used: told once on rank 0, kept in its checkpoints, and used again."""

from __future__ import annotations

import ast
import logging
import re
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import processes
from tests.harness.rows import more
from tests.harness.trainers import assert_same, make_trainer, weights_of

pytestmark = pytest.mark.multi


class Row(LightningModule):
    """Layers in a row, of which the first ones are the widest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(n, n // 2) for n in (32, 16, 8, 4)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Told(logging.Handler):
    """Keep what Lightning tells of stages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "lightning_cyclic trains" in record.getMessage():
            self.lines.append(record.getMessage())


def train(
    strategy: dict[str, Any], path: str = "", ckpt_path: str | None = None
) -> dict[str, Any]:
    """Train; return what was told, and what came of it."""
    told = Told()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(told)
    level = logger.level
    logger.setLevel(logging.INFO)
    seed_everything(1, verbose=False)
    module = Row()
    data = DataLoader(TensorDataset(torch.randn(32, 32)), batch_size=4)
    trainer = make_trainer(strategy, max_epochs=2 if ckpt_path else 1)
    try:
        trainer.fit(module, data, ckpt_path=ckpt_path)
        if path:
            trainer.save_checkpoint(path)
        stage_of = trainer.strategy.stage_of
        weights = weights_of(module)
    finally:
        logger.removeHandler(told)
        logger.setLevel(level)
    return {"told": told.lines, "stage_of": stage_of, "weights": weights}


def pasted(line: str) -> Any:
    found = re.fullmatch(r"lightning_cyclic trains Row in (.*): stages=(.*)", line)
    assert found is not None, line
    stages = ast.literal_eval(found[2])
    assert found[1] == ("one stage" if stages == 1 else f"{len(stages) + 1} stages")
    return stages


@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [
        (2, {"preset": "cyclic_dp"}),
        (2, {"preset": "lockstep_dp", "stages": 3}),
        more(2, {"preset": "1f1b"}),
        (2, {"preset": "1f1b", "stages": "measured"}),
        more(2, {"preset": "cyclic_pipeline"}),
        (1, {"preset": "cyclic_dp", "num_microbatches": 2}),
        (1, {"preset": "gpipe", "stages": 1, "num_microbatches": 2}),
    ],
    ids=str,
)
def test_the_stages_of_a_run_can_be_pasted_from_its_log_and_its_checkpoint(
    num_ranks: int, strategy: dict[str, Any], tmp_path: Any
) -> None:
    path = str(tmp_path / "run.ckpt")
    ranks = processes.run(train, num_ranks, strategy, path)
    (line,) = ranks[0]["told"]
    assert not any(rank["told"] for rank in ranks[1:])
    stages = pasted(line)
    saved = torch.load(path, weights_only=True)["lightning_cyclic"]
    assert saved["starts"] == ([] if stages == 1 else stages)
    again = processes.run(train, num_ranks, strategy | {"stages": stages})
    assert pasted(again[0]["told"][0]) == stages
    for one, other in zip(again, ranks, strict=True):
        assert one["stage_of"] == other["stage_of"]
        assert_same(one["weights"], other["weights"])


@pytest.mark.parametrize("preset", ["cyclic_dp", more("1f1b"), "cyclic_pipeline"])
def test_a_run_that_goes_on_tells_the_stages_of_the_checkpoint(preset: str, tmp_path: Any) -> None:
    path = str(tmp_path / "run.ckpt")
    named = {"preset": preset, "stages": ["layers.2"]}
    processes.run(train, 2, named, path)
    resumed = processes.run(train, 2, {"preset": preset}, "", path)
    assert pasted(resumed[0]["told"][0]) == ["layers.2"]


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Any) -> None:
    path, strategy = str(tmp_path / "run.ckpt"), {"preset": "cyclic_dp"}
    processes.run(train, 2, strategy, path)
    saved = torch.load(path, weights_only=True)
    assert saved["lightning_cyclic"]["format"] == 2
    saved["lightning_cyclic"]["format"] = 1
    torch.save(saved, path)
    with pytest.raises(processes.RanksFailedError) as caught:
        processes.run(train, 2, strategy, "", path)
    assert len(caught.value.errors) == 2
    for text in caught.value.errors.values():
        assert "run.ckpt has what is delayed in format 1, of another version of" in text


def report(strategy: dict[str, Any]) -> str:
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(Row(), DataLoader(TensorDataset(torch.ones(8, 32)), batch_size=4))
    return str(trainer.strategy.report())


def test_replicated_workers_report_their_stages() -> None:
    shown = processes.run(report, 2, {"preset": "cyclic_dp", "stages": ["layers.1"]})
    assert shown == ['stages=["layers.1"]'] * 2


def test_a_pipeline_reports_whose_times_they_are() -> None:
    for stages, clock in (("auto", "counted"), ("measured", "measured")):
        text = processes.run(report_of_rank_0, 2, {"preset": "1f1b", "stages": stages})[0]
        assert f"times are {clock}" in text
        assert 'stages=["layers.' in text


def report_of_rank_0(strategy: dict[str, Any]) -> str:
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(Row(), DataLoader(TensorDataset(torch.ones(8, 32)), batch_size=4))
    return str(trainer.strategy.report()) if trainer.is_global_zero else ""
