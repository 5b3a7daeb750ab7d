"""The processes of the benchmark "pipeline": a team for each contender, all of which take turns.

They are forked from one server that has imported everything and computed nothing, so that a team
starts within a second and inherits no other's heap.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import torch.distributed as dist

from benchmarks.pipeline.contenders import Contender, Figures, make
from benchmarks.pipeline.model import Case
from benchmarks.pipeline.profile import profiler
from benchmarks.rounds import environment, free_port, quiet

Rounds: TypeAlias = list[list[Figures]]  # by round and worker
LIMIT_S = 1200.0  # of one round of a contender


class Team:
    """Hold the processes of one contender.

    Args:
        name: of the contender.
        case: what it trains.
    """

    def __init__(self, name: str, case: Case) -> None:
        context, port = fork_server(), free_port()
        self.name = name
        self._processes, self._pipes = [], []
        for rank in range(case.num_workers):
            env = environment(rank, case.num_workers, "127.0.0.1", port, "lo")
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(name, case, env, theirs), daemon=True)
            process.start()
            theirs.close()  # so that reading from a worker that has died ends
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, num_steps: int, limit_s: float = LIMIT_S) -> list[Figures]:
        """Return the figures of all workers.

        Args:
            num_steps: of each worker.
            limit_s: seconds that they have.

        Raises:
            SystemExit: a worker failed, or took longer.
        """
        until = time.monotonic() + limit_s
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # what it said before it ended is there to be read
                pipe.send(num_steps)
        return [self._received(pipe, until - time.monotonic()) for pipe in self._pipes]

    def _received(self, pipe: Any, limit_s: float) -> Figures:
        said = f"{self.name}: a worker died"
        try:
            if not pipe.poll(max(0.0, limit_s)):
                raise SystemExit(f"{self.name}: a worker did not answer in time")
            if not isinstance(came := pipe.recv(), str):
                return dict(came)
            said = f"{self.name}: {came}"
        except EOFError:
            pass
        raise SystemExit(f"{said}; set SHOW_ERRORS=1 to see why")

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def fork_server() -> Any:
    """Return how processes are made; the server finds what this process finds."""
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for GPUs starts none: it forks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _work(name: str, case: Case, env: Mapping[str, str], pipe: Any) -> None:
    """Be one worker: run as many steps as each message says, and send the figures."""
    os.environ.update(env)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    if not os.environ.get("SHOW_ERRORS"):
        os.dup2(nowhere, 2)
    try:
        contender = make_contender(name, case)
        while True:
            pipe.send(contender(pipe.recv()))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])
        raise


def make_contender(name: str, case: Case) -> Contender:
    """Make a contender, or the profiler, in this process."""
    quiet()
    on_gpu = case.device == "cuda"
    if case.num_workers > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            device_id=case.place if on_gpu else None,
        )
    return profiler(case) if name == "profile" else make(name, case)


def run_teams(cases: Mapping[str, Case], num_steps: int, num_rounds: int) -> dict[str, Rounds]:
    """Return what every contender's workers measured, round by round.

    Args:
        cases: contender -> what it trains.
        num_steps: timed steps of a round.
        num_rounds: how often every contender trains, behind one round that warms up.
    """
    teams = {name: Team(name, case) for name, case in cases.items()}
    rounds: dict[str, Rounds] = {name: [] for name in cases}
    try:
        for k in range(num_rounds + 1):
            for name, team in teams.items():
                figures = team.run(num_steps)
                if k > 0:
                    rounds[name].append(figures)
    finally:
        for team in teams.values():
            team.close()
    return rounds
