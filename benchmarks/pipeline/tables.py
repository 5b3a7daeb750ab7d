"""Compare pipelines side by side in one run.

    python -m benchmarks pipeline                    all tables
    python -m benchmarks pipeline --only b4          a, b2, b4, c, d2, d4 or e; or all of b, or d
    python -m benchmarks pipeline --only d2 --micro 2 4 8    with these numbers of micro-batches
    python -m benchmarks pipeline --only d4 --sleep-ms 10    compute slept, where workers share
                                                     cores, as d4 does by default; 0 computes
    python -m benchmarks pipeline --profile          where the time of the staged step goes

a   stage-at-a-time against the plain step, one process
b   1f1b and gpipe against torch.distributed.pipelining's, 2 and 4 processes on loopback
c   gpipe against torchgpipe on a Sequential, one process, if torchgpipe is installed
d   pipelines without a flush against 1f1b, 2 and 4 processes on loopback, a table for each number
    of micro-batches
e   several stages of each worker, and split backwards, against 1f1b and
    torch.distributed.pipelining, 4 processes, compute slept

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

In d: with a flush, the slowest stage idles for (S - 1) / (m + S - 1) of a step, S being the stages
and m the micro-batches of a step. What is measured of that is 1 - useful time / step time, with
the forwards and backwards of m micro-batches on the slowest stage, timed in the same round, as
useful time; updates and copies of weights count as idle, and so do messages that somebody waits
for.

pipedream, pipeoptim and spectrain update after each micro-batch: m of their steps, each with one
micro-batch of the same size, stand beside one step of the others. cyclic_mp has a process for each
activation that is alive at once, three for two stages, and is left out for four, of which it would
need ten.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import pstats
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.pipeline.contenders import BY_THE_MICRO_BATCH, BY_THE_STEP
from benchmarks.pipeline.model import Case
from benchmarks.pipeline.profile import num_cores, predicted_s, useful_s
from benchmarks.pipeline.teams import Rounds, make_contender, run_teams
from benchmarks.rounds import result, spread

SMOKE = (
    "--only", "b2", "--rounds", "1", "--steps", "1", "--rows", "1", "--width", "16",
    "--length", "8",
)  # fmt: skip
ONE = Case(
    name="a: 1 process", num_workers=1, num_stages=4, num_microbatches=4, rows=8, length=128,
    width=256, depth=8, sleep_ms=0, num_steps=4, rounds=9,
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
        num_steps=2, rounds=5, sleep_ms=10,
    ),
    "e": replace(
        ONE, name="e: 4 processes, stages apart", num_workers=4, rows=4, num_steps=4, rounds=7,
        sleep_ms=10,
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
NUM_MICRO = {"d2": [2, 4, 8], "d4": [4, 8], "e": [4, 8]}
# stages of a worker in e, and what of torch it is compared with
APART = {
    "1f1b": (1, "1f1b"),
    "interleaved_1f1b": (2, "interleaved_1f1b"),
    "zb_h1": (1, "interleaved_zb"),
    "zb_v": (2, "zb_v"),
}
_REFERENCE = "1f1b"
_MOST_PROCESSES = 4
SLEPT = {"width": 64, "length": 32}  # so that what is computed beside the sleep is little


def report(case: Case, pairs: dict[str, str]) -> None:
    """Run a case and print its table."""
    names = ["profile", *dict.fromkeys([*pairs.values(), *pairs])]
    rounds = run_teams(dict.fromkeys(names, case), case.num_steps, case.rounds)
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


def report_flows(case: Case, num_microbatches: int) -> None:
    """Run all contenders with as many micro-batches in a step, and print their table.

    Args:
        case: says how many micro-batches a round has: as many as its steps.
        num_microbatches: of a step.
    """
    num_steps = max(1, case.num_steps * case.num_microbatches // num_microbatches)
    case = replace(case, num_microbatches=num_microbatches)
    cases = {p: replace(case, num_workers=n) for p, n in _processes(case).items()}
    contenders = {f"loop {preset}": each for preset, each in cases.items()}
    rounds = run_teams({"profile": case, **contenders}, num_steps, case.rounds)
    stages = case.num_stages
    print(
        f"\n  m = {num_microbatches}; of 1f1b's step "
        f"{(stages - 1) / (num_microbatches + stages - 1):.3f} idle"
    )
    print(f"  {'':15} {'ms per step':>11}  {'of the time of 1f1b':23} simulated  idle")
    for preset, each in cases.items():
        _print_row(preset, each, case, rounds)


def _processes(case: Case) -> dict[str, int]:
    """Return the presets that are compared, and with how many processes."""
    presets = dict.fromkeys((_REFERENCE, *BY_THE_STEP, *BY_THE_MICRO_BATCH), case.num_workers)
    presets["cyclic_mp"] = case.num_stages * (case.num_stages + 1) // 2
    return {preset: n for preset, n in presets.items() if n <= _MOST_PROCESSES}


def _print_row(preset: str, case: Case, measured: Case, rounds: dict[str, Rounds]) -> None:
    """Print the figures of one contender, whose stages were measured in another case."""
    walls = {name: [max(w["wall"] for w in r) for r in rounds[name]] for name in rounds}
    wall, profiles = walls[f"loop {preset}"], rounds["profile"]
    ratios = [a / b for a, b in zip(wall, walls[f"loop {_REFERENCE}"], strict=True)]
    simulated = predicted_s(case, preset, profiles) / median(wall)
    idle = "-"  # processes that share cores compute faster while others wait
    if measured.sleep_ms or measured.num_workers <= num_cores():
        useful = (useful_s(measured, workers) for workers in profiles)
        idle = spread([1 - u / x for u, x in zip(useful, wall, strict=True)])
    print(
        f"  {preset:15} {1000 * median(wall):11.1f}  {spread(ratios):23} {simulated:9.3f}  {idle}"
    )


def report_apart(case: Case, num_microbatches: int) -> None:
    """Run executors with one stage of a worker and with several, and print their table."""
    case = replace(case, num_microbatches=num_microbatches)
    cases = {
        f"loop {preset}": replace(case, num_stages=case.num_workers * each)
        for preset, (each, _) in APART.items()
    }
    several = replace(case, num_stages=2 * case.num_workers)
    of_torch = dict.fromkeys(of for _, of in APART.values())
    cases |= {f"torch {of}": case if of == "1f1b" else several for of in of_torch}
    rounds = run_teams(cases, case.num_steps, case.rounds)
    walls = {name: [max(w["wall"] for w in r) for r in rounds[name]] for name in rounds}
    print(f"\n  m = {num_microbatches}")
    print(f"  {'':22} {'ms per step':>11}  {'of the time of 1f1b':23} of the time of torch's")
    for name, wall in walls.items():
        executor, preset = name.split()
        like = APART[preset][1] if executor == "loop" else preset
        each = [
            spread([a / b for a, b in zip(wall, walls[other], strict=True)])
            for other in (f"loop {_REFERENCE}", f"torch {like}")
        ]
        print(f"  {name:22} {1000 * median(wall):11.1f}  {each[0]:23} {each[1]}")


def profile(case: Case) -> None:
    """Print where the time of the staged step goes, beside the plain step's."""
    for name in ("loop 1f1b", "loop plain"):
        contender = make_contender(name, case)
        contender(2)
        profiler = cProfile.Profile()
        profiler.runcall(contender, 5)
        print(f"\n{name}, 5 steps")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--only", choices=[*CASES, "b", "d"], default="", help="run these tables")
    parser.add_argument("--rounds", type=int, help="how often every contender trains")
    parser.add_argument(
        "--steps", type=int, help="timed steps of a round; of d, with 4 (d4: 8) micro-batches"
    )
    parser.add_argument("--micro", type=int, nargs="+", help="micro-batches of a step in d")
    parser.add_argument("--rows", type=int, help="samples of a micro-batch")
    parser.add_argument("--width", type=int, help="features of the model")
    parser.add_argument("--length", type=int, help="tokens of a sample")
    parser.add_argument("--sleep-ms", type=float, help="slept per layer's forward")
    parser.add_argument("--loop", action="store_true", help="leave Lightning's Trainer out")
    parser.add_argument("--profile", action="store_true", help="print where time goes in (a)")


def run(args: argparse.Namespace) -> None:
    """Run the cases that were asked for and print their tables."""
    names = {"rounds": "rounds", "steps": "num_steps", "rows": "rows"}
    names |= {"sleep_ms": "sleep_ms", "width": "width", "length": "length"}
    given = {field: vars(args)[name] for name, field in names.items()}
    changes = {field: value for field, value in given.items() if value is not None}
    if args.profile:
        profile(_changed("a", changes))
        return
    for key in [key for key in CASES if key.startswith(args.only)]:
        case = _changed(key, changes)
        _announce(key, case)
        if key == "c" and importlib.util.find_spec("torchgpipe") is None:
            print("  torchgpipe is not installed: nothing is compared")
        elif key in NUM_MICRO:
            for num_microbatches in args.micro or NUM_MICRO[key]:
                table = report_apart if key == "e" else report_flows
                table(case, num_microbatches)
        else:
            pairs = PAIRS[key[0]].items()
            report(case, {n: r for n, r in pairs if not (args.loop and n.startswith("trainer"))})


def work(key: str, changes: dict[str, Any], *names: str) -> None:
    """Train once by each of some contenders of a table, and print what a step of each took."""
    case = _changed(key, changes)
    rounds = run_teams(dict.fromkeys(names, case), case.num_steps, 1)
    result({name: max(w["wall"] for w in rounds[name][0]) for name in names})


def _changed(key: str, changes: dict[str, Any]) -> Case:
    """Return a case as was asked for; one that sleeps has a small model by default."""
    case = replace(CASES[key], **changes)
    return replace(case, **{**SLEPT, **changes}) if case.sleep_ms else case


def _announce(key: str, case: Case) -> None:
    print(f"\n{case.name}, {case.num_stages} stages", end="")
    if key not in NUM_MICRO:
        print(f", {case.num_microbatches} micro-batches", end="")
    print(f", {case.sleep_ms:g} ms slept per layer" if case.sleep_ms else ", real compute")
    if case.num_workers > num_cores():
        print(f"  {case.num_workers} processes share {num_cores()} cores")
