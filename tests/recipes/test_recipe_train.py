"""Every recipe trains: a step or two on tiny data, alone and on two workers."""

from __future__ import annotations

import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.plugins.environments import SLURMEnvironment
from rich.console import Console
from torch import nn

from lightning_cyclic.plan import make_plan
from recipes.report import plan_table, print_results, stage_ranks, stage_table
from recipes.train import make_trainer, refuse_popen_sweep
from tests.harness.commands import Command, Commands, asked_for
from tests.harness.rows import more

ROOT = Path(__file__).parents[2]
LIGHTNING_WARNINGS = [  # of Lightning itself: an old torch name; advice about loaders
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
TINY_GPT = ["task.block_size=16", "data.max_bytes=20000"]
TINY_GPT += [f"model.net.{change}" for change in ("layers=1", "heads=2", "width=8")]


def train_two_batches(cfg):
    torch.manual_seed(0)
    trainer = make_trainer(cfg)
    trainer.fit(instantiate(cfg.model), instantiate(cfg.data))
    return float(trainer.callback_metrics[cfg.task.metric])


@pytest.mark.parametrize("strategy", ["single", "cyclic_dp"])
class TestOneWorker:
    """`cyclic_dp` with one worker is the one-worker plan."""

    pytestmark = LIGHTNING_WARNINGS

    @pytest.fixture(autouse=True)
    def leave_nothing_behind(self):
        """Take back what a distributed strategy of one worker sets for the whole process."""
        before = dict(os.environ)
        yield
        os.environ.clear()
        os.environ.update(before)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @pytest.fixture
    def compose_one(self, compose_recipe, strategy):
        alone = ["workers=1", f"strategy={strategy}", "trainer.fast_dev_run=2"]
        quiet = ["trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"]
        return lambda *overrides: compose_recipe(*alone, *quiet, *overrides)

    def test_digits(self, compose_one):
        assert 0 <= train_two_batches(compose_one()) <= 1

    def test_cdp_cifar10(self, compose_one, cifar10_folder):
        cfg = compose_one(
            "experiment=cdp_cifar10",
            f"data.path={cifar10_folder}",
            "data.num_workers=0",
            "data.batch_size=4",
            "model.net.width=4",
            "workers=1",
        )
        assert 0 <= train_two_batches(cfg) <= 1

    def test_cdp_imagenet(self, compose_one, imagenet_folder):
        cfg = compose_one(
            "experiment=cdp_imagenet",
            f"data.path={imagenet_folder}",
            "task.num_classes=3",
            "data.num_workers=0",
            "data.batch_size=4",
            "data.train_transform.size=32",
            "data.val_transform.shorter=40",
            "data.val_transform.size=32",
            "model.net.width=4",
            "workers=1",
        )
        assert 0 <= train_two_batches(cfg) <= 1

    def test_byte_lm(self, compose_one):
        bits = train_two_batches(compose_one("experiment=byte_lm", *TINY_GPT))
        assert bits == pytest.approx(8, abs=0.3)


FEW = ["max_epochs=1", "limit_train_batches=10", "limit_val_batches=2"]
DIGITS = [f"trainer.{number}" for number in FEW]
BYTE_LM = ["experiment=byte_lm", "trainer.fast_dev_run=2", *TINY_GPT]
FORK = "start_method=fork"  # else a second worker runs the same command line again
RECIPES = {
    "digits ddp": [*DIGITS, "strategy=ddp", FORK],
    "digits cyclic_dp": [*DIGITS, "strategy=cyclic_dp", FORK],
    "digits 1f1b": [*DIGITS, "strategy=1f1b"],
    "digits debug": ["debug=default", "strategy=1f1b"],
    "byte_lm cyclic_dp": [*BYTE_LM, "strategy=cyclic_dp", FORK],
    "byte_lm gpipe": [*BYTE_LM, "strategy=gpipe", FORK],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs, each in one of its name."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def printed(request, runs):
    """Name of a recipe -> what the script prints that runs as a user runs it."""

    def command(name):
        script = [str(ROOT / "recipes" / "train.py"), f"hydra.run.dir='{runs / name}'"]
        return Command(
            arguments=[sys.executable, *script, *RECIPES[name]],
            is_forked=True,
            env={"COLUMNS": "120"},
            folder=runs,  # what conf/ names is found wherever it runs
        )

    names = asked_for(request, "recipe")
    with Commands({name: command(name) for name in names}) as commands:
        yield commands.output


@pytest.mark.multi
@pytest.mark.parametrize(
    "recipe",
    [more("digits ddp"), "digits cyclic_dp", more("digits 1f1b")],
)
class TestTwoWorkers:
    def test_digits_prints_each_table_once_and_keeps_its_files_in_the_run_directory(
        self, recipe, printed, runs
    ):
        text = printed(recipe)
        assert len(re.findall(r"\bPlan\b", text)) == 1
        assert len(re.findall(r"val accuracy +│ [01]\.\d{4}", text)) == 1
        assert ("bytes sent by rank 0" in text) == (FORK not in RECIPES[recipe])
        (checkpoint,) = (runs / recipe).glob("metrics/checkpoints/*.ckpt")
        weights = torch.load(checkpoint, weights_only=True)["state_dict"]
        assert sum(w.numel() * w.element_size() for w in weights.values()) > 300_000 * 4
        assert (runs / recipe / "metrics" / "metrics.csv").is_file()


@pytest.mark.parametrize("recipe", ["digits debug"])
def test_a_few_batches_in_one_process_leave_nothing(recipe, printed, runs):
    text = printed(recipe)
    assert re.search(r"val accuracy +│ 0\.\d{4}", text)
    assert re.search(r"updates per epoch +│ 3 ", text)
    assert not list((runs / recipe).glob("metrics*"))


@pytest.mark.multi
@pytest.mark.parametrize("recipe", [more("byte_lm cyclic_dp"), "byte_lm gpipe"])
def test_byte_lm_on_two_workers(recipe, printed):
    assert re.search(r"val bits per byte +│ [78]\.\d{4}", printed(recipe))


@pytest.mark.parametrize(
    ("mode", "overrides", "refused"),
    [
        (RunMode.MULTIRUN, [], True),
        (RunMode.MULTIRUN, ["start_method=spawn"], False),
        (RunMode.MULTIRUN, ["strategy=single"], False),
        (RunMode.RUN, [], False),
    ],
)
def test_only_a_sweep_that_would_start_itself_again_is_refused(
    compose_recipe, monkeypatch, mode, overrides, refused
):
    monkeypatch.setattr(SLURMEnvironment, "detect", lambda: False)
    monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(mode=mode))
    expected = pytest.raises(ValueError, match="add start_method=spawn")
    with expected if refused else nullcontext():
        refuse_popen_sweep(compose_recipe(*overrides))


def test_a_sweep_whose_workers_slurm_starts_is_not_refused(compose_recipe, monkeypatch):
    monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(mode=RunMode.MULTIRUN))
    monkeypatch.setattr(SLURMEnvironment, "detect", lambda: True)
    refuse_popen_sweep(compose_recipe())


class TestReport:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))

    def trainer(self, **strategy):
        return SimpleNamespace(
            strategy=SimpleNamespace(**strategy),
            world_size=2,
            num_training_batches=22,
            accumulate_grad_batches=1,
            max_epochs=3,
            default_root_dir="outputs/run",
        )

    def text(self, table):
        console = Console(width=100)
        with console.capture() as capture:
            console.print(table)
        return capture.get()

    def test_plan_of_a_strategy_that_has_one(self):
        plan = SimpleNamespace(
            preset="cyclic_dp", weights="freshest", num_stages=8, num_microbatches=2, slack=0
        )
        text = self.text(plan_table(self.trainer(plan=plan), self.module))
        for row in ("cyclic_dp", r"stages +│ 8", r"slack \(slots\) +│ 0", r"parameters +│ 25"):
            assert re.search(row, text), row

    def pipeline(self):
        return make_plan("1f1b", num_stages=2, num_workers=4, num_microbatches=8, replicas=2)

    def test_plan_of_a_pipeline(self):
        trainer = self.trainer(plan=self.pipeline())
        text = self.text(plan_table(trainer, self.module, activation_checkpointing="except_last"))
        for row in (
            r"replicas of the pipeline +│ 2",
            r"micro-batches per update +│ 8",
            r"rematerialisation +│ except_last",
        ):
            assert re.search(row, text), row
        assert "slack" not in text

    def test_stages_of_a_pipeline_name_their_ranks_the_last_stage_first(self):
        ranks = stage_ranks(self.trainer(plan=self.pipeline()))
        assert ranks == {0: [1, 3], 1: [0, 2]}
        text = self.text(stage_table(self.module, {"0.weight": 0, "1.weight": 1}, ranks))
        assert re.search(r"0 │ 0\.weight .*│ +1, 3 │", text)
        assert stage_ranks(self.trainer()) == {}

    def test_plan_of_a_strategy_that_has_none(self):
        text = self.text(plan_table(self.trainer(), self.module))
        assert "SimpleNamespace" in text
        assert "stages" not in text

    def test_stages_with_their_shares(self):
        stage_of = {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1}
        text = self.text(stage_table(self.module, stage_of))
        assert re.search(r"0 │ 0\.weight +│ +2 │ +9", text)
        assert re.search(r"1 │ 1\.weight +│ +2 │ +16", text)

    def test_results_with_and_without_messages(self, capsys):
        print_results(self.trainer(), {"val_accuracy": 0.98}, 12.34)
        text = capsys.readouterr().out
        assert "0.9800" in text
        assert "12.3" in text
        assert "messages" not in text
        print_results(self.trainer(messages_sent=7, bytes_sent=2048), {"val_accuracy": 0.98}, 1.0)
        assert re.search(r"bytes sent by rank 0 +│ 2,048", capsys.readouterr().out)
