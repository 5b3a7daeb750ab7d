"""Table d of benchmarks/pipeline.py: pipelines without a flush beside 1f1b, for several m.

With a flush, the slowest stage idles for (S - 1) / (m + S - 1) of a step, S being the stages and m
the micro-batches of a step. What is measured of that is 1 - useful time / step time, with the
forwards and backwards of m micro-batches on the slowest stage, timed in the same round, as useful
time; updates and copies of weights count as idle, and so do messages that somebody waits for.

pipedream, pipeoptim and spectrain update after each micro-batch: m of their steps, each with one
micro-batch of the same size, stand beside one step of the others. cyclic_mp has a process for each
activation that is alive at once, three for two stages, and is left out for four, of which it would
need ten.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from pipeline_contenders import BY_THE_MICRO_BATCH, BY_THE_STEP
from pipeline_model import Case
from pipeline_profile import num_cores, predicted_s, useful_s
from pipeline_teams import Rounds, run
from replicated import spread

_REFERENCE = "1f1b"
_MOST_PROCESSES = 4


def report(case: Case, num_microbatches: int) -> None:
    """Run all contenders with as many micro-batches in a step, and print their table.

    Args:
        case: says how many micro-batches a round has: as many as its steps.
        num_microbatches: of a step.
    """
    num_steps = max(1, case.num_steps * case.num_microbatches // num_microbatches)
    case = replace(case, num_microbatches=num_microbatches)
    cases = {p: replace(case, num_workers=n) for p, n in _processes(case).items()}
    contenders = {f"loop {preset}": each for preset, each in cases.items()}
    rounds = run({"profile": case, **contenders}, num_steps, case.rounds)
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
