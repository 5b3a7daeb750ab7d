"""Comparisons of rules: which runs are made, what is kept of each, what is told of them."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from PIL import Image
from rich.console import Console

from recipes.compare import read_records, report, train_all
from recipes.compare_one import in_order_of, judged, whole_steps
from recipes.compare_plot import plot_curves
from recipes.compare_report import markdown_table, summaries, tables, write_csv
from recipes.compare_runs import handed_on, plan_runs
from recipes.datamodules.digits import Digits
from tests.harness.commands import Command, Commands, Forked
from tests.harness.rows import more

ROOT = Path(__file__).parents[2]
EXPERIMENT = "experiment=compare_pipelines"


@pytest.fixture
def plan(compose_recipe):
    """Overrides -> the runs that they make."""
    return lambda *overrides: plan_runs(
        compose_recipe(EXPERIMENT, *overrides), handed_on(overrides)
    )


class TestRuns:
    def test_all_lists_are_crossed(self, plan):
        runs = plan("optimizers=[sgd,adamw]", "presets=[1f1b,spectrain]")
        assert len(runs) == len({run.key for run in runs}) == 2 * 2 * 2 * 3
        assert {run.seed for run in runs[:8]} == {0}

    def test_a_rule_that_updates_more_often_has_smaller_batches_and_steps(self, plan):
        sync, stashed = plan("presets=[1f1b,pipedream]", "seeds=[0]", "tasks=[bytes]")
        assert (sync.updates_per_step, stashed.updates_per_step) == (1, 4)
        assert sync.cfg.data.batch_size == 4 * stashed.cfg.data.batch_size
        assert sync.cfg.model.optimizer.lr == 4 * stashed.cfg.model.optimizer.lr
        assert stashed.cfg.model.scheduler.max_lr == stashed.cfg.model.optimizer.lr
        assert (sync.cfg.strategy.num_microbatches, stashed.cfg.strategy.num_microbatches) == (
            4,
            1,
        )

    def test_the_rule_for_the_learning_rate_can_be_chosen(self, plan):
        one, other = plan(
            "presets=[1f1b,pipedream]",
            "seeds=[0]",
            "tasks=[bytes]",
            "compare.lr_rule=per_update",
        )
        assert one.cfg.model.optimizer.lr == other.cfg.model.optimizer.lr

    def test_a_contender_may_have_its_own_optimizer_settings(self, plan):
        lists = ("presets=[pipedream]", "seeds=[0]", "tasks=[digits]")
        (run,) = plan(*lists, "+compare.contenders.pipedream.optimizer={lr: 0.007}")
        assert run.cfg.model.optimizer.lr == 0.007
        assert run.cfg.model.optimizer.momentum == 0.9

    def test_a_preset_that_is_not_listed_goes_by_its_name(self, plan):
        (run,) = plan("presets=[gpipe]", "seeds=[0]", "tasks=[digits]")
        assert (run.cfg.strategy.preset, run.cfg.strategy.num_microbatches) == ("gpipe", 4)

    def test_contenders_of_the_experiment_can_be_made(self, plan):
        for run in plan("seeds=[0]", "tasks=[digits]"):
            if run.contender != "2bw_error_feedback":
                instantiate(run.cfg.strategy, _convert_="all")

    def test_codecs_are_compared_on_whole_batches(self, compose_recipe):
        overrides = ("experiment=compare_codecs", "seeds=[0]", "tasks=[clicks]")
        runs = {run.contender: run for run in plan_runs(compose_recipe(*overrides))}
        assert {(run.updates_per_step, run.cfg.workers) for run in runs.values()} == {(1, 2)}
        made = {name: instantiate(run.cfg.strategy, _convert_="all") for name, run in runs.items()}
        assert "num_microbatches" not in runs["plain"].cfg.strategy
        assert runs["diloco_10"].cfg.strategy.preset.every == 10
        assert runs["int8_both"].cfg.strategy.compress == {"gradients": "int8", "weights": "int8"}
        assert len(made) == len(runs) == 18
        assert runs["low_rank_4"].cfg.callback.rank == 4

    def test_other_settings_go_to_every_run_and_limits_count_steps(self, plan):
        runs = plan("presets=[1f1b,spectrain]", "trainer.max_steps=6", "threads=2")
        assert {(run.cfg.threads, run.cfg.trainer.max_steps) for run in runs} == {(2, 6), (2, 24)}

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("strategy=gpipe", r"use presets=\[\.\.\.\]"),
            ("model=resnet18", "a task of your own"),
            ("tasks=[digit]", "digit is not in compare.tasks; allowed: digits, bytes"),
            ("optimizers=[lion]", "lion is not in compare.tasks.digits.optimizers"),
            ("compare.lr_rule=linear", "allowed: per_sample, per_update"),
            (
                "compare.num_microbatches=5",
                "5 for the updates of a step's batch; allowed: divisors",
            ),
            (
                "+compare.contenders.pipeoptim.num_microbatches=3",
                "3 for the num_microbatches of pipeoptim",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, plan, override, message):
        override = override.replace("+compare", "++compare")
        with pytest.raises(ValueError, match=message):
            plan(override)


class TestRecords:
    def test_the_seed_alone_decides_the_order_for_batches_of_any_size(self):
        def first_labels(batch_size, seed):
            data = Digits(batch_size=batch_size)
            data.setup("fit")
            torch.rand(batch_size)  # other draws do not matter
            loader = in_order_of(seed, data.train_dataloader())
            return torch.cat([y for _ in range(2) for _, y in loader])[:1432].tolist()

        assert first_labels(8, 3) == first_labels(4, 3) != first_labels(8, 4)

    @pytest.mark.parametrize(
        ("limit", "updates", "batches"),
        [(None, 1, 44), (None, 4, 44), (40, 4, 40), (0.5, 4, 20), (100, 3, 42)],
    )
    def test_epochs_end_with_a_whole_step(self, limit, updates, batches):
        assert whole_steps(44, updates, limit) == batches

    def test_training_is_judged_by_the_last_tenth_of_the_steps(self):
        rows = [{"step": n, "seconds": n, "loss": 40.0 - n} for n in range(20)]
        found = judged([*rows, {"step": 19, "seconds": 30.0, "value": 0.5}], is_finite=True)
        assert (found["status"], found["loss"], found["value"]) == ("trained", 21.5, 0.5)
        assert found["seconds"] == 30.0

    def test_a_loss_that_rose_or_was_not_finite_diverged(self):
        rows = [{"step": n, "seconds": n, "loss": 2.0 + n} for n in range(20)]
        assert "above 2 of the first" in judged(rows, is_finite=True)["reason"]
        assert judged(rows[:1], is_finite=False)["status"] == "diverged"
        assert judged([], is_finite=False)["status"] == "diverged"


def record(contender, seed, status="trained", **changes):
    rows = [
        {"epoch": 0, "step": n + 1, "seconds": (n + 1) * (0.1 + seed / 100), "loss": 2 / (n + 1)}
        for n in range(30)
    ]
    rows.append({"epoch": 0, "step": 30, "seconds": 3.1, "value": 0.9 + seed / 100})
    end = {"value": 0.9 + seed / 100, "loss": 0.1, "seconds": 3.0, "rows": rows}
    end["bytes_per_step"] = 1500.0
    names = {"task": "digits", "optimizer": "sgd", "contender": contender, "seed": seed}
    reason = {} if status == "trained" else {"reason": status}
    return names | {"metric": "val_accuracy", "status": status} | end | reason | changes


RECORDS = [
    record("1f1b", 0),
    record("pipedream", 0, "diverged", value=None, loss=99.0),
    record("spectrain", 0, "diverged", loss=99.0),
    record("1f1b", 1),
    record("pipedream", 1),
    record("spectrain", 1, "diverged", loss=99.0),
]


class TestReports:
    def test_runs_that_diverged_are_counted_and_not_averaged(self):
        text = markdown_table(summaries(RECORDS))
        assert "| `1f1b` | 0.9050 ± 0.0071 | 0.1000 ± 0.0000 | 1.5 | 0 of 2 |" in text
        assert "| `pipedream` | 0.9100 (of 1) | 0.1000 (of 1) | 1.5 | 1 of 2 |" in text
        assert "| `spectrain` | diverged | diverged |  | 2 of 2 |" in text

    def test_failed_runs_say_so(self):
        text = markdown_table(summaries([record("1f1b", 0, "failed")]))
        assert "| failed | failed |  | 0 of 1, 1 failed |" in text

    def test_the_terminal_shows_a_table_per_task(self):
        others = [one | {"task": "bytes", "metric": "val_bits"} for one in RECORDS]
        found = tables(summaries(RECORDS + others))
        assert len(found) == 2
        console = Console(width=100)
        with console.capture() as capture:
            console.print(*found)
        assert "val_bits" in capture.get()
        assert "2 of 2" in capture.get()

    def test_csv_has_all_curves(self, tmp_path):
        write_csv(RECORDS, tmp_path / "runs.csv")
        lines = list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
        assert len(lines) == 31 * len(RECORDS)
        assert (lines[1]["step"], lines[1]["loss"], lines[1]["value"]) == ("2", "1.0", "")
        assert (lines[30]["metric"], lines[30]["value"]) == ("val_accuracy", "0.9")

    def test_curves_are_drawn_where_some_or_all_diverged(self, tmp_path):
        plot_curves(RECORDS, tmp_path / "curves.png")
        with Image.open(tmp_path / "curves.png") as image:
            assert image.width > image.height  # one task: one row of two
            assert len(image.convert("RGB").getcolors(100_000)) > 100

    def test_a_line_that_was_cut_off_is_no_record(self, tmp_path):
        file = tmp_path / "runs.jsonl"
        file.write_text(json.dumps({"key": "a"}) + '\n{"key": "b", "ro')
        assert dict(read_records(file)) == {"a": {"key": "a"}}
        assert dict(read_records(tmp_path / "none")) == {}


TINY = ["tasks=[digits]", "presets=[1f1b,wild]", "seeds=[0,1]", "jobs=2", "trainer.max_epochs=1"]
TINY += [
    "trainer.limit_train_batches=8",
    "trainer.limit_val_batches=2",
    "model.net.width=4",
]
TINY += [
    "+compare.contenders.wild={strategy: pipedream, num_microbatches: 1, optimizer: {lr: 1e30}}"
]


ALONE = [*TINY, "workers=1"]  # which runs all stages, and starts nobody else


@pytest.fixture(scope="module", params=["forked", more("typed")])
def folder(request, tmp_path_factory):
    """What a comparison has written to; beside its files, what it printed."""
    folder = tmp_path_factory.mktemp("comparison")
    if request.param == "forked":
        text = compared_by_forks(folder)
    else:
        script = [sys.executable, "recipes/train.py", EXPERIMENT, f"hydra.run.dir={folder}"]
        typed = Command(arguments=[*script, *TINY], env={"COLUMNS": "120"}, folder=ROOT)
        with Commands({"compare": typed}) as commands:
            text = commands.output("compare")
    (folder / "printed").write_text(text)
    return folder


def compared_by_forks(folder):
    """Do what the command does that a user types, but for the interpreters that it starts."""
    console = Console(record=True, width=120)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.compare.subprocess.run", forked)
        patch.setattr("recipes.compare.get_console", lambda: console)
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = compose("train", [EXPERIMENT, f"paths.output_dir={folder}", *ALONE])
            runs = plan_runs(cfg, handed_on(ALONE))
        report(train_all(runs, folder / "runs.jsonl", folder / "runs", jobs=cfg.jobs), folder)
    return console.export_text()


def forked(command, stdout, stderr, env, check):
    arguments = list(map(str, command))
    Forked(Command(arguments=arguments, is_forked=True, folder=ROOT), env, stdout.name).wait()


@pytest.fixture
def printed(folder):
    return (folder / "printed").read_text()


@pytest.mark.multi
@pytest.mark.timeout(260)
class TestComparison:
    """Two contenders, one of which does not train, and two seeds, as a user compares them."""

    def test_the_table_has_both_and_says_which_diverged(self, printed):
        assert re.search(r"1f1b +│ 0\.\d{4} ± 0\.\d{4} │ +\d\.\d{4} ± .* 0 of 2", printed)
        assert re.search(r"wild +│ +diverged │ +diverged │ +│ +│ +2 of 2", printed)

    def test_files_hold_all_curves(self, folder):
        lines = list(csv.DictReader((folder / "runs.csv").read_text().splitlines()))
        trained = [line for line in lines if line["contender"] == "1f1b"]
        for seed in "01":
            steps = [line["step"] for line in trained if line["seed"] == seed and line["loss"]]
            assert steps == [str(n + 1) for n in range(8)]
        assert {line["status"] for line in lines if line["contender"] == "wild"} == {"diverged"}
        with Image.open(folder / "curves.png") as image:
            assert image.width > 1000

    @pytest.mark.exhaustive
    def test_a_stopped_comparison_goes_on_with_what_is_missing(self, folder, plan, capsys):
        results = folder / "runs.jsonl"
        before = dict(read_records(results))
        runs = plan(*TINY)
        first = runs[0].key
        results.write_text("".join(json.dumps(r) + "\n" for k, r in before.items() if k != first))
        runs += plan(*TINY, "presets=[1f1b]", "seeds=[0]", "stages=[net.nowhere]")
        records = train_all(runs, results, folder / "again", jobs=2)

        assert [record["key"] for record in records] == [run.key for run in runs]
        trained = {place.name for place in (folder / "again").iterdir()}
        assert trained == {first, runs[-1].key}
        assert losses(records[0]) == losses(before[first])  # to the last bit
        # what failed is told, and is not finished
        assert (records[-1]["status"], records[-1]["rows"]) == ("failed", [])
        assert "net.nowhere" in capsys.readouterr().out
        assert dict(read_records(results)).keys() == before.keys()


def losses(one):
    return [row["loss"] for row in one["rows"] if "loss" in row]
