"""Train a GPT whose weights and optimizer state lie on a disk, under limits, beside one in memory.

    python -m benchmarks tiers                              61 M weights, 1 worker
    python -m benchmarks tiers --disk /scratch --rounds 5
    python -m benchmarks tiers --preset 1f1b --batch 8 --num-microbatches 4     a pipeline

Each contender is a process of its own, with the same weights and batches. Those with a limit have
their layers on the meta device, and weights in a file of safetensors, which nobody reads as a
whole. Limits are the least, the least with which all weights stay in memory, one with which all
stays, and two between these. "planned" is what the
plan counts (weights, gradients, activations, optimizer state), "measured" how much the system says
that the process grew at most since before its weights were made. Ratios of steps are of the same
round: median (lowest - highest).

At last the least limit and the run in memory get a real cap of the system (a memory cgroup, as
root), of what the plan says for the first and 100 MB more: which of them trains?
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.gpu.fits import LitGPT
from benchmarks.memory.sparse_states import Clock as PlainClock
from benchmarks.pipeline.model import Case, make_gpt
from benchmarks.rounds import command_of, environment, free_port, quiet, result, results_in, spread
from lightning_cyclic import CyclicStrategy, PipelineStrategy
from lightning_cyclic.runtime.bits import digest

SMOKE = (
    "--rounds", "1", "--num-steps", "4", "--width", "64", "--depth", "2", "--words", "100",
    "--length", "8", "--stages", "4", "--no-cap",
)  # fmt: skip
WARM_UP = 2
MB = 1e6
BESIDES = 100 * MB  # what no plan counts: within layers, and of an update
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Clock(PlainClock):
    """Measure steps, and hear what the plan says."""

    planned = 0.0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if isinstance(trainer.strategy, CyclicStrategy | PipelineStrategy):
            planned = trainer.strategy.planned_memory(0)
            self.planned = 0.0 if planned is None else planned.total


def work(options: dict[str, Any], limit_bytes: int | None) -> None:
    """Be one contender."""
    args = argparse.Namespace(**options)
    quiet(args.threads)
    fit(small(args), None if limit_bytes is None else 10**9)
    before = grown_to(reset=True)
    trainer, module, clock = fit(args, limit_bytes)
    grown, plan = grown_to() - before, getattr(trainer.strategy, "plan", None)
    digests = [int(digest(p)) for p in module.parameters()]
    result({
        "step_s": median(clock.seconds[WARM_UP:]), "grown": grown, "planned": clock.planned,
        "moved": sum(plan.tiers.moved) if plan and plan.tiers else 0, "digests": digests,
        "weights": sum(plan.tiers.weights) if plan and plan.tiers else 0,
        "before": before,
    })  # fmt: skip


def fit(args: argparse.Namespace, limit_bytes: int | None) -> tuple[L.Trainer, LitGPT, Clock]:
    """Train."""
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=strategy_of(args, limit_bytes), default_root_dir=tempfile.gettempdir(),
        use_distributed_sampler=False,
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    case = case_of(args)
    shape = (args.batch, args.length)
    rows: Any = [torch.randint(args.words, shape, generator=g) for _ in range(args.num_steps)]
    module = LitGPT(case if limit_bytes is None else replace(case, device="meta"))
    if limit_bytes is not None:
        module.gpt.weights_path = weights_of(args)  # type: ignore[assignment]
    trainer.fit(module, DataLoader(rows, batch_size=None))
    return trainer, module, clock


def case_of(args: argparse.Namespace) -> Case:
    """Return what is trained."""
    return Case(
        name="tiers", num_workers=1, num_stages=1, num_microbatches=1, rows=args.batch,
        length=args.length, width=args.width, depth=args.depth, sleep_ms=0,
        num_steps=args.num_steps, rounds=args.rounds, heads=args.width // 64,
        vocabulary=args.words,
    )  # fmt: skip


def small(args: argparse.Namespace) -> argparse.Namespace:
    """Return a fit that loads what a fit needs of libraries."""
    changes = {"width": 64, "depth": 1, "stages": 1, "num_steps": 2}
    return argparse.Namespace(**vars(args) | changes)


def weights_of(args: argparse.Namespace) -> str:
    """Return the folder where the weights are."""
    return str(Path(args.weights) / f"{args.width}x{args.depth}")


def strategy_of(args: argparse.Namespace, limit_bytes: int | None) -> Any:
    """Return the strategy: of a run in memory the plain one, or a pipeline without a limit."""
    limit = {"memory_limit_bytes": limit_bytes, "disk": args.disk} if limit_bytes else {}
    if args.preset in PipelineStrategy.presets:
        return PipelineStrategy(
            args.preset, stages=args.stages, num_microbatches=args.num_microbatches, verify=False,
            **limit,
        )  # fmt: skip
    return CyclicStrategy(args.preset, stages=args.stages, **limit) if limit else "auto"


def grown_to(*, reset: bool = False) -> int:
    """Return the most bytes that this process has had in memory, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def contender(args: argparse.Namespace, limit_bytes: int | None, cap_bytes: int = 0) -> Any:
    """Start a contender; return what it found, or the text with which it ended."""
    env = environment(0, 1, "127.0.0.1", free_port(), "lo") | {
        "OMP_NUM_THREADS": str(args.threads),
        # else glibc keeps what is freed, the more the larger it is
        "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
    }
    env.pop("NODE_RANK")
    command = command_of("tiers", [vars(args), limit_bytes])
    with capped(cap_bytes) as join:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, preexec_fn=join, check=False
        )
    if done.returncode == 0:
        return results_in(done.stdout)[0]
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    return done.stderr


@contextmanager
def capped(num_bytes: int) -> Iterator[Any]:
    """Make a memory cgroup; yield what puts a process into it."""
    if not num_bytes:
        yield None
        return
    root, file = (V1, "memory.limit_in_bytes") if V1.is_dir() else (V2, "memory.max")
    group = root / f"lightning_cyclic_{os.getpid()}"
    group.mkdir()
    try:
        (group / file).write_text(str(num_bytes))
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        group.rmdir()


def least_of(args: argparse.Namespace) -> int:
    """Return the least limit with which a run begins, which it names where it is given less."""
    said = contender(args, 1)
    (least,) = re.findall(r"allowed: (\d+) or more", said)[:1]
    return int(least)


def least_with_weights(args: argparse.Namespace, low: int, high: int) -> int:
    """Return about the least limit with which no weights leave: halfway, halfway, ..."""
    short = argparse.Namespace(**vars(args) | {"num_steps": WARM_UP + 1})
    while high - low > high // 50 + 1:
        middle = (low + high) // 2
        if contender(short, middle)["weights"]:
            low = middle
        else:
            high = middle
    return high


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--preset", default="lockstep_dp")
    parser.add_argument("--num-microbatches", type=int, default=1, help="of a pipeline")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--words", type=int, default=2000)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--stages", type=int, default=14)
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--no-cap", action="store_true", help="try no cap of the system")


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as args.weights:  # not under a cap: whole models are made
        for each in (args, small(args)):
            make_gpt(case_of(each)).save_pretrained(weights_of(each))
        compare(args)


def compare(args: argparse.Namespace) -> None:
    """Print the table."""
    least = least_of(args)
    whole = contender(args, None)
    state = contender(args, 10**15)  # of which all fits
    most = int(state["planned"])
    stay = least_with_weights(args, least, most + 1)
    limits = [None, most + 1, (stay + most) // 2, stay, (least + stay) // 2, least]
    found: dict[int | None, list[Any]] = {limit: [] for limit in limits}
    for _ in range(args.rounds):
        for limit in limits:
            found[limit].append(contender(args, limit))
    print(f"{'limit':>12}{'on disk':>12}{'planned':>12}{'measured':>12}{'of it':>8}   step")
    for limit, ends in found.items():
        bad = next((end for end in ends if isinstance(end, str)), None)
        if bad is not None:
            raise SystemExit(bad)
        assert all(end["digests"] == whole["digests"] for end in ends), "other weights"
        measured = median(end["grown"] for end in ends)
        planned, moved = ends[0]["planned"], ends[0]["moved"] + ends[0]["weights"]
        ratios = [a["step_s"] / b["step_s"] for a, b in zip(ends, found[None], strict=True)]
        of_it = f"{measured / planned:.2f}" if planned else ""
        row = [f"{x / MB:.0f} MB" if x else "" for x in (limit, moved, planned, measured)]
        step = f"{median(e['step_s'] for e in ends):.3f} s" if limit is None else spread(ratios)
        print("".join(f"{x:>12}" for x in row) + f"{of_it:>8}   {step}")
    if not args.no_cap:
        cap = int(whole["before"] + found[least][0]["planned"] + BESIDES)
        print(f"under a cap of {cap / MB:.0f} MB for the process:")
        for name, limit in (("in memory", None), ("on disk", least)):
            end = contender(args, limit, cap)
            print(f"  {name:<10} {end if isinstance(end, str) else 'trains, with the same bits'}")
            assert isinstance(end, str) or end["digests"] == whole["digests"]
