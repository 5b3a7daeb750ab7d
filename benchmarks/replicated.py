"""Compare cyclic_dp, cyclic_dp_v1 and Lightning's DDP side by side in one run.

    python benchmarks/replicated.py                          2 workers on loopback, real compute
    python benchmarks/replicated.py --case net               2-8 workers in network namespaces with
                                                             a rate limit, compute emulated (root)
    python benchmarks/replicated.py --case groups            8-32 workers there, those of a group
                                                             joined by faster links
    python benchmarks/replicated.py --case unsteady          8 workers there, whose steps take now
                                                             longer, now shorter
    python benchmarks/replicated.py --case groups --slower 5 compute and links so slow that the
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
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from hosts import Hosts

# alone: every worker for itself; behind a slash: the sharding, where it is not the preset's, or
# the MiB of DDP's buckets, where they are not the 25 that it has by default; behind colons: the
# number of stages, and of groups
STRATEGIES = ("alone", "ddp", "ddp/2", "cyclic_dp", "cyclic_dp_v1", "cyclic_dp_v1/optimizer")
WARM_UP = 8
LATENCY_S = 2e-4  # gloo, per message, measured
BYTES_PER_S = 1.5e9  # of gloo on loopback
SHARE_OF_RATE = 0.96  # behind headers
# all workers meet at the end of the warm-up, to measure time: it takes them some steps to be as
# far from each other again as they are in the long run
STEADY_FROM = WARM_UP + 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """Hold one comparison.

    Args:
        name: what it is called in the table.
        num_workers: how many processes.
        step_s: emulated compute of a step in seconds; 0 computes for real.
        width: features of every layer of the module.
        depth: how many layers.
        batch: samples per worker and step.
        rate: token-bucket limit of every link ("1gbit", "100mbit"), or "" for loopback.
        num_steps: steps per fit.
        rounds: how often every strategy trains.
        strategies: which of them.
        close: neighbours that faster links join.
        jitter: standard deviation of the logarithm of a worker's seconds per step, drawn as the
            simulator draws them, so that all strategies meet the same slow steps.
        slow: how many times as long the second worker computes for a third of the steps.
    """

    name: str
    num_workers: int
    step_s: float
    width: int
    depth: int
    batch: int
    rate: str
    num_steps: int
    rounds: int
    strategies: Sequence[str] = STRATEGIES
    close: int = 1
    jitter: float = 0.0
    slow: float = 1.0

    @property
    def model_bytes(self) -> int:
        """Return the bytes of all parameters."""
        return 4 * self.depth * (self.width + 1) * self.width

    @property
    def bytes_per_s(self) -> float:
        """Return what a link carries."""
        if not self.rate:
            return BYTES_PER_S
        number, unit = self.rate[:-4], self.rate[-4:]
        return SHARE_OF_RATE * float(number) * {"gbit": 1e9, "mbit": 1e6}[unit] / 8

    def slowed(self, by: float) -> Case:
        """Return the same with compute and links that are so many times as slow."""
        rate = f"{self.bytes_per_s / SHARE_OF_RATE / by * 8 / 1e6:g}mbit" if self.rate else ""
        return replace(
            self, name=f"{self.name}, {by:g} times slower", step_s=by * self.step_s, rate=rate
        )


class Taken(NamedTuple):
    """Hold what a fit took.

    Args:
        step_s: seconds per step behind the warm-up, to the end of the last one everywhere.
        cpu_s: CPU seconds of this worker per step.
        steady_s: seconds between the starts of two of this worker's steps, far from both ends.
    """

    step_s: float
    cpu_s: float
    steady_s: float


LOOPBACK = [
    Case(
        name="2 workers, about 20 ms",
        num_workers=2,
        step_s=0,
        width=512,
        depth=8,
        batch=96,
        rate="",
        num_steps=70,
        rounds=7,
    ),
    Case(
        name="2 workers, about 200 ms",
        num_workers=2,
        step_s=0,
        width=1024,
        depth=12,
        batch=200,
        rate="",
        num_steps=24,
        rounds=5,
    ),
]
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


def make_module(case: Case) -> Any:
    """Build the LightningModule: a plain MLP, its compute real or slept."""
    import lightning as L
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Slept(torch.autograd.Function):
        """Sleep in forward and twice as long in backward, as compute would take."""

        @staticmethod
        def forward(ctx: Any, x: Any, seconds: float) -> Any:
            ctx.seconds = seconds
            time.sleep(seconds)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            time.sleep(2 * ctx.seconds)
            return grad, None

    class Block(nn.Module):
        slower = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(case.width, case.width)

        def forward(self, x: Any) -> Any:
            # sleep before the gradient of this layer is ready and before its weights are read
            x = self.linear(x)
            seconds = Block.slower * case.step_s / case.depth / 3
            return F.relu(Slept.apply(x, seconds) if case.step_s else x)

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(*(Block() for _ in range(case.depth)))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            Block.slower = slower(case, self.global_rank, batch_idx)
            return F.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    return Net()


def slower(case: Case, rank: int, step: int) -> float:
    """Return how many times as long a worker computes in a step."""
    third = (case.num_steps - WARM_UP) // 3
    is_slow = rank == 1 and third <= step - WARM_UP < 2 * third
    drawn = random.Random(f"{rank}/{step}").lognormvariate(-(case.jitter**2) / 2, case.jitter)
    return drawn * (case.slow if is_slow else 1.0)


def strategy_of(name: str, num_workers: int) -> Any:
    """Return what the Trainer is given for a name of STRATEGIES."""
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    from lightning_cyclic import PRESETS, CyclicStrategy
    from lightning_cyclic.plan.presets import AXES

    if name == "alone":
        return SingleDeviceStrategy("cpu")
    if ":" in name:
        preset, *numbers = name.split(":")
        num_stages, *groups = map(int, numbers)
        size = {"group_size": num_workers // groups[0]} if groups else {}
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
    return timed(case, strategy_of(strategy, case.num_workers), make_module(case), shards=shards)


def timed(
    case: Case,
    strategy: Any,
    module: Any,
    *,
    shards: int,
    callbacks: Sequence[Any] = (),
    **flags: Any,
) -> Taken:
    """Fit a module.

    Args:
        case: what the data and the steps are.
        strategy: what the Trainer is given.
        module: what is trained.
        shards: how many workers take part.
        callbacks: of the Trainer, beside the clock.
        flags: more of the Trainer's.
    """
    import lightning as L
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    class Clock(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, k: int) -> None:
            if k == WARM_UP:
                dist.barrier()
                self.began, self.cpu_began = time.perf_counter(), time.process_time()
            starts.append(time.perf_counter())

        def on_train_end(self, trainer: Any, module: Any) -> None:
            dist.barrier()
            self.ended, self.cpu_ended = time.perf_counter(), time.process_time()

    starts: list[float] = []
    total = case.batch * case.num_steps * shards
    one = torch.randn(case.batch, case.width)
    data = TensorDataset(one.repeat(total // case.batch, 1), one.repeat(total // case.batch, 1))
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=shards,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock, *callbacks],
        **flags,
    )
    trainer.fit(module, DataLoader(_Batches(data, case.batch), batch_size=None))
    num_steps = case.num_steps - WARM_UP
    steady = starts[min(STEADY_FROM, case.num_steps - 2) :]
    return Taken(
        (clock.ended - clock.began) / num_steps,
        (clock.cpu_ended - clock.cpu_began) / num_steps,
        (steady[-1] - steady[0]) / (len(steady) - 1),
    )


class _Batches:
    """Give whole batches, so that no time goes into collating samples."""

    def __init__(self, data: Any, batch: int) -> None:
        self._data, self._batch = data, batch

    def __len__(self) -> int:
        return len(self._data) // self._batch

    def __getitem__(self, k: int) -> Any:
        return self._data[k * self._batch : (k + 1) * self._batch]


def work(case: Case) -> None:
    """Be one worker: all strategies, round after round; worker 0 prints the seconds as JSON."""
    warnings.filterwarnings("ignore")
    import logging

    import torch

    import lightning_cyclic  # noqa: F401

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found = in_turn(case, train)
    if os.environ["NODE_RANK"] == "0":
        print("RESULT " + json.dumps(found), flush=True)


def in_turn(case: Case, fit: Callable[[Case, str], Taken]) -> dict[str, list[Taken]]:
    """Train with all strategies, round after round; return what each fit of each took."""
    found: dict[str, list[Taken]] = {s: [] for s in case.strategies}
    first, *others = case.strategies
    brief = replace(case, num_steps=WARM_UP + 2)
    for k in range(case.rounds + 1):
        for s in (*others, first):  # none that runs alone first: another makes the process group
            taken = fit(case if k else brief, s)
            if os.environ.get("NODE_RANK") == "0":  # seen with SHOW_ERRORS=1
                print(f"round {k}, {s}: {taken.steady_s:.3f} s", file=sys.stderr, flush=True)
            if k > 0:  # the first round warms caches and the allocator
                found[s].append(taken)
    return found


# ---------------------------------------------------------------------- all workers of a case


def run(case: Case) -> dict[str, list[Taken]]:
    """Start a case's workers; return what fits took by strategy and round."""
    network = None
    if case.rate:
        burst = max(16_000, int(case.bytes_per_s / 1000))  # a millisecond's
        network = Hosts(case.num_workers, case.rate, close=case.close, burst=f"{burst}b")
    arguments = ["--worker", json.dumps(asdict(case))]
    (found,) = start(__file__, arguments, case.num_workers, network)
    return {s: [Taken(*each) for each in fits] for s, fits in found.items()}


def start(
    script: str, arguments: Sequence[str], num_workers: int, network: Any = None
) -> list[Any]:
    """Start a script once for each worker.

    Args:
        script: its file; what it prints behind "RESULT " is JSON.
        arguments: of its command line.
        num_workers: how many.
        network: that links them, with up() and down(). [loopback]

    Returns:
        What each worker printed that printed something, in the order of the workers.
    """
    address, prefixes = "127.0.0.1", [[] for _ in range(num_workers)]
    children = []
    try:
        if network:
            address, prefixes = network.up()
        port = str(free_port())
        for rank, prefix in enumerate(prefixes):
            env = os.environ | {
                "NODE_RANK": str(rank),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "WORLD_SIZE": str(num_workers),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0" if network else "lo",
            }
            command = [*prefix, sys.executable, script, *arguments]
            errors = None if os.environ.get("SHOW_ERRORS") else subprocess.DEVNULL
            children.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
                )
            )
        outputs = [child.communicate(timeout=1200)[0] for child in children]
    finally:
        for child in children:
            child.kill()  # where another did not end in time; else it has ended
        if network:
            network.down()
    lines = [line for output in outputs for line in output.splitlines()]
    return [json.loads(x.removeprefix("RESULT ")) for x in lines if x.startswith("RESULT ")]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def spread(values: list[float]) -> str:
    """Print median (lowest - highest)."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} - {max(values):.3f})"


def predicted_s(case: Case, preset: str, compute_s: float) -> float:
    """Ask the package's simulator for seconds per step, from the compute time measured alone.

    It knows of no unsteady workers: there it says what it would be if all were steady.
    """
    from lightning_cyclic import make_plan
    from lightning_cyclic.runtime.whole_step.session import auto_stages
    from lightning_cyclic.simulate import Costs, Network, compare

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
    network = Network(latency_s=LATENCY_S, bandwidth_bytes_per_s=case.bytes_per_s)
    if case.close > 1:
        hosts = tuple(w // case.close for w in range(case.num_workers))
        inside = Network(latency_s=LATENCY_S, bandwidth_bytes_per_s=BYTES_PER_S)
        network = replace(network, hosts=hosts, inside=inside)
    bucket_bytes = (int(sharding) if is_ddp and sharding else 25) << 20
    found = compare(plan, costs, network, bucket_bytes=bucket_bytes)
    return found.lockstep.step_s if is_ddp else found.plan.step_s


def main() -> None:
    """Run the cases that were asked for and print their table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=list(CASES), default="loopback")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--rounds", type=int, help="how often every strategy trains")
    parser.add_argument("--num-steps", type=int, help=f"of a fit, {WARM_UP} of them to warm up")
    parser.add_argument("--strategies", nargs="+", help="with alone and ddp first")
    parser.add_argument(
        "--slower", type=float, default=1, help="how many times longer compute and links take"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(Case(**json.loads(args.worker)))
        return
    if args.slower <= 0:
        parser.error(f"--slower {args.slower:g}; allowed: numbers above 0, as 10")
    if args.num_steps is not None and args.num_steps < WARM_UP + 2:
        parser.error(f"--num-steps {args.num_steps}; allowed: from {WARM_UP + 2} on")
    changes = {k: v for k in ("rounds", "num_steps", "strategies") if (v := vars(args)[k])}
    for case in CASES[args.case]:
        if args.only in case.name:
            changed = replace(case, **changes)
            report(changed if args.slower == 1 else changed.slowed(args.slower))


def report(case: Case) -> None:
    """Run a case, and print a row for each strategy."""
    found = run(case)
    compute_s = statistics.median(taken.steady_s for taken in found.pop("alone"))
    expected_s = {s: predicted_s(case, s, compute_s) for s in found}
    ddp = found["ddp"]
    print(
        f"\n{case.name}: DDP {1000 * statistics.median(x.step_s for x in ddp):.1f} ms per step, "
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
            f"{1000 * statistics.median(x.steady_s for x in fits):.0f} ms, {steady} of simulated",
            flush=True,
        )


if __name__ == "__main__":
    main()
