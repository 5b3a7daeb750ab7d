"""The doctor on the command line: modules from files, their data, and what is refused."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_cyclic.cli import load_module
from lightning_cyclic.cli.main import main
from lightning_cyclic.planner import to_json
from tests.cli.test_branches import SAID, SEEN
from tests.harness.commands import Command, Commands
from tests.planner.test_search import profile

MODEL = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric


def loader(size):
    return DataLoader(TensorDataset(torch.ones(16, 4), torch.ones(16, 1)), batch_size=size)


class Model(LightningModule):
    def __init__(self, width=4, names=(), late=False):
        super().__init__()
        self.late, self.names = late, names
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 1)
        self.metric = MeanMetric()

    def configure_model(self):
        if not hasattr(self, "middle"):
            self.middle = nn.Linear(self.first.out_features, self.first.out_features)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [x * 2 for x in batch]

    def training_step(self, batch, batch_idx):
        x, y = batch
        assert x.max() == 2
        x = self.middle(self.first(x))
        if self.late and x.sum() > 0:
            x = -x
        loss = (self.last(x) - y).square().mean()
        self.metric(loss.detach())
        self.log("loss", loss)
        self.log_dict({"metric": self.metric, "epoch": self.trainer.current_epoch})
        return loss

    def train_dataloader(self):
        return loader(8)


class WithoutData(Model):
    train_dataloader = LightningModule.train_dataloader


class Example(WithoutData):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.ones(2, 4)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Named(Example):
    def __init__(self):
        super().__init__()
        self.example_input_array = {"x": torch.ones(2, 4)}


class Data(LightningDataModule):
    def __init__(self, size=2):
        super().__init__()
        self.size = size

    def setup(self, stage):
        self.ready = stage == "fit"

    def train_dataloader(self):
        assert self.ready
        return loader(self.size)


class Empty(Model):
    def train_dataloader(self):
        return []


class Manual(Model):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class NeedsDepth(Model):
    def __init__(self, depth):
        super().__init__()
"""


@pytest.fixture
def doctor(tmp_path, capsys, monkeypatch):
    (tmp_path / "doctors_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "doctors_model", raising=False)

    def run(name, *arguments):
        status = main(["doctor", f"doctors_model.py:{name}", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def listed(out):
    """Return module -> activation bytes, as printed."""
    rows = [line.split() for line in out.split("Stages")[0].splitlines()]
    return {
        row[0]: " ".join(row[5:7]) for row in rows if row and row[0] in {"first", "middle", "last"}
    }


def test_a_module_with_its_own_data(doctor):
    status, out, err = doctor("Model")
    assert (status, err) == (0, "")
    assert out.startswith("Model: calls of modules with parameters")
    assert listed(out) == {"first": "128 B", "middle": "128 B", "last": "32 B"}
    assert 'stages=["' in out
    assert "epoch" not in out


def test_times_are_counted_and_the_same_in_every_run_or_measured(doctor):
    first, second = doctor("Model"), doctor("Model")
    assert first == second
    assert "times are counted, at 1 TFLOP/s and 100 GB/s: the same in every run" in first[1]
    status, out, err = doctor("Model", "--measured")
    assert (status, err) == (0, "")
    assert "times are measured, in this run on this machine" in out
    assert listed(out) == listed(first[1])


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["--num-microbatches", "4"], {"first": "32 B", "middle": "32 B", "last": "8 B"}),
        (["--data", "doctors_model:Data"], {"first": "32 B", "middle": "32 B", "last": "8 B"}),
        (
            ["--data", "doctors_model.py:Data", "--arg", "data.size=16", "--arg", "width=1"],
            {"first": "64 B", "middle": "64 B", "last": "64 B"},
        ),
    ],
)
def test_batches(doctor, arguments, sizes):
    status, out, err = doctor("Model", *arguments)
    assert (status, err) == (0, "")
    assert listed(out) == sizes


@pytest.mark.parametrize("name", ["Example", "Named"])
def test_an_example_input(doctor, name):
    status, out, _ = doctor(name, "--stages", "3")
    assert status == 0
    assert 'stages=["middle", "last"]' in out


@pytest.mark.parametrize("name", ["types", "wave", "torch"])  # in use, of no use here, a package
def test_a_file_that_is_called_like_another_module(doctor, name):
    Path("doctors_model.py").rename(f"{name}.py")
    before = sys.modules.get(name)
    assert main(["doctor", f"{name}.py:Model", "--stages", "middle"]) == 0
    assert sys.modules.get(name) is before
    assert importlib.import_module(name).__file__ != str(Path(f"{name}.py").resolve())


def test_more_stages_than_there_are_places_have_a_table_too(doctor):
    status, out, _ = doctor("Model", "--stages", "4")
    assert status == 0
    assert 'stages=["middle", "last"]' in out
    said = "4 stages were asked for, 3 are the most: see above what stands against others"
    assert out.endswith(f"{said}\n")


def test_named_stages_and_a_memory_limit(doctor):
    assert 'stages=["middle"]' in doctor("Model", "--stages", "middle")[1]
    assert 'stages=["middle", "last"]' in doctor("Model", "--stages", "middle, last")[1]
    status, _, err = doctor("Model", "--memory-limit", "1B")
    assert status == 2
    assert "memory_limit_bytes=1 cannot be met with stages=2" in err


def test_what_stands_against_a_cut(doctor):
    line = MODEL.splitlines().index("        if self.late and x.sum() > 0:") + 1
    status, out, _ = doctor("Model", "--arg", "late=true")
    assert status == 0
    assert "cannot [1]" in out
    assert f"at doctors_model.py:{line}" in out
    status, _, err = doctor("Model", "--arg", "late=true", "--stages", "last")
    assert status == 2
    assert f"doctors_model.py:{line}; allowed: the nearest place is 'middle'" in err


def test_what_another_order_of_branches_would_gain(doctor, monkeypatch):
    monkeypatch.setattr(load_module, "survey", lambda *args, **more: SEEN)
    status, out, _ = doctor("Model", "--stages", "3")
    assert status == 0
    assert out.endswith(f'stages=["left", "right2"]\n{SAID}\n')
    assert "another order" not in doctor("Model")[1]
    assert "another order" not in doctor("Model", "--stages", "left2,right2")[1]
    assert SAID not in doctor("Model", "--stages", "3", "--memory-limit", "18B")[1]  # may not fit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Nobody"], "'Nobody' does not exist in doctors_model.py"),
        (["MeanMetric"], "'MeanMetric' is no LightningModule"),
        (["Model", "--arg", "width"], "--arg 'width' has no value; allowed: NAME=VALUE"),
        (["Model", "--arg", "width=[1"], "--arg 'width=[1' is no YAML"),
        (["Model", "--arg", "depth=1"], "cannot be made with {'depth': 1}: got an unexpected"),
        (["NeedsDepth"], "missing a required argument: 'depth'; allowed: NeedsDepth(depth)"),
        (["WithoutData"], "WithoutData comes without data; allowed: --data PATH:CLASS"),
        (["Empty"], "the train_dataloader of Empty yields no batch"),
        (["Manual"], "Manual optimizes by itself (automatic_optimization=False)"),
        (["Model", "--stages", "0"], "Model can be cut into at most 3; allowed: 1 to 3"),
        (
            ["Model", "--num-microbatches", "0"],
            "--num-microbatches 0 is no number of micro-batches",
        ),
        (["Model", "--data", "Data"], "'Data' does not say which class"),
        (["Model", "--data", "no.such.thing:Data"], "there is no module 'no.such.thing'"),
        (["Model", "--data", "missing.py:Data"], "there is no file 'missing.py'"),
    ],
)
def test_refusals(doctor, arguments, message):
    status, out, err = doctor(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        ["draw", "cyclic_dp", "--workers", "2"],
        ["plan", "net.json", "--workers", "2", "--memory", "1GB", "--preset", "1f1b"],
    ],
)
def test_the_command_line_starts_without_torch(command, tmp_path):
    (tmp_path / "net.json").write_text(to_json([profile()]))
    code = (
        f"import sys; from lightning_cyclic.cli.main import main; main({command}); "
        "sys.exit(bool({'torch', 'lightning', 'matplotlib'} & set(sys.modules)))"
    )
    done = [sys.executable, "-c", code]
    subprocess.run(done, stdout=subprocess.DEVNULL, check=True, cwd=tmp_path)


TRAINED = f"""
import os
{MODEL}

class Trained(Model):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unrepeatable(Trained):
    def training_step(self, batch, batch_idx):
        drawn = int.from_bytes(os.urandom(4)) / 2**32
        return super().training_step(batch, batch_idx) * (1 + drawn)
"""


def verified(host, name, *presets, folder, is_forked):
    """Verify in a process of its own, as a process has one host; return status and lines."""
    (folder / "model.py").write_text(TRAINED.replace("lightning.pytorch", host))
    words = ["doctor", f"model.py:{name}", "--verify", "--stages", "2"]
    words += [word for preset in presets for word in ("--preset", preset)]
    arguments = [sys.executable, "-m", "lightning_cyclic.cli.main", *words]
    command = Command(arguments=arguments, is_forked=is_forked, folder=folder)
    with Commands({"doctor": command}) as commands:
        status, said = commands.end("doctor")
    return status, said.splitlines()


@pytest.mark.multi
@pytest.mark.parametrize(
    ("host", "is_forked"), [("lightning.pytorch", True), ("pytorch_lightning", False)]
)
def test_a_module_is_compared_with_its_plain_step(host, is_forked, tmp_path):
    status, lines = verified(
        host, "Trained", "1f1b", "cyclic_dp", folder=tmp_path, is_forked=is_forked
    )
    assert status == 0
    *rows, last = lines[1:]
    assert [line.split()[:2] for line in rows] == [["1f1b", "equal"], ["cyclic_dp", "equal"]]
    assert last.startswith("all equal,")


@pytest.mark.multi
def test_a_module_whose_step_cannot_be_repeated_is_not_equal(tmp_path):
    status, lines = verified(
        "lightning.pytorch", "Unrepeatable", "1f1b", folder=tmp_path, is_forked=True
    )
    assert status == 1
    assert lines[1].split()[:2] == ["1f1b", "unclear"]
    assert "does not come out alike when it is run twice" in "\n".join(lines)
