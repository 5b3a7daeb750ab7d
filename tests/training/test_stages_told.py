"""The stages that a run used: told once on rank 0, kept in its checkpoints, and used again."""

from __future__ import annotations

import ast
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.harness.rows import more
from tests.harness.runs import Result, run, trained
from tests.harness.trainers import assert_same

pytestmark = pytest.mark.multi


class Row(LightningModule):
    """Layers in a row, of which the first ones are the widest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*(nn.Linear(n, n // 2) for n in (32, 16, 8, 4)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows() -> DataLoader[Any]:
    data = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(data), batch_size=4)


def train(strategy: dict[str, Any], n: int = 2, how: Any = trained, **flags: Any) -> list[Result]:
    found: list[Result] = how(Row, strategy, n, data=rows, **flags)
    return found


def save(path: Path, trainer: Any, module: Any) -> None:
    trainer.save_checkpoint(path)


def told(end: Result) -> list[str]:
    return [line for line in end.messages if "lightning_cyclic trains" in line]


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
        more(2, {"preset": "lockstep_dp", "stages": 3}),
        more(2, {"preset": "1f1b"}),
        (2, {"preset": "1f1b", "stages": "measured"}),
        more(2, {"preset": "cyclic_pipeline"}),
        (1, {"preset": "cyclic_dp", "num_microbatches": 2}),
        (1, {"preset": "gpipe", "stages": 1, "num_microbatches": 2}),
    ],
    ids=str,
)
def test_the_stages_of_a_run_can_be_pasted_from_its_log_and_its_checkpoint(
    num_ranks: int, strategy: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.ckpt"
    ranks = train(strategy, num_ranks, look=partial(save, path))
    (line,) = told(ranks[0])
    assert not any(told(rank) for rank in ranks[1:])
    stages = pasted(line)
    saved = torch.load(path, weights_only=True)["lightning_cyclic"]
    assert saved["starts"] == ([] if stages == 1 else stages)
    again = train(strategy | {"stages": stages}, num_ranks)
    assert pasted(told(again[0])[0]) == stages
    for one, other in zip(again, ranks, strict=True):
        assert one.stage_of == other.stage_of
        assert_same(one.weights, other.weights)


@pytest.mark.parametrize("preset", ["cyclic_dp", more("1f1b"), "cyclic_pipeline"])
def test_a_run_that_goes_on_tells_the_stages_of_the_checkpoint(
    preset: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.ckpt"
    train({"preset": preset, "stages": ["layers.2"]}, look=partial(save, path))
    resumed = train({"preset": preset}, ckpt_path=path, max_epochs=2)
    assert pasted(told(resumed[0])[0]) == ["layers.2"]


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path, strategy = tmp_path / "run.ckpt", {"preset": "cyclic_dp"}
    train(strategy, look=partial(save, path))
    saved = torch.load(path, weights_only=True)
    assert saved["lightning_cyclic"]["format"] == 2
    saved["lightning_cyclic"]["format"] = 1
    torch.save(saved, path)
    for end in train(strategy, how=run, ckpt_path=path, max_epochs=2):
        assert "run.ckpt has what is delayed in format 1, of another version of" in end.text


def report(trainer: Any, module: Any) -> str:
    """Return the report of replicas on each rank, and that of a pipeline, which rank 0 has."""
    has_one = trainer.is_global_zero or trainer.strategy.preset == "cyclic_dp"
    return str(trainer.strategy.report()) if has_one else ""


def test_replicated_workers_report_their_stages() -> None:
    for rank in train({"preset": "cyclic_dp", "stages": ["layers.1"]}, look=report):
        assert rank.found == 'stages=["layers.1"]'


@pytest.mark.parametrize(("stages", "clock"), [("auto", "counted"), ("measured", "measured")])
def test_a_pipeline_reports_whose_times_they_are(stages: str, clock: str) -> None:
    text = train({"preset": "1f1b", "stages": stages}, look=report)[0].found
    assert f"times are {clock}" in text
    assert 'stages=["layers.' in text
