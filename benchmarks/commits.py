"""Compare two checkouts of the package side by side: step times of replicated training.

    git worktree add ../before COMMIT
    python benchmarks/commits.py ../before                         2 workers on loopback
    python benchmarks/commits.py ../before --case net --only "4 workers, 1gbit"      (root)

The checkouts take turns, round after round, each with processes of its own; in each turn their
strategies take turns with DDP. Figures are ratios of this checkout to the other one, of seconds
per step of the same round: median (lowest - highest). DDP's own, which is the same code in both,
says how quiet the machine was.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from statistics import median

from replicated import LOOPBACK, NETWORK, Case, run, spread

HERE = Path(__file__).parents[1]
STRATEGIES = ("ddp", "cyclic_dp", "cyclic_dp_v1")


def main() -> None:
    """Run the cases that were asked for, and print a row for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="a checkout of another commit")
    parser.add_argument("--case", choices=["loopback", "net"], default="loopback")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for case in LOOPBACK if args.case == "loopback" else NETWORK:
        if args.only in case.name:
            compare(replace(case, rounds=2, strategies=STRATEGIES), args.before, args.rounds)


def compare(case: Case, before: Path, rounds: int) -> None:
    """Run a case in turns, and print a row for each strategy."""
    checkouts = (before.resolve(), HERE)
    seconds: dict[Path, dict[str, list[float]]] = {c: {} for c in checkouts}
    for k in range(rounds):
        for checkout in checkouts if k % 2 else reversed(checkouts):
            os.environ["PYTHONPATH"] = str(checkout)
            for s, each in run(case).items():
                seconds[checkout].setdefault(s, []).append(min(x for x, _ in each))
    old, new = (seconds[c] for c in checkouts)
    print(f"\n{case.name}: cyclic_dp {1000 * median(new['cyclic_dp']):.1f} ms per step")
    for s in STRATEGIES:
        ratios = [a / b for a, b in zip(new[s], old[s], strict=True)]
        print(f"  {s:14} {spread(ratios)} of the time before")


if __name__ == "__main__":
    main()
