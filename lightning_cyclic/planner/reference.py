"""The reference: what DistributedDataParallel, at its best, makes of the same workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lightning_cyclic.planner.candidates import Problem
from lightning_cyclic.planner.stages import Stages
from lightning_cyclic.simulate.compare import memory_of_lockstep
from lightning_cyclic.simulate.lockstep import Lockstep, best_lockstep


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Hold what is predicted.

    Args:
        step: the best of all-reduces and buckets.
        samples: trained per update.
        memory_bytes: that a worker keeps.
    """

    step: Lockstep
    samples: int
    memory_bytes: float

    @property
    def samples_per_s(self) -> float:
        """Return the samples trained per second."""
        return self.samples / self.step.step_s if self.step.step_s else float("inf")


def reference(problem: Problem) -> Reference | None:
    """Predict DistributedDataParallel, each worker with an equal part of the samples.

    Args:
        problem: what is asked of the planner.

    Returns:
        What is predicted; None where workers have no equal parts, a worker has no room for it, or
        states are compressed, which DistributedDataParallel does not know.
    """
    micro_size, rest = divmod(problem.samples, problem.num_workers)
    if rest or not micro_size or problem.sparsity is not None:
        return None
    profile = problem.profile(micro_size)
    costs = Stages.of(profile, range(len(profile.units)), together=True).costs()
    memory = memory_of_lockstep(costs, problem.states.optimizer)
    if memory.total > problem.memory_bytes:
        return None
    step = best_lockstep(costs, problem.ring_network, problem.num_workers)
    return Reference(step=step, samples=problem.samples, memory_bytes=memory.total)
