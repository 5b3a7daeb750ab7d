"""Compare two checkouts of the package side by side: step times of this one over the other's.

    git worktree add ../before COMMIT
    python -m benchmarks commits ../before                         2 workers on loopback
    python -m benchmarks commits ../before --case net --only "4 workers, 1gbit"      (root)
    python -m benchmarks commits ../before --case pipeline --only b4

The checkouts take turns, round after round, each with processes of its own; in each turn their
strategies take turns with DDP; pipelines with what needs nothing of the package. Figures are
ratios of this checkout to the other one, of seconds per step of the same round: median (lowest -
highest). Those of the references, which are the same code in both, say how quiet the machine was.

Each checkout runs its own benchmarks, which know its interfaces. One in which benchmarks/ was no
package yet runs its old pipeline scripts, and for replicated training those of this checkout,
which ask for public names alone. One older than those scripts is not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeAlias

from benchmarks.data_parallel.fits import Case
from benchmarks.data_parallel.replicated import LOOPBACK, NETWORK, chosen, measure
from benchmarks.rounds import ROOT, command_of, results_in, spread

STRATEGIES = ("ddp", "cyclic_dp", "cyclic_dp_v1")
PIPELINES = {  # table of pipeline -> its contenders, the reference first
    "a": ("loop plain", "loop 1f1b", "loop gpipe", "trainer 1f1b"),
    "b2": ("torch 1f1b", "loop 1f1b", "loop gpipe", "trainer 1f1b"),
    "b4": ("torch 1f1b", "loop 1f1b", "loop gpipe", "trainer 1f1b"),
    "d2": ("torch 1f1b", "loop cyclic_pipeline", "loop pipedream_2bw"),
    "d4": ("torch 1f1b", "loop cyclic_pipeline", "loop pipedream_2bw"),
}
SMOKE = ("--only", "20 ms", "--rounds", "1", "--num-steps", "10", "--width", "64")
OLD_ROUND = """
import json, sys
from dataclasses import replace
from pipeline import CASES, _sized
from pipeline_teams import run

def main():
    key, changes, *names = sys.argv[1:]
    case = replace(_sized(CASES[key]), **json.loads(changes))
    rounds = run(dict.fromkeys(names, case), case.num_steps, 1)
    print("RESULT", json.dumps({n: max(w["wall"] for w in rounds[n][0]) for n in names}))

if __name__ == "__main__":
    main()
"""
Seconds: TypeAlias = dict[str, float]  # of a step, by contender


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("before", type=Path, help="a checkout of another commit")
    parser.add_argument("--case", choices=["loopback", "net", "pipeline"], default="loopback")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-steps", type=int, help="of a fit, or of a round")
    parser.add_argument("--width", type=int, help="features of every layer")
    parser.set_defaults(strategies=STRATEGIES)


def run(args: argparse.Namespace) -> None:
    """Run the cases that were asked for, and print a row for each contender."""
    before = args.before.resolve()
    if not (before / "lightning_cyclic").is_dir():
        raise SystemExit(f"{before}; allowed: a checkout of this repository; git worktree add")
    if args.case == "pipeline":
        sizes = {"num_steps": args.num_steps, "width": args.width}
        changes = {field: value for field, value in sizes.items() if value}
        for key in [key for key in PIPELINES if key.startswith(args.only)]:
            compare(key, before, args.rounds, partial(_pipelines, key, changes))
        return
    for case in chosen(LOOPBACK if args.case == "loopback" else NETWORK, args):
        brief = replace(case, rounds=2)
        compare(case.name, before, args.rounds, partial(_replicated, brief))


def compare(name: str, before: Path, rounds: int, one_round: Callable[[Path], Seconds]) -> None:
    """Let the checkouts take turns, and print a row for each contender, the reference first."""
    checkouts = (before, ROOT)
    seconds: dict[Path, list[Seconds]] = {c: [] for c in checkouts}
    for k in range(rounds):
        for checkout in checkouts if k % 2 else reversed(checkouts):
            seconds[checkout].append(one_round(checkout))
    old, new = (seconds[c] for c in checkouts)
    first, *_ = new[0]
    print(f"\n{name}: {first} {1000 * median(x[first] for x in new):.1f} ms per step")
    for each in new[0]:
        ratios = [a[each] / b[each] for a, b in zip(new, old, strict=True)]
        print(f"  {each:22} {spread(ratios)} of the time before", flush=True)


def _replicated(case: Case, checkout: Path) -> Seconds:
    os.environ["PYTHONPATH"] = str(checkout)
    return {s: min(x.step_s for x in fits) for s, fits in measure(case).items()}


def _pipelines(key: str, changes: dict[str, int], checkout: Path) -> Seconds:
    at = checkout / "benchmarks"
    paths, names = [checkout], PIPELINES[key]
    command = command_of("pipeline", [key, changes, *names])
    if (at / "pipeline_teams.py").exists():  # from before benchmarks/ was a package
        paths = [checkout, at]
        command = [sys.executable, "-c", OLD_ROUND, key, json.dumps(changes), *names]
    elif not (at / "__main__.py").exists():
        raise SystemExit(f"{checkout}; allowed: checkouts that have a pipeline benchmark")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(command, cwd=at, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found: Seconds = results_in(done.stdout)[-1]
    return found
