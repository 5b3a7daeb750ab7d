import json
import sys

import pytest
import torch
from lightning import LightningModule
from torch import nn

from lightning_cyclic.cli.load_module import measure
from lightning_cyclic.cli.main import main
from lightning_cyclic.planner import Tie, from_json
from lightning_cyclic.runtime.stages.profiling import profile_of
from lightning_cyclic.runtime.stages.survey import survey

MODEL = """
import torch
from lightning import LightningModule
from torch import nn


class Model(LightningModule):
    def __init__(self, tied=False, example=False):
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.last = nn.Linear(8, 4)
        self.back = nn.Linear(4, 8, bias=False)
        if tied:
            self.back.weight = self.first.weight
        if example:
            self.example_input_array = torch.ones(2, 4)
            self.train_dataloader = None

    def forward(self, x):
        return self.back(self.last(torch.relu(self.middle(self.first(x)))))

    def training_step(self, batch):
        x, y = batch
        loss = (self(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def train_dataloader(self):
        x = torch.arange(64.0).view(16, 4)
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, torch.ones(16, 8)), batch_size=8
        )


class Example(Model):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.ones(2, 4)

    training_step = LightningModule.training_step
"""


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    (tmp_path / "measured_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "measured_model", raising=False)


def test_units_begin_where_stages_can():
    (profile,) = measure("measured_model.py:Model")
    assert (profile.name, profile.micro_size, profile.ties) == ("Model", 8, ())
    assert [unit.name for unit in profile.units] == ["", "middle", "middle.1", "last", "back"]
    assert [unit.param_bytes for unit in profile.units] == [
        4 * size for size in (4 * 8, 8 * 8 + 8, 2 * 8, 8 * 4 + 4, 4 * 8)
    ]
    assert [unit.crossing_bytes for unit in profile.units] == [
        4 * 8 * size for size in (4 + 8, 8, 8, 8, 4)
    ]  # the batch of x and y; then what one module hands to the next
    assert all(unit.forward_s > 0 and unit.backward_s > 0 for unit in profile.units)
    ratios = {round(unit.backward_s / unit.forward_s, 9) for unit in profile.units}
    assert len(ratios) == 1


def test_several_sizes():
    whole, half = measure("measured_model.py:Model", num_micros=(1, 2, 2))
    assert (whole.micro_size, half.micro_size) == (8, 4)
    assert [unit.crossing_bytes / 2 for unit in whole.units] == [
        unit.crossing_bytes for unit in half.units
    ]


def test_shared_parameters_tie_units():
    (profile,) = measure("measured_model.py:Model", texts=["tied=true"])
    assert len(profile.units) == 4  # no stage can begin at what has no parameters of its own
    assert profile.ties == (Tie(units=(0, 3), bytes=4 * 4 * 8),)
    assert profile.units[3].param_bytes == 4 * (8 * 4 + 4) + 4 * 4 * 8


def test_an_example_input():
    (profile,) = measure("measured_model.py:Example")
    assert profile.micro_size == 2
    ratios = [unit.backward_s / unit.forward_s for unit in profile.units]
    assert ratios == pytest.approx([2] * 5)  # nothing to run a backward from


def test_a_module_that_can_be_one_stage_only():
    class One(LightningModule):
        def __init__(self):
            super().__init__()
            self.only = nn.Linear(2, 2)

        def training_step(self, batch):
            return self.only(batch).sum()

    one = One()
    profile = profile_of(survey(one, lambda: one.training_step(torch.ones(3, 2))), micro_size=3)
    assert [unit.name for unit in profile.units] == [""]
    assert profile.units[0].param_bytes == 4 * 6


def test_plans_of_a_module(capsys, tmp_path):
    arguments = (
        "--workers",
        "2",
        "--memory",
        "1GB",
        "--num-microbatches",
        "2",
        "--save-profile",
        "kept.json",
    )
    assert main(["plan", "measured_model.py:Model", *arguments]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Model: 8 samples per update, 2 workers of 1 GB")
    assert err == ""
    (kept,) = from_json((tmp_path / "kept.json").read_text())
    assert kept.micro_size == 4
    assert main(["plan", "kept.json", *arguments[:4], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["strategy"] in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measured_model.py:Nobody"], "'Nobody' does not exist in measured_model.py"),
        (
            ["measured_model.py:Model", "--num-microbatches", "0"],
            "'0' does not fit; allowed: whole",
        ),
        (["measured_model.py:Model", "--arg", "depth=1"], "cannot be made with {'depth': 1}"),
        (
            ["measured_model.py:Model", "--save-profile", "no/such.json"],
            "no/such.json cannot be written",
        ),
    ],
)
def test_refusals(capsys, arguments, message):
    assert main(["plan", *arguments, "--workers", "1", "--memory", "1GB"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
