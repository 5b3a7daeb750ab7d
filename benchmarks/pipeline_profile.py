"""What benchmarks/pipeline.py measures for the package's simulator, and what that says.

Every worker times its stages at the same time as the others theirs, since they share caches and
memory; two workers time messages between them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from pipeline_contenders import Contender, Figures, Stopwatch
from pipeline_model import Case, cut_by_hand, loss_of
from torch import Tensor, nn

from lightning_cyclic import make_plan
from lightning_cyclic.simulate import Costs, Network, simulate_shared

_SMALL, _LARGE, _TIMES = 64, 1 << 20, 20  # bytes, bytes, how often


def profiler(case: Case) -> Contender:
    """Return what measures this worker's stages, and the messages between two workers."""
    parts = cut_by_hand(case)
    mine = [dist.get_rank()] if case.num_workers > 1 else list(range(case.num_stages))
    optimizers = {j: case.optimizer(parts[j]) for j in mine}

    def contender(num_steps: int) -> Figures:
        watch = Stopwatch()
        stages = {j: _profile(case, parts[j], j, optimizers[j], num_steps) for j in mine}
        figures = watch.stop(num_steps)
        if case.num_workers > 1:
            small, large = _message_s(_SMALL), _message_s(_LARGE)
            figures |= {"latency_s": small, "bytes_per_s": _LARGE / max(large - small, 1e-9)}
        return figures | {"stages": stages}

    return contender


def _profile(
    case: Case, part: nn.Module, j: int, optimizer: torch.optim.Optimizer, num_steps: int
) -> tuple[float, float, float]:
    """Return the seconds of a forward, a backward and an update of stage j."""
    forwards, backwards, updates = [], [], []
    tokens = case.batch()[: case.rows]
    for _ in range(num_steps):
        for _ in range(case.num_micro):
            x = tokens
            if j > 0:
                x = torch.randn(case.rows, case.length, case.width, requires_grad=True)
            y, taken = _timed(lambda x=x: _forward(case, part, j, x, tokens))
            forwards.append(taken)
            backwards.append(_timed(lambda y=y: y.backward(torch.ones_like(y)))[1])
        updates.append(_timed(optimizer.step)[1])
        optimizer.zero_grad()
    return _mean(forwards), _mean(backwards), _mean(updates)


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


def predicted_s(
    case: Case, executor: str, preset: str, rounds: Sequence[Sequence[Figures]]
) -> float:
    """Return the seconds of a step that the simulator says.

    Args:
        case: what was measured.
        executor: which contender; "sequential" runs all forwards but the last again.
        preset: whose plan.
        rounds: what the profilers returned, by round and worker.
    """
    again = (case.num_micro - 1) / case.num_micro if executor == "sequential" else 0.0
    return median(_of_round(case, preset, workers, again) for workers in rounds)


def _of_round(case: Case, preset: str, workers: Sequence[Figures], again: float) -> float:
    # all workers were timed at the same time: those that share cores had their share of them
    cores = len(os.sched_getaffinity(0)) if not case.sleep_ms else case.num_workers
    share = min(1.0, cores / case.num_workers)
    stages = {j: tuple(share * s for s in seconds) for j, seconds in _stages(workers)}
    forward, backward, update = zip(*(stages[j] for j in range(case.num_stages)), strict=True)
    costs = Costs(
        forward_s=forward, update_s=update,
        backward_s=tuple(b + again * f for f, b in zip(forward, backward, strict=True)),
        param_bytes=(0.0,) * case.num_stages, cut_bytes=(case.cut_bytes,) * case.num_stages,
    )  # fmt: skip
    network = Network()
    if case.num_workers > 1:
        network = Network(
            latency_s=workers[0]["latency_s"], bandwidth_bytes_per_s=workers[0]["bytes_per_s"]
        )
    plan = make_plan(
        preset, num_stages=case.num_stages, num_workers=case.num_workers,
        num_micro=case.num_micro, num_steps=8,
    )  # fmt: skip
    return simulate_shared(plan.programs, costs, network, cores=cores).step_s


def _stages(workers: Sequence[Figures]) -> Iterator[tuple[int, tuple[float, float, float]]]:
    for figures in workers:
        for j, seconds in figures["stages"].items():
            yield int(j), seconds
