"""Compare rules for the weights of a pipeline: many trainings side by side, and one report.

    python recipes/train.py experiment=compare_pipelines

compare_runs.py     which runs there are, with the whole configuration of each
compare_one.py      one run, in a process of its own: its curve as a record
compare_report.py   the records as tables and CSV; compare_plot.py as a picture
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich import get_console

from recipes.compare_plot import plot_curves
from recipes.compare_report import Record, result_of, summaries, tables, write_csv
from recipes.compare_runs import Run, handed_on, plan_runs

_ONE = Path(__file__).with_name("compare_one.py")
_LAST_LINES = 3  # of a failed run's log that are shown


def compare_recipes(cfg: DictConfig) -> int:
    """Run the comparison that the command line asks for; print and keep what came of it.

    Returns:
        How many runs failed.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    runs = plan_runs(cfg, handed_on(HydraConfig.get().overrides.task))
    results = Path(cfg.results or folder / "runs.jsonl")
    records = train_all(runs, results, folder / "runs", jobs=cfg.jobs)
    report(records, folder)
    return sum(record["status"] == "failed" for record in records)


def report(records: Sequence[Record], folder: Path) -> None:
    """Write every curve and draw them; print the table."""
    write_csv(records, folder / "runs.csv")
    plot_curves(records, folder / "curves.png")
    console = get_console()
    console.print(*tables(summaries(records)))
    console.print(f"runs.csv and curves.png are in {os.path.relpath(folder)}")


def train_all(runs: Sequence[Run], results: Path, folder: Path, *, jobs: int = 1) -> list[Record]:
    """Train what is not finished yet, and add a line to the results for each run that ends.

    Args:
        runs: to train, in this order.
        results: JSON lines, one per finished run; a run that failed is not finished.
        folder: gets a folder with configuration and log for each run.
        jobs: runs side by side.

    Returns:
        One record per run, in their order.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    records = dict(read_records(results))
    left = [run for run in runs if run.key not in records]
    if len(left) < len(runs):
        get_console().print(f"{len(runs) - len(left)} of {len(runs)} runs are in {results.name}")
    with ThreadPoolExecutor(jobs) as pool, results.open("a") as lines:
        ends = [pool.submit(_train, run, folder) for run in left]
        try:
            for count, end in enumerate(as_completed(ends), start=1):
                record = end.result()
                records[record["key"]] = record
                if record["status"] != "failed":
                    lines.write(json.dumps(record) + "\n")
                    lines.flush()
                get_console().print(f"{count}/{len(left)}", result_of(record), markup=False)
        except BaseException:  # an interrupt: what has not begun is not begun
            pool.shutdown(cancel_futures=True)
            raise
    return [records[run.key] for run in runs]


def read_records(results: Path) -> Iterator[tuple[str, Record]]:
    """Read key and record of each finished run; a line that was cut off is none."""
    for line in results.read_text().splitlines() if results.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield record["key"], record


def _train(run: Run, folder: Path) -> Record:
    """Train one run in a fresh interpreter: none inherits another's heap, seeds or threads."""
    place = folder / run.key
    place.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(run.cfg, place / "run.yaml")
    record_file = place / "record.json"
    record_file.unlink(missing_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": str(run.cfg.threads)}
    with (place / "log.txt").open("w") as log:
        subprocess.run([sys.executable, _ONE, place], stdout=log, stderr=log, env=env, check=False)
    if record_file.exists():
        found = json.loads(record_file.read_text())
    else:
        last = (place / "log.txt").read_text().splitlines()[-_LAST_LINES:]
        found = {
            "status": "failed",
            "reason": "\n".join([f"see {place / 'log.txt'}", *last]),
            "rows": [],
        }
    return {"key": run.key, **run.names, "metric": run.cfg.task.metric, **found}
