"""A plan beside lockstep data parallelism on the same workers: one row per question."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import final

from lightning_cyclic.plan import Plan
from lightning_cyclic.simulate.account import account
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.engine import simulate
from lightning_cyclic.simulate.lockstep import Lockstep, best_lockstep, lockstep
from lightning_cyclic.simulate.memory import Memory, memory


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Hold what a way of training costs; per worker, the worker with the most.

    Args:
        step_s: seconds per training step, in steady state.
        num_microbatches: micro-batches per training step, of all workers.
        bubble: share of the step for which a worker's compute is idle.
        sent_bytes: bytes that a worker sends per step.
        sent_messages: messages that a worker sends per step.
        versions: weight versions of one stage that a worker keeps at once.
        activations: stage-activations that a worker keeps at once.
        all_activations: stage-activations that all workers together keep at once.
        memory: bytes that the worker with the most keeps, by what they are for.
    """

    step_s: float
    num_microbatches: float
    bubble: float
    sent_bytes: float
    sent_messages: int
    versions: int
    activations: float
    all_activations: float
    memory: Memory

    @property
    def micro_per_s(self) -> float:
        """Return the micro-batches per second, of all workers."""
        return self.num_microbatches / self.step_s if self.step_s else float("inf")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Hold the figures of a plan and of the reference, and what they were computed for."""

    preset: str
    num_workers: int
    num_stages: int
    network: Network
    costs: Costs
    plan: Figures
    lockstep: Figures
    reference: Lockstep

    @property
    def speed(self) -> float:
        """Return how many times as many micro-batches per second the plan trains."""
        return self.plan.micro_per_s / self.lockstep.micro_per_s

    def as_dict(self) -> dict[str, object]:
        """Return names and plain numbers, for JSON."""
        costs = {name: list(by_stage) for name, by_stage in asdict(self.costs).items()}
        network = asdict(self.network)
        if self.network.inside is None:
            del network["hosts"], network["inside"]
        return asdict(self) | {"costs": costs, "network": network, "speed": self.speed}


def compare(
    plan: Plan,
    costs: Costs,
    network: Network,
    *,
    bucket_bytes: float | None = None,
    state_per_param: float = 2.0,
) -> Comparison:
    """Simulate a plan and the reference.

    Args:
        plan: the plan; of ten steps or so, so that some are steady.
        costs: what each stage costs.
        network: the links between the workers.
        bucket_bytes: size of the reference's ring all-reduces; 0 for one per stage. [the best
            all-reduce, in the best number of buckets]
        state_per_param: bytes of optimizer state per byte of parameters. [2: Adam]

    Returns:
        Both, side by side. Where the plan has fewer micro-batches per step than workers, the
        reference has one per worker, so compare micro-batches per second.
    """
    reference = _reference(plan, costs, network, bucket_bytes)
    return Comparison(
        preset=plan.preset,
        num_workers=plan.num_workers,
        num_stages=plan.num_stages,
        network=network,
        costs=costs,
        plan=_of_plan(plan, costs, network, state_per_param),
        lockstep=_of_lockstep(plan, costs, reference, state_per_param),
        reference=reference,
    )


def _micro_per_worker(plan: Plan) -> float:
    return max(1.0, plan.num_microbatches / plan.num_workers)


def _reference(plan: Plan, costs: Costs, network: Network, bucket_bytes: float | None) -> Lockstep:
    num_workers, each = plan.num_workers, _micro_per_worker(plan)
    if bucket_bytes is None:
        return best_lockstep(costs, network, num_workers, micro_per_worker=each)
    return lockstep(costs, network, num_workers, micro_per_worker=each, bucket_bytes=bucket_bytes)


def _of_plan(plan: Plan, costs: Costs, network: Network, state_per_param: float) -> Figures:
    result = simulate(plan.programs, costs, network, plan)
    counted = account(plan.programs, costs)
    workers = counted.workers
    return Figures(
        step_s=result.step_s,
        num_microbatches=plan.num_microbatches,
        bubble=max(result.bubble),
        sent_bytes=max(sum(worker.sent_bytes.values()) for worker in workers),
        sent_messages=max(sum(worker.sent_messages.values()) for worker in workers),
        versions=max(worker.versions for worker in workers),
        activations=max(worker.activations for worker in workers),
        all_activations=counted.activations,
        memory=max(memory(plan, costs, state_per_param=state_per_param), key=lambda m: m.total),
    )


def _of_lockstep(plan: Plan, costs: Costs, step: Lockstep, state_per_param: float) -> Figures:
    return Figures(
        step_s=step.step_s,
        num_microbatches=_micro_per_worker(plan) * plan.num_workers,
        bubble=step.bubble,
        sent_bytes=step.sent_bytes,
        sent_messages=step.sent_messages,
        versions=1,
        activations=plan.num_stages,
        all_activations=plan.num_stages * plan.num_workers,
        memory=memory_of_lockstep(costs, state_per_param),
    )


def memory_of_lockstep(costs: Costs, state_per_param: float) -> Memory:
    """Return what a worker of lockstep data parallelism keeps.

    Args:
        costs: of the model.
        state_per_param: bytes of optimizer state per byte of parameters.
    """
    params = sum(costs.param_bytes)
    return Memory(
        parameters=params,
        versions=0.0,
        gradients=params,
        optimizer=state_per_param * params,
        activations=sum(costs.activation_bytes),
        inputs=costs.cut_bytes[0],
        returns=0.0,
        in_flight=params,  # buckets, as DistributedDataParallel has them by default
    )
