"""Part "pipelines": our schedules beside torch's, two ranks that share the GPU, without a Trainer.

The contenders are those of the benchmark "pipeline", each in processes of its own, all of which
take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from benchmarks.gpu.fits import GIB, case_of, flops_per_token, peak_flops, show
from benchmarks.gpu.ranks import FailedError
from benchmarks.gpu.session import card
from benchmarks.pipeline.contenders import Figures
from benchmarks.pipeline.model import Case
from benchmarks.pipeline.teams import Team

WARM_UP = 2  # steps
LEAST_S = 20.0  # that a contender has to start in
# contender -> stages of a worker, and with whose time its own is compared
CONTENDERS = {
    "torch 1f1b": (1, "torch 1f1b"),
    "loop 1f1b": (1, "torch 1f1b"),
    "torch interleaved_1f1b": (2, "torch interleaved_1f1b"),
    "loop interleaved_1f1b": (2, "torch interleaved_1f1b"),
    "loop cyclic_pipeline": (1, "torch 1f1b"),
    "loop zb_h1": (1, "torch 1f1b"),
}


def pipelines(args: argparse.Namespace, until: float) -> Iterator[str]:
    """Compare pipelines of two ranks with torch.distributed.pipelining on the same GPT-2."""
    base = case_of(args, num_workers=2, is_tied=False)
    cases = {name: replace(base, num_stages=2 * n) for name, (n, _) in CONTENDERS.items()}
    teams: dict[str, Team] = {}
    taken: dict[str, list[Figures]] = {}
    lost: list[str] = []
    try:
        for name, case in cases.items():  # one after the other: each makes the whole model first
            teams[name] = Team(name, case)
            yield from _tried(teams[name], WARM_UP, until, [], lost)
        for k in range(args.rounds):
            if k > 0 and time.monotonic() > until:
                break
            for name in [name for name in cases if name not in lost]:
                rounds = taken.setdefault(name, [])
                yield from _tried(teams[name], base.num_steps, until, rounds, lost)
    finally:
        for team in teams.values():
            team.close()
    yield from _rows(taken, base)
    if lost:
        raise FailedError(f"without figures: {', '.join(lost)}")


def _tried(
    team: Team, num_steps: int, until: float, rounds: list[Figures], lost: list[str]
) -> Iterator[str]:
    """Let a contender train; one that fails is lost, and the others go on."""
    try:
        figures = team.run(num_steps, max(LEAST_S, until - time.monotonic()))
    except SystemExit as error:
        lost.append(team.name)
        yield f"  {error}"
        return
    rounds.append({what: max(worker[what] for worker in figures) for what in ("wall", "peak")})
    yield f"  {team.name}: {1e3 * rounds[-1]['wall']:.1f} ms"


def _rows(taken: dict[str, list[Figures]], case: Case) -> Iterator[str]:
    most = peak_flops(card()) if case.device == "cuda" else None
    each = flops_per_token(case)
    walls = {name: [x["wall"] for x in rounds] for name, rounds in taken.items() if rounds}
    yield f"  {'':24}{'ms a step':>24}    {'ratio':21}{'tokens/s':>10}{'MFU':>7}{'peak':>12}"
    for name, wall in walls.items():
        tokens_per_s = case.rows * case.num_microbatches * case.length / median(wall)
        mfu = f"{tokens_per_s * each / most:.3f}" if most else "-"
        peak = max(x["peak"] for x in taken[name])
        shown, ratio = show([1e3 * x for x in wall], 1), "-"
        if other := walls.get(CONTENDERS[name][1]):
            ratio = show([a / b for a, b in zip(wall, other, strict=False)], 3)
        yield (
            f"  {name:24}{shown:>24}    {ratio:21}{tokens_per_s:10.0f}{mfu:>7}"
            f"{f'{peak / GIB:.2f} GiB' if peak else '-':>12}"
        )
