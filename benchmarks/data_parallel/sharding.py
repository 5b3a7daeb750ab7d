"""Compare cyclic_zero with Lightning's FSDP2 and DDP side by side in one run.

    python -m benchmarks sharding                          2, 4 and 8 workers on loopback
    python -m benchmarks sharding --case late              over links that are late (root)
    python -m benchmarks sharding --case late --slower 10  so slow that the host's work is small
    python -m benchmarks sharding --case memory            the peak of a rank's memory
    python -m benchmarks sharding --only "4 workers"       cases whose name contains this
    python -m benchmarks sharding --table                  what is expected of large clusters

Step times are measured as in replicated.py: every case starts its workers once; each trains the
same module with one strategy after the other, round after round. Figures are ratios to FSDP2 and
to DDP of the same round: median (lowest - highest). In brackets stands what the simulator says;
FSDP2, which is no plan, has the formula of sharded_lockstep.py, whose collectives are in compute's
way: on CPUs FSDP2 waits for each. "fsdp2/ahead" asks for its gathers one block ahead.

A steady step is one of those from the fourth behind the warm-up to the start of the last: of such
steps the simulator speaks, without the flush at the end. It knows nothing of the work of the host
(Python, copies, threads of gloo, on cores that workers share). --slower makes that small beside
what is slept and sent: both take so many times as long, and latencies, too.

Memory is that of the rank with the most, in processes that train with one strategy: the peak of
what is anonymous (VmHWM less file pages), beyond what there was behind a fit of the same strategy
with a tiny module, so that what Python and torch take is not in it. "steps" is the peak from the
fourth step behind the warm-up to the last step, "account" what the package says of it; "fit" that
from the making of the module to the end of the fit, where validation and checkpoints would have
the whole module.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from torch.distributed.fsdp import fully_shard

from benchmarks.data_parallel.fits import STEADY_FROM, WARM_UP, Case, Net, Taken, in_turn, timed
from benchmarks.data_parallel.late_links import LateLinks
from benchmarks.data_parallel.replicated import BYTES_PER_S, LATENCY_S, chosen
from benchmarks.data_parallel.sharded_lockstep import best_step_s
from benchmarks.data_parallel.sharded_lockstep import step_s as lockstep_step_s
from benchmarks.rounds import quiet, result, spread, start
from lightning_cyclic import make_plan
from lightning_cyclic.plan import programs_of
from lightning_cyclic.registration import make_strategy
from lightning_cyclic.runtime.whole_step.session import auto_stages
from lightning_cyclic.simulate import (
    Costs,
    Network,
    lockstep,
    memory,
    parse_bandwidth,
    parse_bytes,
    show_seconds,
    simulate,
)

SMOKE = (
    "--only", "2 workers, 200", "--rounds", "1", "--num-steps", "13", "--width", "16",
    "--step-s", "0.01",
)  # fmt: skip
# behind a slash: the number of stages, or what FSDP2 is told to do
STRATEGIES = (
    "ddp", "fsdp2", "fsdp2/ahead", "lockstep_dp", "cyclic_dp", "cyclic_zero",
)  # fmt: skip
SLEPT = Case(
    name="", num_workers=0, step_s=0.2, width=256, depth=8, batch=8, rate="", num_steps=18,
    rounds=3, strategies=("alone", *STRATEGIES),
)  # fmt: skip
LOOPBACK = [
    *(replace(SLEPT, name=f"{n} workers, 200 ms slept", num_workers=n) for n in (2, 4, 8)),
    replace(
        SLEPT, name="2 workers, real compute", num_workers=2, step_s=0, width=512, batch=96,
        num_steps=60,
    ),
]  # fmt: skip
LATE_BYTES_PER_S = 1.25e8  # 1 Gbit/s
LATE_S = {
    f"{n} workers, 1 Gbit/s, {1000 * latency_s:g} ms": (n, latency_s)
    for n, latency_s in [(2, 1e-3), (4, 5e-4), (4, 1e-3), (4, 5e-3), (8, 1e-3)]
}
LATE = [replace(SLEPT, name=name, num_workers=n) for name, (n, _) in LATE_S.items()]
MEMORY = [
    replace(
        SLEPT, name=f"{n} workers, {depth} blocks", num_workers=n, step_s=0, width=1024,
        depth=depth, num_steps=STEADY_FROM + 4, rounds=2,
        strategies=(
            "ddp", "fsdp2", "cyclic_dp", "cyclic_zero", f"cyclic_zero/{depth}",
        ),
    )
    for n, depth in [(2, 16), (4, 16), (8, 16)]
]  # fmt: skip
CASES = {"loopback": LOOPBACK, "late": LATE, "memory": MEMORY}


# ---------------------------------------------------------------------- one worker


def strategy_of(name: str, case: Case) -> Any:
    """Return what the Trainer is given for a name of STRATEGIES."""
    if name == "alone":
        return SingleDeviceStrategy("cpu")
    if name.startswith("fsdp2"):
        return ModelParallelStrategy(data_parallel_size=case.num_workers, tensor_parallel_size=1)
    preset, _, stages = name.partition("/")
    return make_strategy(preset, stages=int(stages)) if stages else name


def make(name: str, case: Case) -> Any:
    """Return the module; for FSDP2 one that shards its blocks."""
    module = Net(case)
    if name.startswith("fsdp2"):

        def configure_model(self: Any) -> None:
            mesh = self.device_mesh["data_parallel"]
            shard(list(self.net), self.net, mesh, ahead=name == "fsdp2/ahead")

        kind = type(module)
        module.__class__ = type(kind.__name__, (kind,), {"configure_model": configure_model})
    return module


def shard(blocks: Sequence[Any], root: Any, mesh: Any, *, ahead: bool) -> None:
    """Shard the blocks of what a step calls, and that, by FSDP2."""
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(root, mesh=mesh)
    if ahead:  # streams, by which gathers run ahead by themselves, are what CPUs do not have
        root._set_unshard_async_op(True)
        for before, block in zip(blocks, blocks[1:], strict=False):
            before.set_modules_to_forward_prefetch([block])
            block.set_modules_to_backward_prefetch([before])


class Peak:
    """Measure the peak of this process's anonymous memory, beyond what there is now."""

    def __init__(self) -> None:
        self._base = self._anonymous("VmRSS")
        self.begin()

    def begin(self) -> None:
        """Forget the peak so far, and what allocators keep of memory that was freed."""
        ctypes.CDLL(None).malloc_trim(0)  # of glibc
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def bytes(self) -> int:
        """Return the peak since."""
        return self._anonymous("VmHWM") - self._base

    @staticmethod
    def _anonymous(name: str) -> int:
        with open("/proc/self/status") as file:
            lines = [line.split() for line in file]
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1] == "kB"}
        return 1024 * (kib[name] - kib["RssFile"] - kib["RssShmem"])


def weigh(case: Case, name: str) -> dict[str, int]:
    """Train once; return the peaks of this process, in bytes."""
    tiny = replace(case, width=16, num_steps=WARM_UP + 2)
    timed(tiny, strategy_of(name, tiny), make(name, tiny), shards=case.num_workers)
    gc.collect()
    peak, found = Peak(), {"fit": 0, "steps": 0}

    class Scale(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, k: int) -> None:
            if k == STEADY_FROM:
                found["fit"] = peak.bytes()
                peak.begin()
            if k == case.num_steps - 1:  # whose end brings all parameters to everybody
                found["steps"] = peak.bytes()

    strategy, module = strategy_of(name, case), make(name, case)
    timed(case, strategy, module, shards=case.num_workers, callbacks=[Scale()])
    found["fit"] = max(found["fit"], peak.bytes())
    return found


def train(case: Case, name: str) -> Taken:
    """Train once."""
    shards = 1 if name == "alone" else case.num_workers
    return timed(case, strategy_of(name, case), make(name, case), shards=shards)


def work(case: dict[str, Any], weighed: str = "") -> None:
    """Be one worker; print the peaks of one strategy, or (worker 0) the seconds of all."""
    quiet()
    if weighed:
        result(weigh(Case(**case), weighed))
        return
    found = in_turn(Case(**case), train)
    if os.environ["NODE_RANK"] == "0":
        result(found)


# ---------------------------------------------------------------------- what is expected


class Link(NamedTuple):
    """Say how late each link is, and how much it carries."""

    latency_s: float
    bytes_per_s: float


def link_of(case: Case, slower: float) -> Link | None:
    """Return what links the workers of a case, so many times slower; None for loopback."""
    if case.name not in LATE_S:
        return None
    _, latency_s = LATE_S[case.name]
    return Link(slower * latency_s, LATE_BYTES_PER_S / slower)


def predicted_s(case: Case, name: str, compute_s: float, link: Link | None) -> float:
    """Return the seconds per step by the simulator, from the compute time measured alone."""
    n, num_bytes = case.num_workers, case.model_bytes
    latency_s, bytes_per_s = link or Link(0.0, BYTES_PER_S)
    network = Network(latency_s=LATENCY_S + latency_s, bandwidth_bytes_per_s=bytes_per_s)
    blocks = Costs.even(case.depth, compute_s=compute_s, model_bytes=num_bytes)
    if name == "ddp":
        return lockstep(blocks, network, n, bucket_bytes=25 << 20).step_s
    if name.startswith("fsdp2"):
        overlaps = name == "fsdp2/ahead"
        return lockstep_step_s(blocks, network, n, algorithm="ring", overlaps=overlaps)
    plan = plan_of(case, name)
    costs = Costs.even(plan.num_stages, compute_s=compute_s, model_bytes=num_bytes)
    return simulate(programs_of(plan), costs, network, plan).step_s


def accounted_bytes(case: Case, name: str) -> float | None:
    """Return what the package's own account says of a strategy; None of what is no plan."""
    if name == "ddp" or name.startswith("fsdp2"):
        return None
    plan = plan_of(case, name)
    costs = Costs.even(plan.num_stages, model_bytes=case.model_bytes)
    return max(found.total for found in memory(plan, costs, state_per_param=1))  # momentum


def plan_of(case: Case, name: str) -> Any:
    """Return the plan of a strategy of the package."""
    preset, _, stages = name.partition("/")
    n, num_bytes = case.num_workers, case.model_bytes
    num_stages = int(stages) if stages else min(auto_stages(n, num_bytes), case.depth)
    return make_plan(preset, num_stages=num_stages, num_workers=n, num_steps=12)


# ---------------------------------------------------------------------- tables


def report_times(case: Case, slower: float) -> None:
    """Run a case, and print a row for each strategy."""
    link = link_of(case, slower)
    case = replace(case, step_s=slower * case.step_s)
    links = LateLinks(case.num_workers, *link) if link else None
    (found,) = start("sharding", [asdict(case)], case.num_workers, links)
    fits = {s: [Taken(*each) for each in found[s]] for s in found}
    wall = {s: [x.step_s for x in fits[s]] for s in fits}
    steady = {s: [x.steady_s for x in fits[s]] for s in fits}
    compute_s = median(steady["alone"])
    expected = {s: predicted_s(case, s, compute_s, link) for s in wall if s != "alone"}
    references = [s for s in ("fsdp2", "ddp") if s in wall]
    per_step = ", ".join(f"{s} {1000 * median(wall[s]):.0f}" for s in ("alone", *references))
    name = case.name if slower == 1 else f"{case.name}, {slower:g} times slower"
    print(f"\n{name}, {_mb(case.model_bytes)} of parameters; {_load()}")
    print(f"  ms per step: {per_step}")
    for s, expected_s in expected.items():
        columns = []
        for reference in references:
            ratios = [a / b for a, b in zip(wall[s], wall[reference], strict=True)]
            simulated = expected_s / expected[reference]
            columns.append(f"{spread(ratios)} [{simulated:.3f}] of {reference}'s time")
        columns.append(_beside(steady[s], expected_s))
        print(f"  {s:14} " + ", ".join(columns), flush=True)


def _beside(steady_s: Sequence[float], expected_s: float) -> str:
    """Print the time of a steady step, what is simulated, and one by the other."""
    ratios = spread([x / expected_s for x in steady_s])
    each = f"{1000 * median(steady_s):.0f} ms, simulated {1000 * expected_s:.0f}"
    return f"a steady step {each}: {ratios} of it"


def report_memory(case: Case) -> None:
    """Run each strategy by itself, in turn, and print a row for each."""
    # what is freed goes back to the system; else the C library keeps more than what is measured
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    found: dict[str, list[list[dict[str, int]]]] = {s: [] for s in case.strategies}
    for _ in range(case.rounds):
        for s, rounds in found.items():
            rounds.append(start("sharding", [asdict(case), s], case.num_workers))
    most = {
        s: {what: [max(rank[what] for rank in ranks) for ranks in rounds] for what in rounds[0][0]}
        for s, rounds in found.items()
    }
    print(f"\n{case.name}, {_mb(case.model_bytes)} of parameters; {_load()}")
    for s, peaks in most.items():
        columns = []
        for what in ("steps", "fit"):
            ratios = [a / b for a, b in zip(peaks[what], most["fsdp2"][what], strict=True)]
            columns.append(f"{what} {_mb(median(peaks[what])):>8}, {spread(ratios)} of fsdp2's")
        accounted = accounted_bytes(case, s)
        if accounted is not None:
            ratios = [steps / accounted for steps in peaks["steps"]]
            columns.append(f"account {_mb(accounted):>8}, steps {spread(ratios)} of it")
        print(f"  {s:14} " + "; ".join(columns), flush=True)


def report_table(args: argparse.Namespace) -> None:
    """Print what the simulator says of clusters that nobody has here."""
    step_s, num_bytes = args.step_s or 0.5, parse_bytes(args.model_bytes)
    bandwidth = parse_bandwidth(args.bandwidth)
    print(
        f"{args.model_bytes} of parameters, {show_seconds(step_s)} of compute, {args.bandwidth}; "
        "seconds per step, and cyclic_zero's ratio to the better lockstep"
    )
    for n in args.workers:
        # one for each worker; with more than 64, actions are too many. Where there are fewer
        # stages than workers, those that own one serve all others, over one port each
        num_stages = min(max(n, 8), 64)
        costs = Costs.even(num_stages, compute_s=step_s, model_bytes=num_bytes)
        ours = _simulated(n, num_stages, costs)
        for latency_s in (1e-6, 5e-5, 5e-4, 5e-3):
            began_s = time.perf_counter()
            network = Network(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
            ring_s = best_step_s(costs, network, n, "ring")
            doubling_s = best_step_s(costs, network, n, "doubling")
            mine_s = ours(network)
            better_s = min(ring_s, doubling_s)
            shown = f"{mine_s:.3f}, {mine_s / better_s:.2f}"
            print(
                f"  {n:4} workers, {num_stages} stages, {show_seconds(latency_s):>6}: "
                f"rings {ring_s:.3f}, doubling {doubling_s:.3f}, cyclic_zero {shown} "
                f"({time.perf_counter() - began_s:.0f} s to simulate)",
                flush=True,
            )


def _simulated(num_workers: int, num_stages: int, costs: Any) -> Callable[[Any], float]:
    """Return what simulates a step of cyclic_zero for a network; of 1024 workers in minutes."""
    plan = make_plan("cyclic_zero", num_stages=num_stages, num_workers=num_workers, num_steps=6)
    programs = programs_of(plan)
    return lambda network: simulate(programs, costs, network, plan).step_s


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _load() -> str:
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--case", choices=CASES, default="loopback")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--rounds", type=int, help="how often every strategy trains")
    parser.add_argument("--num-steps", type=int, help=f"of a fit, {WARM_UP} of them to warm up")
    parser.add_argument("--width", type=int, help="features of every layer")
    parser.add_argument("--step-s", type=float, help="of compute, slept where it is [0.2; 0.5]")
    parser.add_argument("--strategies", nargs="+", help="with alone first, fsdp2 and ddp")
    parser.add_argument(
        "--slower", type=float, default=1, help="how many times longer sleep and links take"
    )
    parser.add_argument("--table", action="store_true", help="simulate, and run nothing")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--model-bytes", default="100MB", help="of the table")
    parser.add_argument("--bandwidth", default="10Gbit/s", help="of the table")


def run(args: argparse.Namespace) -> None:
    """Run the cases that were asked for and print their tables."""
    if args.table:
        report_table(args)
        return
    for case in chosen(CASES[args.case], args):
        if args.case == "memory":
            report_memory(case)
        else:
            slept = case.step_s and args.step_s
            report_times(replace(case, step_s=slept) if slept else case, args.slower)
