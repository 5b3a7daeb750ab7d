"""Show the stagger of a real run, and what one late worker does to the others.

    python benchmarks/stagger.py

Four workers train with cyclic_dp, their compute emulated by sleeping (200 ms a step), twice: once
undisturbed, once with the last worker late by 30 % of a step, in one step. Printed are the starts
of the steps behind worker 0's, in steps, and by how much each worker's later starts moved.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

from replicated import Case, _Batches, free_port, make_module

CASE = Case(name="", num_workers=4, step_s=0.2, width=64, depth=8, batch=4, rate="",
            num_steps=24, rounds=1)  # fmt: skip
LATE_STEP, LATE_S = 12, 0.3 * CASE.step_s


def work(late: bool) -> None:
    """Be one worker; print when each of its steps began."""
    warnings.filterwarnings("ignore")
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    import lightning_cyclic  # noqa: F401

    torch.set_num_threads(1)
    rank, starts = int(os.environ["NODE_RANK"]), []

    class Clock(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, k: int) -> None:
            starts.append(time.monotonic())
            if late and rank == CASE.num_workers - 1 and k == LATE_STEP:
                time.sleep(LATE_S)

    x = torch.randn(CASE.batch * CASE.num_steps * CASE.num_workers, CASE.width)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=CASE.num_workers, strategy="cyclic_dp",
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Clock()],
    )  # fmt: skip
    data = _Batches(torch.utils.data.TensorDataset(x, x), CASE.batch)
    trainer.fit(make_module(CASE), DataLoader(data, batch_size=None))
    print("RESULT " + json.dumps(starts), flush=True)


def run(late: bool) -> list[list[float]]:
    """Return when each step began, by worker, in seconds since worker 0's third step."""
    port, children = str(free_port()), []
    for rank in range(CASE.num_workers):
        env = os.environ | {
            "NODE_RANK": str(rank), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "WORLD_SIZE": str(CASE.num_workers), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        command = [sys.executable, __file__, "--worker", *(["--late"] if late else [])]
        children.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        )
    outputs = [child.communicate(timeout=300)[0].splitlines() for child in children]
    lines = [next(x for x in out if x.startswith("RESULT ")) for out in outputs]
    starts = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    return [[s - starts[0][2] for s in each] for each in starts]


def main() -> None:
    """Run both and print what they show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--late", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.late)
        return
    calm, late = run(late=False), run(late=True)
    step_s = statistics.median(b - a for a, b in zip(calm[0][4:], calm[0][5:], strict=False))
    print(f"one step takes {1000 * step_s:.0f} ms; starts behind worker 0, in steps:")
    for t in range(2, CASE.num_steps, 3):
        behind = "  ".join(f"w{w} {(each[t] - calm[0][t]) / step_s:5.2f}"
                           for w, each in enumerate(calm))  # fmt: skip
        print(f"  step {t:2}:  {behind}")
    last = CASE.num_workers - 1
    print(f"worker {last} late by {LATE_S / step_s:.2f} steps in step {LATE_STEP}: ", end="")
    print("starts moved by, in steps:")
    for t in range(LATE_STEP, LATE_STEP + 8):
        moved = [
            (after[t] - after[LATE_STEP] - before[t] + before[LATE_STEP]) / step_s
            for after, before in zip(late, calm, strict=True)
        ]
        print(f"  step {t:2}:  " + "  ".join(f"w{w} {x:5.2f}" for w, x in enumerate(moved)))


if __name__ == "__main__":
    main()
