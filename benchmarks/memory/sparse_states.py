"""Compare training with compressed states (SAMO) with dense training, side by side in one run.

    python -m benchmarks sparse_states                       90 %, 4 layers of 1024 x 1024
    python -m benchmarks sparse_states --sparsity 0.8 --width 2048 --batch 128

    python -m benchmarks sparse_states --workers 2 --rate 1gbit
                             under cyclic_dp, in network namespaces with a rate limit (root)

All contenders train the same network from the same weights, one after the other, round after
round; on one device a step is the median of its fit, on several workers the mean behind the
warm-up. Ratios are of the same round: median (lowest - highest). "bf16-mixed" is dense mixed
precision, with float32 weights that autocast rounds in each forward; "bf16-true" has no master
weights at all, and is what computes the least.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.data_parallel.fits import Case, timed
from benchmarks.data_parallel.hosts import Hosts
from benchmarks.rounds import quiet, result, spread, start
from lightning_cyclic import SparseStatePrecision

WARM_UP = 5
SMOKE = (
    "--rounds", "1", "--num-steps", "10", "--width", "32", "--depth", "2", "--batch", "8",
)  # fmt: skip
CONTENDERS = ("bf16-mixed", "bf16-true", "compressed")


class Net(L.LightningModule):
    """A chain of layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x).float(), y.float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Clock(L.Callback):
    """Measure steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began_s = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began_s)


def flags_of(name: str, sparsity: float) -> dict[str, Any]:
    """Return the Trainer's flags of a contender."""
    if name == "compressed":
        return {"plugins": [SparseStatePrecision(sparsity=sparsity)]}
    return {"precision": name}


def work(options: dict[str, Any]) -> None:
    """Be one of several workers; worker 0 prints the seconds of all contenders."""
    args = argparse.Namespace(**options)
    quiet(args.threads)
    case = Case(
        num_workers=args.workers, step_s=0, width=args.width, depth=args.depth,
        batch=args.batch, rate=args.rate, num_steps=args.num_steps, rounds=args.rounds,
    )  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for k in range(args.rounds + 1):
        for name in CONTENDERS:
            module, flags = Net(args.width, args.depth), flags_of(name, args.sparsity)
            taken = timed(case, "cyclic_dp", module, shards=args.workers, **flags)
            if k > 0:  # the first warms caches
                found[name].append(taken.step_s)
    if os.environ["NODE_RANK"] == "0":
        result(found)


def measured(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of a step of each contender, round by round."""
    if args.workers > 1:
        network = Hosts(args.workers, args.rate) if args.rate else None
        (several,) = start("sparse_states", [vars(args)], args.workers, network)
        return dict(several)
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for k in range(args.rounds + 1):
        for name in CONTENDERS:
            seconds = step_s(name, args)
            if k > 0:  # the first warms caches
                found[name].append(seconds)
    return found


def step_s(name: str, args: argparse.Namespace) -> float:
    """Train; return the seconds of a step."""
    clock, how = Clock(), flags_of(name, args.sparsity)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **how,
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    data = [torch.randn(args.batch, args.width, generator=g) for _ in range(args.num_steps)]
    rows: Any = [(x, x) for x in data]
    trainer.fit(Net(args.width, args.depth), DataLoader(rows, batch_size=None))
    return median(clock.seconds[WARM_UP:])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--num-steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rate", default="", help='of every link, "1gbit"; [loopback]')


def run(args: argparse.Namespace) -> None:
    """Run all contenders, and print a row for each."""
    quiet(args.threads)
    found = measured(args)
    where = f", {args.workers} workers {args.rate}" if args.workers > 1 else ""
    print(f"{args.depth} layers of {args.width} x {args.width}, batches of {args.batch}{where}")
    for name, seconds in found.items():
        columns = [f"{1000 * median(seconds):7.1f} ms"]
        for other in CONTENDERS[:2]:
            ratios = [a / b for a, b in zip(seconds, found[other], strict=True)]
            columns.append(f"{spread(ratios)} of {other}'s")
        print(f"  {name:12} " + ", ".join(columns), flush=True)
