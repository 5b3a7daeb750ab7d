"""Train by every rule for the weights of a pipeline, or every codec, and print where each ends.

    python -m benchmarks convergence --jobs 2            96 runs of about half a minute each
    python -m benchmarks convergence --seeds 0 --set tasks=[digits] 'presets=[1f1b,pipedream]'
    python -m benchmarks convergence --experiment compare_codecs

The runs are those of an experiment in conf/experiment, where models, data and learning rates
stand, with each of the optimizers: the convergence of small models that do learn, not their speed.
Each run has a process and one thread. A finished run is a line of OUT/runs.jsonl and is not
repeated, so that this can be stopped and started again; take another folder after a change of the
code. The last output is a Markdown table: final metric on the validation data and mean training
loss of the last tenth of the steps, mean ± standard deviation over the seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hydra import compose, initialize_config_dir

from benchmarks.rounds import ROOT
from recipes.compare import report, train_all
from recipes.compare_report import markdown_table, summaries
from recipes.compare_runs import handed_on, plan_runs

SMOKE = (
    "--seeds", "0", "--optimizers", "sgd", "--set", "tasks=[digits]", "presets=[1f1b]",
    "trainer.max_epochs=1", "trainer.limit_train_batches=4", "--jobs", "1",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument(
        "--experiment", default="compare_pipelines", help="of conf/experiment: compare_codecs"
    )
    parser.add_argument("--out", type=Path, help="a folder [outputs/EXPERIMENT]")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--optimizers", nargs="+", help="[those of the experiment's tasks]")
    parser.add_argument("--set", nargs="*", default=[], help="as on the recipes' command line")


def run(args: argparse.Namespace) -> bool:
    """Train what is missing, and print the table; return whether any run failed."""
    out = args.out or ROOT / "outputs" / args.experiment
    lists = [f"seeds={args.seeds}"]
    if args.optimizers:
        lists.append(f"optimizers=[{','.join(args.optimizers)}]")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", [f"experiment={args.experiment}", *lists, *args.set])
        runs = plan_runs(cfg, handed_on(args.set))
    records = train_all(runs, out / "runs.jsonl", out / "runs", jobs=args.jobs)
    report(records, out)
    print(markdown_table(summaries(records)))
    return any(record["status"] == "failed" for record in records)
