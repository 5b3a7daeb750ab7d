"""Compare cyclic_dp, cyclic_dp_v1 and Lightning's DDP side by side in one run.

    python -m benchmarks replicated                          2 workers on loopback, real compute
    python -m benchmarks replicated --case net               2-8 workers in network namespaces with
                                                             a rate limit, compute emulated (root)
    python -m benchmarks replicated --case groups            8-32 workers there, those of a group
                                                             joined by faster links
    python -m benchmarks replicated --case unsteady          8 workers there, whose steps take now
                                                             longer, now shorter
    python -m benchmarks replicated --case groups --slower 5 compute and links so slow that the
                                                             host's own work is small beside them

Every case starts its workers once; each worker trains the same module with one strategy after
the other, round after round, so that a drift of the machine's speed meets all of them alike.
Figures are seconds per step from the end of the warm-up to the end of the last step everywhere
(flush and barrier included), as ratios to DDP of the same round: median (lowest - highest).
Beside them stands what the package's own simulator says for the measured step time, and what a
steady step took, without the meetings at both ends, by what is simulated.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from benchmarks.data_parallel.fits import WARM_UP, Case, Net, Taken, in_turn, timed
from benchmarks.data_parallel.hosts import Hosts
from benchmarks.rounds import quiet, result, spread, start
from lightning_cyclic import PRESETS, CyclicStrategy, make_plan
from lightning_cyclic.plan.presets import AXES
from lightning_cyclic.runtime.whole_step.session import auto_stages
from lightning_cyclic.simulate import Costs, Network, compare

# alone: every worker for itself; behind a slash: the sharding, where it is not the preset's, or
# the MiB of DDP's buckets, where they are not the 25 that it has by default; behind colons: the
# number of stages, and of groups
STRATEGIES = ("alone", "ddp", "ddp/2", "cyclic_dp", "cyclic_dp_v1", "cyclic_dp_v1/optimizer")
LATENCY_S = 2e-4  # gloo, per message, measured
BYTES_PER_S = 1.5e9  # of gloo on loopback
SHARE_OF_RATE = 0.96  # behind headers
SMOKE = (
    "--only", "20 ms", "--rounds", "1", "--num-steps", "10", "--width", "64",
    "--strategies", "alone", "ddp", "cyclic_dp", "cyclic_dp_v1/optimizer", "--slower", "1",
)  # fmt: skip

BRIEF = Case(
    name="2 workers, about 20 ms", num_workers=2, step_s=0, width=512, depth=8, batch=96,
    num_steps=70, rounds=7, strategies=STRATEGIES,
)  # fmt: skip
LOOPBACK = [
    BRIEF,
    replace(
        BRIEF, name="2 workers, about 200 ms", width=1024, depth=12, batch=200, num_steps=24,
        rounds=5,
    ),
]  # fmt: skip
NETWORK = [
    Case(
        name=f"{n} workers, {rate}, {step_s * 1000:.0f} ms",
        num_workers=n,
        step_s=step_s,
        width=width,
        depth=8,
        batch=8,
        rate=rate,
        num_steps=30,
        rounds=3,
        strategies=STRATEGIES,
    )
    for n, rate, step_s, width in [
        (2, "1gbit", 0.2, 640),
        (4, "1gbit", 0.2, 640),
        (8, "1gbit", 0.2, 640),
        (2, "100mbit", 0.2, 200),
        (4, "100mbit", 0.2, 200),
        (8, "100mbit", 0.2, 200),
    ]
]
GROUPS = [
    Case(
        name=f"{n} workers, {close} of them close, {rate}, {step_s * 1000:.0f} ms",
        num_workers=n,
        step_s=step_s,
        width=width,
        depth=8,
        batch=8,
        rate=rate,
        num_steps=24,
        rounds=3,
        strategies=("alone", "ddp", "ddp/1", "cyclic_dp:8", f"cyclic_dp:8:{n // close}"),
        close=close,
    )
    for n, close, rate, step_s, width in [
        (8, 2, "1gbit", 0.2, 640),
        (8, 4, "1gbit", 0.2, 640),
        (8, 2, "100mbit", 0.2, 200),
        (8, 4, "100mbit", 0.2, 200),
        (16, 4, "100mbit", 0.4, 200),
        (32, 4, "100mbit", 1.2, 200),
    ]
]  # fmt: skip
UNSTEADY = [
    Case(
        name=f"8 workers, 1gbit, 200 ms, {what}",
        num_workers=8,
        step_s=0.2,
        width=640,
        depth=8,
        batch=8,
        rate="1gbit",
        num_steps=38,
        rounds=3,
        strategies=("alone", "ddp", "cyclic_dp:8", "cyclic_dp:4"),
        jitter=jitter,
        slow=slow,
    )
    for what, jitter, slow in [
        ("steady", 0.0, 1.0),
        ("all of them unsteady by 20 %", 0.2, 1.0),
        ("one 1.3 times as slow for a third of the steps", 0.0, 1.3),
    ]
]
CASES = {
    "loopback": LOOPBACK, "net": NETWORK, "groups": GROUPS, "unsteady": UNSTEADY,
}  # fmt: skip


# ---------------------------------------------------------------------- one worker


def strategy_of(name: str, num_workers: int) -> Any:
    """Return what the Trainer is given for a name of STRATEGIES."""
    if name == "alone":
        return SingleDeviceStrategy("cpu")
    if ":" in name:
        preset, *numbers = name.split(":")
        num_stages, *groups = map(int, numbers)
        size: dict[str, Any] = {"group_size": num_workers // groups[0]} if groups else {}
        return CyclicStrategy(preset, stages=num_stages, **size)
    preset, _, sharding = name.partition("/")
    if preset == "ddp" and sharding:
        return DDPStrategy(bucket_cap_mb=float(sharding))
    if not sharding:
        return name
    axes = {axis: getattr(PRESETS[preset], axis) for axis in AXES}
    return CyclicStrategy(axes | {"sharding": sharding})


def train(case: Case, strategy: str) -> Taken:
    """Train once."""
    shards = 1 if strategy == "alone" else case.num_workers
    return timed(case, strategy_of(strategy, case.num_workers), Net(case), shards=shards)


def work(case: dict[str, Any]) -> None:
    """Be one worker: all strategies, round after round; worker 0 prints what they took."""
    quiet()
    found = in_turn(Case(**case), train)
    if os.environ["NODE_RANK"] == "0":
        result(found)


# ---------------------------------------------------------------------- all workers of a case


def measure(case: Case, benchmark: str = "replicated") -> dict[str, list[Taken]]:
    """Run a case's workers; return what fits took by strategy and round.

    Args:
        benchmark: whose `work` each of them does.
    """
    network = None
    if case.rate:
        burst = max(16_000, int(bytes_per_s(case) / 1000))  # a millisecond's
        network = Hosts(case.num_workers, case.rate, close=case.close, burst=f"{burst}b")
    (found,) = start(benchmark, [asdict(case)], case.num_workers, network)
    return {s: [Taken(*each) for each in fits] for s, fits in found.items()}


def bytes_per_s(case: Case) -> float:
    """Return what a link of a case carries."""
    if not case.rate:
        return BYTES_PER_S
    number, unit = case.rate[:-4], case.rate[-4:]
    return SHARE_OF_RATE * float(number) * {"gbit": 1e9, "mbit": 1e6}[unit] / 8


def slowed(case: Case, by: float) -> Case:
    """Return the same with compute and links that are so many times as slow."""
    rate = f"{bytes_per_s(case) / SHARE_OF_RATE / by * 8 / 1e6:g}mbit" if case.rate else ""
    name = f"{case.name}, {by:g} times slower"
    return replace(case, name=name, step_s=by * case.step_s, rate=rate)


def predicted_s(case: Case, preset: str, compute_s: float) -> float:
    """Ask the package's simulator for seconds per step, from the compute time measured alone.

    It knows of no unsteady workers: there it says what it would be if all were steady.
    """
    num_stages = min(auto_stages(case.num_workers, case.model_bytes), case.depth)
    groups: list[int] = []
    if ":" in preset:
        preset, *numbers = preset.split(":")
        num_stages, *groups = map(int, numbers)
    preset, _, sharding = preset.partition("/")
    is_ddp = preset == "ddp"
    plan = make_plan(
        "cyclic_dp" if is_ddp else preset,
        sharding=None if is_ddp else sharding or None,
        num_stages=num_stages,
        num_workers=case.num_workers,
        num_steps=12,
        group_size=case.num_workers // groups[0] if groups else 1,
    )
    costs = Costs.even(num_stages, compute_s=compute_s, model_bytes=case.model_bytes)
    bucket_bytes = (int(sharding) if is_ddp and sharding else 25) << 20
    found = compare(plan, costs, network_of(case), bucket_bytes=bucket_bytes)
    return found.lockstep.step_s if is_ddp else found.plan.step_s


def network_of(case: Case) -> Network:
    """Return the links of a case, for the simulator."""
    network = Network(latency_s=LATENCY_S, bandwidth_bytes_per_s=bytes_per_s(case))
    if case.close == 1:
        return network
    hosts = tuple(w // case.close for w in range(case.num_workers))
    inside = Network(latency_s=LATENCY_S, bandwidth_bytes_per_s=BYTES_PER_S)
    return replace(network, hosts=hosts, inside=inside)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--case", choices=list(CASES), default="loopback")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--rounds", type=int, help="how often every strategy trains")
    parser.add_argument("--num-steps", type=_steps, help=f"of a fit, {WARM_UP} of them to warm up")
    parser.add_argument("--width", type=int, help="features of every layer")
    parser.add_argument("--strategies", nargs="+", help="with alone and ddp first")
    parser.add_argument(
        "--slower", type=_factor, default=1, help="how many times longer compute and links take"
    )


def _factor(text: str) -> float:
    if (value := float(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text}; allowed: numbers above 0, as 10")
    return value


def _steps(text: str) -> int:
    if (value := int(text)) < WARM_UP + 2:
        raise argparse.ArgumentTypeError(f"{text}; allowed: from {WARM_UP + 2} on")
    return value


def run(args: argparse.Namespace) -> None:
    """Run the cases that were asked for and print their table."""
    for case in chosen(CASES[args.case], args):
        report(case if args.slower == 1 else slowed(case, args.slower))


def chosen(cases: list[Case], args: argparse.Namespace) -> list[Case]:
    """Return the cases that were asked for, changed as was asked for."""
    fields = ("rounds", "num_steps", "width", "strategies")
    changes = {name: value for name in fields if (value := vars(args)[name])}
    asked = [replace(case, **changes) for case in cases if args.only in case.name]
    if not asked:
        names = "; ".join(case.name for case in cases)
        raise SystemExit(f"--only {args.only!r}; allowed: what is in one of: {names}")
    return asked


def report(case: Case) -> None:
    """Run a case, and print a row for each strategy."""
    found = measure(case)
    compute_s = median(taken.steady_s for taken in found.pop("alone"))
    expected_s = {s: predicted_s(case, s, compute_s) for s in found}
    ddp = found["ddp"]
    print(
        f"\n{case.name}: DDP {1000 * median(x.step_s for x in ddp):.1f} ms per step, "
        f"{1000 * compute_s:.1f} ms alone; load average {os.getloadavg()[0]:.1f}"
    )
    for s, fits in found.items():
        wall, cpu = (
            spread([a[k] / b[k] for a, b in zip(fits, ddp, strict=True)])
            for k in (Taken._fields.index("step_s"), Taken._fields.index("cpu_s"))
        )
        steady = spread([x.steady_s / expected_s[s] for x in fits])
        print(
            f"  {s:22} {wall} of DDP's time, {cpu} of its CPU time; "
            f"simulated {expected_s[s] / expected_s['ddp']:.3f}; a steady step "
            f"{1000 * median(x.steady_s for x in fits):.0f} ms, {steady} of simulated",
            flush=True,
        )
