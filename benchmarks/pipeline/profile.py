"""What the benchmark "pipeline" measures for the package's simulator, and what that says.

Every worker times its stages at the same time as the others theirs, since they share caches and
memory; two workers time messages between them. What it costs to keep or to guess weights is timed
apart, and added to the forwards, backwards and updates that do so according to the plan. So is
the Python that runs the user's step one stage at a time: a tiny model shows it, as it does not
depend on sizes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.contenders import (
    BY_THE_MICRO_BATCH,
    BY_THE_STEP,
    Contender,
    Figures,
    Stopwatch,
    make,
)
from benchmarks.pipeline.model import Case, cut_by_hand, loss_of
from lightning_cyclic import Plan, make_plan
from lightning_cyclic.plan import programs_of
from lightning_cyclic.runtime.predict import guesses
from lightning_cyclic.simulate import Costs, Network, simulate

# preset -> one that runs as much Python
_LIKE = dict.fromkeys(("1f1b", "gpipe"), "1f1b") | dict.fromkeys(BY_THE_STEP, "cyclic_pipeline")
_LIKE |= {"pipedream": "pipedream", "pipeoptim": "pipeoptim", "spectrain": "pipeoptim"}
_TINY: dict[str, Any] = {"width": 16, "length": 8}  # so that Python is all that takes time
_SMALL, _LARGE, _TIMES = 64, 1 << 20, 20  # bytes, bytes, how often


class StageTimes(NamedTuple):
    """Hold the seconds that one stage takes.

    Args:
        forward_s: of one micro-batch.
        backward_s: of one micro-batch.
        update_s: of one optimizer step.
        copy_s: to copy the weights, as is done to keep or to replace a version of them.
        guess_s: to guess them one update ahead.
        python_s: of a forward and its backward, to run the user's step for one stage, with what
            belongs to it of an update, on a core of its own: by the preset that is like another's.
        num_bytes: of the weights; the same everywhere, whoever shares a core.
    """

    forward_s: float
    backward_s: float
    update_s: float
    copy_s: float
    guess_s: float
    python_s: dict[str, float]
    num_bytes: int


def profiler(case: Case) -> Contender:
    """Return what measures this worker's stages, and the messages between two workers."""
    parts = cut_by_hand(case)
    mine = [dist.get_rank()] if case.num_workers > 1 else list(range(case.num_stages))
    optimizers = {j: case.optimizer(parts[j]) for j in mine}
    tiny = replace(case, num_workers=1, sleep_ms=0, rows=1, **_TINY)
    staged = {preset: make(f"loop {preset}", tiny) for preset in sorted({*_LIKE.values()})}
    plain = make("loop plain", tiny)

    def contender(num_steps: int) -> Figures:
        runs = case.num_microbatches * case.num_stages
        times = _TIMES if num_steps > 1 else 1  # as of --smoke
        plain_s = plain(times)["wall"]
        python_s = {
            preset: max(0.0, run(times)["wall"] - plain_s) / runs for preset, run in staged.items()
        }
        watch = Stopwatch()
        stages = {j: _profile(case, parts[j], j, optimizers[j], num_steps, python_s) for j in mine}
        figures = watch.stop(num_steps)
        if case.num_workers > 1:
            small, large = _message_s(_SMALL), _message_s(_LARGE)
            figures |= {"latency_s": small, "bytes_per_s": _LARGE / max(large - small, 1e-9)}
        return figures | {"stages": stages}

    return contender


def _profile(
    case: Case, part: nn.Module, j: int, optimizer: torch.optim.Optimizer, num_steps: int,
    python_s: dict[str, float],
) -> StageTimes:  # fmt: skip
    """Return what stage j takes."""
    forwards, backwards, updates, copies, ahead = [], [], [], [], []
    tokens, weights = case.batch()[: case.rows], list(part.parameters())
    for _ in range(num_steps):
        for _ in range(case.num_microbatches):
            x = tokens
            if j > 0:
                x = torch.randn(case.rows, case.length, case.width, requires_grad=True)
            y, taken = _timed(partial(_forward, case, part, j, x, tokens))
            forwards.append(taken)
            backwards.append(_timed(partial(y.backward, torch.ones_like(y)))[1])
        updates.append(_timed(optimizer.step)[1])
        optimizer.zero_grad()
        copies.append(_timed(lambda: [p.detach().clone() for p in weights])[1])
        ahead.append(
            _timed(lambda: list(guesses(optimizer, weights, 1, optimizer.param_groups, {})))[1]
        )
    num_bytes = sum(p.nbytes for p in weights)
    seconds = [_mean(x) for x in (forwards, backwards, updates, copies, ahead)]
    return StageTimes._make([*seconds, python_s, num_bytes])


def _forward(case: Case, part: nn.Module, j: int, x: Tensor, tokens: Tensor) -> Tensor:
    y = part(x)
    return loss_of(y, tokens) if j == case.num_stages - 1 else y


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = function()
    return result, time.perf_counter() - began


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _message_s(num_bytes: int) -> float:
    """Return the seconds of one message between workers 0 and 1, half a round trip."""
    data, rank = torch.zeros(num_bytes, dtype=torch.uint8), dist.get_rank()
    taken = []
    for _ in range(_TIMES if rank < 2 else 0):
        began = time.perf_counter()
        for turn in (0, 1):
            if rank == turn:
                dist.send(data, 1 - turn)
            else:
                dist.recv(data, turn)
        taken.append((time.perf_counter() - began) / 2)
    return median(taken) if taken else 0.0


# ---------------------------------------------------------------------- what that says


def predicted_s(
    case: Case, preset: str, rounds: Sequence[Sequence[Figures]], *, remat: bool = False
) -> float:
    """Return the seconds of a step that the simulator says.

    Args:
        case: what the contender trains; it may have more workers than were measured.
        preset: whose plan.
        rounds: what the profilers returned, by round and worker.
        remat: whether all forwards but the last run again.
    """
    by_the_micro_batch = preset in BY_THE_MICRO_BATCH
    num_microbatches = 1 if by_the_micro_batch else case.num_microbatches
    plan = make_plan(
        preset, num_stages=case.num_stages, num_workers=case.num_workers,
        num_microbatches=num_microbatches,
        num_steps=max(8, 32 // num_microbatches),
    )  # fmt: skip
    again = (case.num_microbatches - 1) / case.num_microbatches if remat else 0.0
    step_s = median(_of_round(case, plan, workers, again) for workers in rounds)
    return step_s * case.num_microbatches if by_the_micro_batch else step_s


def useful_s(case: Case, workers: Sequence[Figures]) -> float:
    """Return the seconds for which the slowest stage computes in a step."""
    return case.num_microbatches * max(x.forward_s + x.backward_s for x in _stages(case, workers))


def _of_round(case: Case, plan: Plan, workers: Sequence[Figures], again: float) -> float:
    stages, like = _stages(case, workers), _LIKE.get(plan.preset, "1f1b")
    more = [_for_weights_s(plan, j, x) for j, x in enumerate(stages)]
    costs = Costs(
        forward_s=tuple(
            x.forward_s + x.python_s[like] + s[0] for x, s in zip(stages, more, strict=True)
        ),
        backward_s=tuple(
            x.backward_s + again * x.forward_s + s[1] for x, s in zip(stages, more, strict=True)
        ),
        update_s=tuple(x.update_s + s[2] for x, s in zip(stages, more, strict=True)),
        param_bytes=tuple(float(x.num_bytes) for x in stages),
        cut_bytes=(case.cut_bytes,) * case.num_stages,
    )
    network = Network()
    if case.num_workers > 1:
        network = Network(
            latency_s=workers[0]["latency_s"], bandwidth_bytes_per_s=workers[0]["bytes_per_s"]
        )
    return simulate(programs_of(plan), costs, network, plan).step_s


def num_cores() -> int:
    """Return how many processes can compute at once."""
    return len(os.sched_getaffinity(0))


def _stages(case: Case, workers: Sequence[Figures]) -> list[StageTimes]:
    """Return what the stages take while all workers compute, as those do that share cores."""
    found = {j: x for figures in workers for j, x in figures["stages"].items()}
    return [found[j] for j in range(case.num_stages)]


def _for_weights_s(plan: Plan, j: int, times: StageTimes) -> tuple[float, float, float]:
    """Return what a forward, a backward and an update of stage j take longer for its weights.

    What only some micro-batches of a step do is spread over all. A forward that reads a guess
    replaces the one before, and its backward replaces that by the newest weights, or by a guess.
    An update first copies weights that somebody may still read.
    """
    t, num_microbatches = plan.num_steps - 1, plan.num_microbatches
    forward = [plan.horizon(t, i, j) > 0 for i in range(num_microbatches)]
    backward = plan.backward_horizon(j) > 0
    replaced = num_microbatches if backward else sum(forward)
    guessed = sum(forward)
    return (
        (replaced * times.copy_s + guessed * times.guess_s) / num_microbatches,
        replaced * (times.copy_s + backward * times.guess_s) / num_microbatches,
        times.copy_s if plan.depth(j) > 1 else 0.0,
    )
