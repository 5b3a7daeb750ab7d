"""Compare, on one GPU, all that it can show, in a few minutes: time, memory, bits, NCCL.

    python -m benchmarks gpu                                  GPT-2 medium, bfloat16
    python -m benchmarks gpu --only one,trace --minutes 3     some parts of it
    python -m benchmarks gpu --device cpu --smoke             does it still run?

Parts, one after the other, the most telling first; each is printed as it goes:

    share          ranks share the GPU over NCCL: what a communicator costs, whether the host waits
    nccl           the self-test over NCCL: every preset's bits, as many as there is time for
    one            one process: plain Lightning, accumulation, 1f1b and cyclic_dp
    pipelines      two ranks: torch's schedules and ours
    data_parallel  two ranks: DDP, FSDP2, cyclic_dp, cyclic_zero
    memory         pruned states; the peak of a step beside the account of the package
    trace          by which kernels and which Python 1f1b differs from accumulation

A part that fails says why, and the next one goes on; the status is 1 then. One that would not fit
into what is left of --minutes is left out. What needs ranks that share the GPU over NCCL is left
out where they may not: load NCCL 2.30 or later (LD_PRELOAD=/path/to/libnccl.so.2), and export
NCCL_MULTI_RANK_GPU_ENABLE=1. SHOW_ERRORS=1 shows tracebacks.

Figures are median (lowest - highest) over rounds in turn. A step is timed over all steps of a
round, so that the host may run ahead; MFU counts the operations of forward and backward by the
peak of the card in dense bfloat16. Activations are the peak within steps, less what lies between
them and the gradients. Random weights, no download.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from typing import NamedTuple

import torch

from benchmarks.gpu.ranks import last_line
from benchmarks.rounds import ROOT, quiet
from lightning_cyclic.errors import one_of
from lightning_cyclic.runtime.transport.shared_gpus import SETTING, loaded_nccl

LEAST_S = 15.0  # that a part needs to show anything
SMOKE = (
    "--layers", "4", "--width", "32", "--heads", "2", "--length", "16", "--rows", "1",
    "--vocabulary", "64", "--steps", "2", "--rounds", "1", "--micro", "4", "--presets", "1f1b",
)  # fmt: skip


class Part(NamedTuple):
    """Say what of the session a part is.

    Args:
        module: below this package; it has a function of the part's name.
        share: of the session's time that it has, if all parts are asked for.
        needs_nccl: whether it is of ranks that share the GPU over NCCL.
    """

    module: str
    share: float
    needs_nccl: bool = False


PARTS = {
    "share": Part("shared", 0.07, needs_nccl=True),
    "nccl": Part("shared", 0.2, needs_nccl=True),
    "one": Part("steps", 0.24),
    "pipelines": Part("pipelines", 0.17, needs_nccl=True),
    "data_parallel": Part("steps", 0.14, needs_nccl=True),
    "memory": Part("account", 0.1),
    "trace": Part("traces", 0.08),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    add = parser.add_argument
    add("--only", default="", help=f"some of {','.join(PARTS)}")
    add("--minutes", type=float, default=8.0, help="that all of it may take (8)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--out", default=os.environ.get("OUT", "outputs"), help="folder of the traces ($OUT, or "
        "outputs)")  # fmt: skip
    add("--presets", nargs="+", default=[], help="of the part nccl (all, as many as fit)")
    add("--rows", type=int, nargs="+", default=[2, 6], help="samples of a micro-batch: the first "
        "everywhere, all of them in the part one (2 6)")  # fmt: skip
    numbers = {
        "layers": (24, "of the model"), "width": (1024, "features"), "heads": (16, "per layer"),
        "length": (1024, "tokens of a sample"), "vocabulary": (50_257, "tokens there are"),
        "micro": (4, "micro-batches of a batch: N"), "steps": (6, "timed updates of a round"),
        "rounds": (3, "of each way, in turn, as long as there is time"),
    }  # fmt: skip
    for name, (default, meaning) in numbers.items():
        add(f"--{name}", type=int, default=default, help=f"{meaning} ({default})")


def run(args: argparse.Namespace) -> int:
    """Run the parts that were asked for; return the status of the process."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU; allowed: cuda where there is one, cpu; use --device cpu")
    names = chosen(args.only)
    quiet()
    print("\n".join(headline(args)), flush=True)
    missing = loaded_nccl().missing if args.device == "cuda" else ""
    begin, ended = time.monotonic(), {"ran": 0, "failed": 0, "left out": 0}
    for k, name in enumerate(names):
        left_s = begin + 60 * args.minutes - time.monotonic()
        part_s = left_s * share_of(name, names[k:])  # what others have left over, too
        print(f"\n{name}: {left_s:.0f} s are left", flush=True)
        if part_s < LEAST_S or (missing and PARTS[name].needs_nccl):
            why = f"ranks may not share the GPU: {missing}" if part_s >= LEAST_S else "no time"
            print(f"  left out: {why}", flush=True)
            ended["left out"] += 1
            continue
        ended["ran" if _ran(name, args, part_s) else "failed"] += 1
    taken_s = time.monotonic() - begin
    print(f"\n{', '.join(f'{n} {what}' for what, n in ended.items())}, in {taken_s:.0f} s")
    return int(ended["failed"] > 0)


def _ran(name: str, args: argparse.Namespace, part_s: float) -> bool:
    began_s = time.monotonic()
    module = import_module(f"benchmarks.gpu.{PARTS[name].module}")
    part: Callable[[argparse.Namespace, float], Iterator[str]] = getattr(module, name)
    try:
        for line in part(args, began_s + part_s):
            print(line, flush=True)
    except (Exception, SystemExit) as error:  # said, and the next one goes on
        print(f"  FAILED: {last_line(error)}", flush=True)
        return False
    print(f"  took {time.monotonic() - began_s:.0f} s", flush=True)
    return True


def chosen(only: str) -> list[str]:
    """Return the parts that were asked for, in the order of the session.

    Raises:
        SystemExit: a part that there is not.
    """
    asked = [name for name in only.split(",") if name] or list(PARTS)
    for name in asked:
        if name not in PARTS:
            raise SystemExit(one_of(name, list(PARTS), "--only", "leave it out to run all"))
    return [name for name in PARTS if name in asked]


def share_of(name: str, names: list[str]) -> float:
    """Return the share that a part has of the time of some."""
    return PARTS[name].share / sum(PARTS[each].share for each in names)


def headline(args: argparse.Namespace) -> Iterator[str]:
    """Yield what was measured: card, driver, versions, date, commit, model."""
    commit = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    yield f"{card() if args.device == 'cuda' else 'CPU'}, driver {_driver()}; {when}, {commit}"
    version, setting = loaded_nccl()
    nccl = ".".join(map(str, version)) or "none"
    cuda = torch.version.cuda
    yield f"torch {torch.__version__}, CUDA {cuda}, NCCL {nccl}, {SETTING}={setting!r}"
    yield (
        f"GPT-2 of {args.layers} layers of {args.width}, {args.micro} micro-batches of "
        f"{args.rows} x {args.length} tokens, bfloat16"
    )


def card() -> str:
    """Return the name of the GPU, without a context on it; the session's ranks have theirs."""
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.strip().splitlines() or ["unknown"])[0]
