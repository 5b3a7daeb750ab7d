"""Compare two checkouts of the package side by side: step times of replicated training.

    git worktree add ../before COMMIT
    python benchmarks/commits.py ../before                         2 workers on loopback
    python benchmarks/commits.py ../before --case net --only "4 workers, 1gbit"      (root)
    python benchmarks/commits.py ../before --case pipeline --only b4

The checkouts take turns, round after round, each with processes of its own; in each turn their
strategies take turns with DDP; pipelines with what needs nothing of the package. Figures are
ratios of this checkout to the other one, of seconds per step of the same round: median (lowest -
highest). Those of the references, which are the same code in both, say how quiet the machine was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from replicated import LOOPBACK, NETWORK, Case, run, spread

HERE = Path(__file__).parents[1]
STRATEGIES = ("ddp", "cyclic_dp", "cyclic_dp_v1")
PIPELINES = {  # table of pipeline.py -> its contenders, the reference first
    "a": ("loop plain", "loop 1f1b", "loop gpipe", "trainer 1f1b"),
    "b2": ("torch 1f1b", "loop 1f1b", "loop gpipe", "trainer 1f1b"),
    "b4": ("torch 1f1b", "loop 1f1b", "loop gpipe", "trainer 1f1b"),
    "d2": ("torch 1f1b", "loop cyclic_pipeline", "loop pipedream_2bw"),
    "d4": ("torch 1f1b", "loop cyclic_pipeline", "loop pipedream_2bw"),
}
ONE_ROUND = """
import json, sys
from pipeline import CASES, _sized
from pipeline_teams import run

def main():
    key, *names = sys.argv[1:]
    case = _sized(CASES[key])
    rounds = run(dict.fromkeys(names, case), case.num_steps, 1)
    print(json.dumps({n: max(w["wall"] for w in rounds[n][0]) for n in names}))

if __name__ == "__main__":
    main()
"""


def main() -> None:
    """Run the cases that were asked for, and print a row for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="a checkout of another commit")
    parser.add_argument("--case", choices=["loopback", "net", "pipeline"], default="loopback")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.case == "pipeline":
        for key in [key for key in PIPELINES if key.startswith(args.only)]:
            compare_pipelines(key, args.before, args.rounds)
        return
    for case in LOOPBACK if args.case == "loopback" else NETWORK:
        if args.only in case.name:
            compare(replace(case, rounds=2, strategies=STRATEGIES), args.before, args.rounds)


def compare_pipelines(key: str, before: Path, rounds: int) -> None:
    """Run a table of pipeline.py in turns, and print a row for each contender."""
    checkouts = (before.resolve(), HERE)
    seconds: dict[Path, list[dict[str, float]]] = {c: [] for c in checkouts}
    for k in range(rounds):
        for checkout in checkouts if k % 2 else reversed(checkouts):
            seconds[checkout].append(_one_round(checkout, key))
    old, new = (seconds[c] for c in checkouts)
    print(
        f"\n{key}: {PIPELINES[key][0]} {1000 * median(x[PIPELINES[key][0]] for x in new):.0f} ms"
    )
    for name in PIPELINES[key]:
        ratios = [a[name] / b[name] for a, b in zip(new, old, strict=True)]
        print(f"  {name:22} {spread(ratios)} of the time before", flush=True)


def _one_round(checkout: Path, key: str) -> dict[str, float]:
    at = checkout / "benchmarks"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (checkout, at)))}
    command = [sys.executable, "-c", ONE_ROUND, key, *PIPELINES[key]]
    done = subprocess.run(command, cwd=at, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(case: Case, before: Path, rounds: int) -> None:
    """Run a case in turns, and print a row for each strategy."""
    checkouts = (before.resolve(), HERE)
    seconds: dict[Path, dict[str, list[float]]] = {c: {} for c in checkouts}
    for k in range(rounds):
        for checkout in checkouts if k % 2 else reversed(checkouts):
            os.environ["PYTHONPATH"] = str(checkout)
            for s, each in run(case).items():
                seconds[checkout].setdefault(s, []).append(min(taken.step_s for taken in each))
    old, new = (seconds[c] for c in checkouts)
    print(f"\n{case.name}: cyclic_dp {1000 * median(new['cyclic_dp']):.1f} ms per step")
    for s in STRATEGIES:
        ratios = [a / b for a, b in zip(new[s], old[s], strict=True)]
        print(f"  {s:14} {spread(ratios)} of the time before")


if __name__ == "__main__":
    main()
