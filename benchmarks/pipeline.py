"""Compare pipelines side by side in one run.

    python benchmarks/pipeline.py               all tables
    python benchmarks/pipeline.py --only b4     one: a, b2, b4, c, d2, d4
    python benchmarks/pipeline.py --sleep-ms 4  compute slept, where workers share cores
    python benchmarks/pipeline.py --profile     where the time of the staged step goes

a   stage-at-a-time against the plain step, one process
b   1f1b and gpipe against torch.distributed.pipelining's, 2 and 4 processes on loopback
c   gpipe against torchgpipe on a Sequential, one process, if torchgpipe is installed
d   pipelines without a flush against 1f1b, 2 and 4 processes on loopback

All train the same GPT, in the same micro-batches, with one torch thread per process. Every
contender has processes of its own, which take turns, round after round, so that a drift of the
machine's speed meets all of them alike, and none inherits another's heap. Figures are seconds per
step everywhere, as ratios to the reference of the same round: median (lowest - highest). "loop" is
the executor without Lightning's loops, "trainer" is Lightning's Trainer. Beside them stands what
the package's own simulator says for the stages and messages measured in the same rounds; workers
that share cores get equal shares of them there.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import json
import os
import pstats
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from pipeline_model import Case
from replicated import free_port, spread

ONE = Case(
    name="a: 1 process", num_workers=1, num_stages=4, num_micro=4, rows=8, length=128, width=256,
    depth=8, sleep_ms=0, num_steps=4, rounds=9,
)  # fmt: skip
CASES = {
    "a": ONE,
    "b2": replace(ONE, name="b: 2 processes", num_workers=2, num_stages=2),
    "b4": replace(ONE, name="b: 4 processes", num_workers=4, num_micro=8, rows=4),
    "d2": replace(ONE, name="d: 2 processes, no flush", num_workers=2, num_stages=2),
    "d4": replace(ONE, name="d: 4 processes, no flush", num_workers=4, num_micro=8, rows=4),
    "c": replace(ONE, name="c: 1 process, a Sequential, remat except the last micro-batch"),
}
# contender -> what it is compared with; the references stand for themselves
PAIRS = {
    "a": {
        "loop 1f1b": "loop plain", "loop gpipe": "loop plain",
        "trainer 1f1b": "trainer plain", "trainer gpipe": "trainer plain",
    },
    "b": {
        f"{executor} {preset}": f"torch {preset}"
        for preset in ("1f1b", "gpipe") for executor in ("loop", "trainer")
    },
    "c": {"sequential gpipe": "torchgpipe gpipe"},
    "d": {"loop cyclic_pipeline": "loop 1f1b", "loop pipedream_2bw": "loop 1f1b"},
}  # fmt: skip
SLEPT = {"width": 64, "length": 32}  # so that what is computed beside the sleep is little


class Team:
    """Hold the processes of one contender.

    Args:
        name: of the contender.
        case: what it trains.
    """

    def __init__(self, name: str, case: Case) -> None:
        port = str(free_port())
        command = [sys.executable, __file__, "--worker", name, json.dumps(asdict(case))]
        self._processes = []
        for rank in range(case.num_workers):
            env = os.environ | {
                "NODE_RANK": str(rank), "RANK": str(rank), "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
                "WORLD_SIZE": str(case.num_workers), "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
            self._processes.append(
                subprocess.Popen(
                    command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    stderr=None if os.environ.get("SHOW_ERRORS") else subprocess.DEVNULL,
                )
            )  # fmt: skip

    def run(self, num_steps: int) -> list[dict[str, Any]]:
        """Return the figures of all workers."""
        for process in self._processes:
            assert process.stdin is not None
            print(num_steps, file=process.stdin, flush=True)
        return [self._answer(process) for process in self._processes]

    @staticmethod
    def _answer(process: Any) -> dict[str, Any]:
        for line in process.stdout:
            if line.startswith("RESULT "):
                answer: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return answer
        raise SystemExit("a worker died; set SHOW_ERRORS=1 to see why")

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def work(name: str, case: Case) -> None:
    """Be one worker: run as many steps as each line says, and print the figures as JSON."""
    contender = make_contender(name, case)
    for line in sys.stdin:
        print("RESULT " + json.dumps(contender(int(line))), flush=True)


def make_contender(name: str, case: Case) -> Any:
    """Make a contender, or the profiler, in this process."""
    import logging
    import warnings

    import torch
    import torch.distributed as dist
    from pipeline_contenders import make
    from pipeline_profile import profiler

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if case.num_workers > 1:
        dist.init_process_group("gloo")
    return profiler(case) if name == "profile" else make(name, case)


def run(case: Case, names: Sequence[str]) -> dict[str, list[list[dict[str, Any]]]]:
    """Return what every contender's workers measured, round by round."""
    teams = {name: Team(name, case) for name in names}
    rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    try:
        for k in range(case.rounds + 1):
            for name, team in teams.items():
                figures = team.run(case.num_steps)
                if k > 0:  # the first round warms up
                    rounds[name].append(figures)
    finally:
        for team in teams.values():
            team.close()
    return rounds


def report(case: Case, pairs: dict[str, str]) -> None:
    """Run a case and print its table."""
    from pipeline_profile import predicted_s

    rounds = run(case, ["profile", *dict.fromkeys([*pairs.values(), *pairs])])
    wall = {n: [max(w["wall"] for w in r) for r in rounds[n]] for n in rounds}
    cpu = {n: [sum(w["cpu"] for w in r) for r in rounds[n]] for n in rounds}
    for reference in dict.fromkeys(pairs.values()):
        print(f"  {reference:16} {1000 * median(wall[reference]):.1f} ms per step")
    for name, reference in pairs.items():
        each = [
            spread([a / b for a, b in zip(x[name], x[reference], strict=True)])
            for x in (wall, cpu)
        ]
        seconds = median(wall[name])
        simulated = predicted_s(case, *name.split(), rounds["profile"])
        print(
            f"  {name:16} {each[0]} of {reference}'s time, {each[1]} of its CPU time; "
            f"{1000 * seconds:.1f} ms, simulated {1000 * simulated:.1f} "
            f"({simulated / seconds:.3f} of it)"
        )
        ours, theirs = _losses(rounds[name]), _losses(rounds[reference])
        if max((abs(a - b) for a, b in zip(ours, theirs, strict=False)), default=0) > 1e-4:
            print(f"    DIFFERENT LOSSES: {ours} and {theirs}: they do not do the same work")


def _losses(rounds: list[list[dict[str, Any]]]) -> list[float]:
    """Return the loss that each round ended with; Trainers are not asked."""
    known = ([w["loss"] for w in workers if w["loss"] is not None] for workers in rounds)
    return [losses[0] for losses in known if losses]


def profile(case: Case) -> None:
    """Print where the time of the staged step goes, beside the plain step's."""
    for name in ("loop 1f1b", "loop plain"):
        contender = make_contender(name, case)
        contender(2)
        profiler = cProfile.Profile()
        profiler.runcall(contender, 5)
        print(f"\n{name}, 5 steps")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Run the cases that were asked for and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(CASES), help="run one table")
    parser.add_argument("--rounds", type=int, help="how often every contender trains")
    parser.add_argument("--steps", type=int, help="timed steps of a round")
    parser.add_argument("--rows", type=int, help="samples of a micro-batch, of 128 tokens each")
    parser.add_argument("--sleep-ms", type=float, default=0, help="slept per layer's forward")
    parser.add_argument("--loop", action="store_true", help="leave Lightning's Trainer out")
    parser.add_argument("--profile", action="store_true", help="print where time goes in (a)")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker[0], Case(**json.loads(args.worker[1])))
        return
    changes = {"sleep_ms": args.sleep_ms, **(SLEPT if args.sleep_ms else {})}
    changes |= {"rounds": args.rounds} if args.rounds else {}
    changes |= {"num_steps": args.steps} if args.steps else {}
    changes |= {"rows": args.rows} if args.rows else {}
    if args.profile:
        profile(replace(CASES["a"], **changes))
        return
    for key in [args.only] if args.only else CASES:
        case = replace(CASES[key], **changes)
        print(f"\n{case.name}, {case.num_stages} stages, {case.num_micro} micro-batches", end="")
        print(f", {args.sleep_ms:g} ms slept per layer" if args.sleep_ms else ", real compute")
        cores = len(os.sched_getaffinity(0))
        if case.num_workers > cores:
            print(f"  {case.num_workers} processes share {cores} cores")
        if key == "c" and importlib.util.find_spec("torchgpipe") is None:
            print("  torchgpipe is not installed: nothing is compared")
            continue
        pairs = PAIRS[key[0]].items()
        report(case, {n: r for n, r in pairs if not (args.loop and n.startswith("trainer"))})


if __name__ == "__main__":
    main()
