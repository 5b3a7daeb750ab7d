"""Show the stagger of a real run, and what one late worker does to the others.

    python -m benchmarks stagger

Four workers train with cyclic_dp, their compute emulated by sleeping (200 ms a step), twice: once
undisturbed, once with the last worker late by 30 % of a step, in one step. Printed are the starts
of the steps behind worker 0's, in steps, and by how much each worker's later starts moved.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import lightning as L

from benchmarks.data_parallel.fits import Case, Net, fit
from benchmarks.rounds import quiet, result, start

NUM_STEPS, LATE_STEP = 24, 12
SMOKE = ("--workers", "2", "--step-s", "0.02")


class Clock(L.Callback):
    """Note when steps begin, and be late in one of them."""

    def __init__(self, late_s: float) -> None:
        self._late_s = late_s
        self.starts: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, k: int) -> None:
        self.starts.append(time.monotonic())
        if k == LATE_STEP and trainer.global_rank == trainer.world_size - 1:
            time.sleep(self._late_s)


def work(num_workers: int, step_s: float, late_s: float) -> None:
    """Be one worker; print when each of its steps began, undisturbed and with one that is late."""
    quiet()
    case = Case(
        num_workers=num_workers, step_s=step_s, width=64, depth=8, batch=4, num_steps=NUM_STEPS,
        rounds=1,
    )  # fmt: skip
    clocks = Clock(0.0), Clock(late_s)
    for clock in clocks:
        fit(case, "cyclic_dp", Net(case), shards=num_workers, callbacks=[clock])
    result([clock.starts for clock in clocks])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--workers", type=int, default=4, help="how many (4)")
    parser.add_argument("--step-s", type=float, default=0.2, help="compute of a step (0.2)")


def run(args: argparse.Namespace) -> None:
    """Run both and print what they show."""
    late_s = 0.3 * args.step_s
    found = start("stagger", [args.workers, args.step_s, late_s], args.workers)
    calm, late = ([[s - starts[0][2] for s in each] for each in starts]
                  for starts in zip(*found, strict=True))  # fmt: skip
    step_s = median(b - a for a, b in zip(calm[0][4:], calm[0][5:], strict=False))
    print(f"one step takes {1000 * step_s:.0f} ms; starts behind worker 0, in steps:")
    for t in range(2, NUM_STEPS, 3):
        behind = "  ".join(f"w{w} {(each[t] - calm[0][t]) / step_s:5.2f}"
                           for w, each in enumerate(calm))  # fmt: skip
        print(f"  step {t:2}:  {behind}")
    last = args.workers - 1
    print(f"worker {last} late by {late_s / step_s:.2f} steps in step {LATE_STEP}: ", end="")
    print("starts moved by, in steps:")
    for t in range(LATE_STEP, LATE_STEP + 8):
        moved = [
            (after[t] - after[LATE_STEP] - before[t] + before[LATE_STEP]) / step_s
            for after, before in zip(late, calm, strict=True)
        ]
        print(f"  step {t:2}:  " + "  ".join(f"w{w} {x:5.2f}" for w, x in enumerate(moved)))
