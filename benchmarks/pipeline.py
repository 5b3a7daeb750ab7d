"""Compare pipelines side by side in one run.

    python benchmarks/pipeline.py                    all tables
    python benchmarks/pipeline.py --only b4          one: a, b2, b4, c, d2, d4; or all of b, or d
    python benchmarks/pipeline.py --only d2 --micro 2 4 8    with these numbers of micro-batches
    python benchmarks/pipeline.py --only d4 --sleep-ms 10    compute slept, where workers share
                                                     cores, as d4 does by default; 0 computes
    python benchmarks/pipeline.py --profile          where the time of the staged step goes

a   stage-at-a-time against the plain step, one process
b   1f1b and gpipe against torch.distributed.pipelining's, 2 and 4 processes on loopback
c   gpipe against torchgpipe on a Sequential, one process, if torchgpipe is installed
d   pipelines without a flush against 1f1b, 2 and 4 processes on loopback, a table for each number
    of micro-batches; pipeline_flows.py says what stands there

All train the same GPT, in the same micro-batches, with one torch thread per process. Every
contender has processes of its own, which take turns, round after round, so that a drift of the
machine's speed meets all of them alike, and none inherits another's heap. Figures are seconds per
step everywhere, as ratios to the reference of the same round: median (lowest - highest). "loop" is
the executor without Lightning's loops, "trainer" is Lightning's Trainer. Beside them stands what
the package's own simulator says for the stages and messages measured in the same rounds, over what
was measured, while all workers compute at once. What keeping and guessing weights costs is
measured and simulated, too; the milliseconds of Python around a stage are not. Where there is a
flush, steps are timed from barrier to barrier; else in the middle of a run, each worker by its own
clock, and the slowest counts.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import os
import pstats
from dataclasses import replace
from statistics import median

from pipeline_model import Case
from pipeline_teams import Rounds, make_contender, run
from replicated import spread

ONE = Case(
    name="a: 1 process", num_workers=1, num_stages=4, num_microbatches=4, rows=8, length=128,
    width=256,
    depth=8, sleep_ms=0, num_steps=4, rounds=9,
)  # fmt: skip
CASES = {
    "a": ONE,
    "b2": replace(ONE, name="b: 2 processes", num_workers=2, num_stages=2),
    "b4": replace(ONE, name="b: 4 processes", num_workers=4, num_microbatches=8, rows=4),
    "d2": replace(
        ONE, name="d: 2 processes, no flush", num_workers=2, num_stages=2, rows=4, num_steps=4,
        rounds=5,
    ),
    "d4": replace(
        ONE, name="d: 4 processes, no flush", num_workers=4, num_microbatches=8, rows=4,
        num_steps=2,
        rounds=5, sleep_ms=10,
    ),
    "c": replace(ONE, name="c: 1 process, a Sequential, remat except the last micro-batch"),
}  # fmt: skip
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
}  # fmt: skip
NUM_MICRO = {"d2": [2, 4, 8], "d4": [4, 8]}
SLEPT = {"width": 64, "length": 32}  # so that what is computed beside the sleep is little


def report(case: Case, pairs: dict[str, str]) -> None:
    """Run a case and print its table."""
    from pipeline_profile import predicted_s

    names = ["profile", *dict.fromkeys([*pairs.values(), *pairs])]
    rounds = run(dict.fromkeys(names, case), case.num_steps, case.rounds)
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
        executor, preset = name.split()
        remat = executor == "sequential"
        simulated = predicted_s(case, preset, rounds["profile"], remat=remat)
        print(
            f"  {name:16} {each[0]} of {reference}'s time, {each[1]} of its CPU time; "
            f"{1000 * seconds:.1f} ms, simulated {1000 * simulated:.1f} "
            f"({simulated / seconds:.3f} of it)"
        )
        ours, theirs = _losses(rounds[name]), _losses(rounds[reference])
        if max((abs(a - b) for a, b in zip(ours, theirs, strict=False)), default=0) > 1e-4:
            print(f"    DIFFERENT LOSSES: {ours} and {theirs}: they do not do the same work")


def _losses(rounds: Rounds) -> list[float]:
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
    args = _arguments()
    changes = {"rounds": args.rounds, "num_steps": args.steps, "rows": args.rows}
    changes = {name: value for name, value in changes.items() if value}
    if args.sleep_ms is not None:
        changes["sleep_ms"] = args.sleep_ms
    if args.profile:
        profile(_sized(replace(CASES["a"], **changes)))
        return
    for key in [key for key in CASES if key.startswith(args.only)]:
        case = _sized(replace(CASES[key], **changes))
        _announce(key, case)
        if key == "c" and importlib.util.find_spec("torchgpipe") is None:
            print("  torchgpipe is not installed: nothing is compared")
        elif key in NUM_MICRO:
            from pipeline_flows import report as report_flows

            for num_microbatches in args.micro or NUM_MICRO[key]:
                report_flows(case, num_microbatches)
        else:
            pairs = PAIRS[key[0]].items()
            report(case, {n: r for n, r in pairs if not (args.loop and n.startswith("trainer"))})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*CASES, "b", "d"], default="", help="run these tables")
    parser.add_argument("--rounds", type=int, help="how often every contender trains")
    parser.add_argument(
        "--steps", type=int, help="timed steps of a round; of d, with 4 (d4: 8) micro-batches"
    )
    parser.add_argument("--micro", type=int, nargs="+", help="micro-batches of a step in d")
    parser.add_argument("--rows", type=int, help="samples of a micro-batch, of 128 tokens each")
    parser.add_argument("--sleep-ms", type=float, help="slept per layer's forward")
    parser.add_argument("--loop", action="store_true", help="leave Lightning's Trainer out")
    parser.add_argument("--profile", action="store_true", help="print where time goes in (a)")
    return parser.parse_args()


def _sized(case: Case) -> Case:
    return replace(case, **SLEPT) if case.sleep_ms else case


def _announce(key: str, case: Case) -> None:
    print(f"\n{case.name}, {case.num_stages} stages", end="")
    if key not in NUM_MICRO:
        print(f", {case.num_microbatches} micro-batches", end="")
    print(f", {case.sleep_ms:g} ms slept per layer" if case.sleep_ms else ", real compute")
    cores = len(os.sched_getaffinity(0))
    if case.num_workers > cores:
        print(f"  {case.num_workers} processes share {cores} cores")


if __name__ == "__main__":
    main()
