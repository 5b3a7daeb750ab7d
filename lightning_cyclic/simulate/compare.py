"""A plan beside lockstep data parallelism on the same workers: one row per question."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, final

from lightning_cyclic.plan import Plan, program_of, programs_of
from lightning_cyclic.simulate.account import account
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.engine import simulate
from lightning_cyclic.simulate.lockstep import Lockstep, best_lockstep, lockstep
from lightning_cyclic.simulate.memory import Memory, memory
from lightning_cyclic.simulate.units import show_bytes, show_seconds

_WIDTH = 100
_MEMORY = {
    "parameters": "parameters",
    "versions": "further versions of them",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "inputs": "inputs of stages, and the batch",
    "returns": "gradients of outputs",
    "in_flight": "gradients in buffers of messages",
    "index": "places of kept elements",
}


class Again(NamedTuple):
    """Hold what backwards of a plan run again.

    Args:
        seconds: of each stage, of one micro-batch.
        memory: what each worker keeps by that.
    """

    seconds: tuple[float, ...]
    memory: tuple[Memory, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Hold what a way of training costs; per worker, the worker with the most.

    Args:
        num_microbatches: micro-batches per training step, of all workers.
        bubble: share of the step for which a worker's compute is idle.
        communicators: groups of NCCL that a worker is in, if workers are GPUs; each has memory.
        versions: weight versions of one stage that a worker keeps at once.
        activations: stage-activations that a worker keeps at once.
        all_activations: stage-activations that all workers together keep at once.
        memory: bytes that the worker with the most keeps, by what they are for.
    """

    step_s: float
    num_microbatches: float
    bubble: float
    sent_bytes: float
    sent_messages: float
    communicators: int
    versions: int
    activations: float
    all_activations: float
    memory: Memory

    @property
    def micro_per_s(self) -> float:
        return self.num_microbatches / self.step_s if self.step_s else float("inf")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    preset: str
    num_workers: int
    num_stages: int
    network: Network
    costs: Costs
    plan: Figures
    lockstep: Figures
    reference: Lockstep
    again_s: tuple[float, ...] = ()

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
        return asdict(self) | {
            "costs": costs, "network": network, "speed": self.speed, "again_s": list(self.again_s)
        }  # fmt: skip


def compare(
    plan: Plan,
    costs: Costs,
    network: Network,
    *,
    bucket_bytes: float | None = None,
    state_per_param: float = 2.0,
    again: Again | None = None,
) -> Comparison:
    """Simulate a plan and the reference.

    Args:
        plan: the plan; of ten steps or so, so that some are steady.
        bucket_bytes: size of the reference's ring all-reduces; 0 for one per stage. [the best
            all-reduce, in the best number of buckets]
        state_per_param: bytes of optimizer state per byte of parameters. [2: Adam]
        again: what backwards of the plan run again, those of the reference do not. [nothing]

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
        plan=_of_plan(plan, costs, network, state_per_param, again),
        lockstep=_of_lockstep(plan, costs, reference, state_per_param),
        reference=reference,
        again_s=() if again is None else again.seconds,
    )


def _micro_per_worker(plan: Plan) -> float:
    return max(1.0, plan.num_microbatches / plan.num_workers)


def _reference(plan: Plan, costs: Costs, network: Network, bucket_bytes: float | None) -> Lockstep:
    num_workers, each = plan.num_workers, _micro_per_worker(plan)
    if bucket_bytes is None:
        return best_lockstep(costs, network, num_workers, micro_per_worker=each)
    return lockstep(costs, network, num_workers, micro_per_worker=each, bucket_bytes=bucket_bytes)


def _of_plan(
    plan: Plan, costs: Costs, network: Network, state_per_param: float, again: Again | None
) -> Figures:
    period, shown = 1, plan
    if again is None:
        kept = memory(plan.shortest, costs, state_per_param=state_per_param)
    else:
        costs, kept = costs.running_again(again.seconds), again.memory
    if plan.local is not None and (period := plan.local.every) > 1:
        # a steady one, or two where the first exchange may be used in the second period
        shown = replace(plan, num_steps=(4 if plan.local.delay else 2) * period + 2)
    result = simulate(programs_of(shown), costs, network, shown)
    counted = account(programs_of(shown), costs, period=period)
    workers = counted.workers
    return Figures(
        step_s=result.step_s,
        num_microbatches=plan.num_microbatches,
        bubble=max(result.bubble),
        sent_bytes=_mean(max(sum(worker.sent_bytes.values()) for worker in workers), period),
        sent_messages=_mean(max(sum(w.sent_messages.values()) for w in workers), period),
        communicators=max(program_of(plan).communicators.values(), default=0),
        versions=max(worker.versions for worker in workers),
        activations=max(worker.activations for worker in workers),
        all_activations=counted.activations,
        memory=max(kept, key=lambda m: m.total),
    )


def _mean(total: float, period: int) -> float:
    return total if period == 1 else total / period


def _of_lockstep(plan: Plan, costs: Costs, step: Lockstep, state_per_param: float) -> Figures:
    return Figures(
        step_s=step.step_s,
        num_microbatches=_micro_per_worker(plan) * plan.num_workers,
        bubble=step.bubble,
        sent_bytes=step.sent_bytes,
        sent_messages=step.sent_messages,
        communicators=int(plan.num_workers > 1),
        versions=1,
        activations=plan.num_stages,
        all_activations=plan.num_stages * plan.num_workers,
        memory=memory_of_lockstep(costs, state_per_param),
    )


def memory_of_lockstep(costs: Costs, state_per_param: float) -> Memory:
    """Return what a worker of lockstep data parallelism keeps.

    Args:
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


def table(comparison: Comparison, *, colour: bool = False) -> str:
    """Print a plan beside lockstep data parallelism.

    Args:
        colour: use the colours of a terminal. [False: plain text]

    Returns:
        Lines of text, at first what is assumed of the cluster and of the model; a worker's
        figures are those of the worker with the most.
    """
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    grid = Table(box=SIMPLE_HEAD)
    grid.add_column("")
    grid.add_column(comparison.preset, justify="right", style="bold")
    grid.add_column("lockstep data parallelism", justify="right")
    ours, theirs = _rows(comparison.plan), _rows(comparison.lockstep)
    nothing = show_bytes(0)
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        if not mine == other == nothing:
            grid.add_row(name, mine, other)
    grid.add_row("speed", f"{comparison.speed:.2f}x", "1.00x", style="green")
    console = Console(width=_WIDTH, force_terminal=colour, no_color=not colour, highlight=False)
    with console.capture() as capture:
        console.print(grid)
    rows = "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())
    reference = comparison.reference
    rows += (
        f"\nlockstep: {reference.all_reduce} all-reduce, {reference.num_buckets} "
        f"{'bucket' if reference.num_buckets == 1 else 'buckets'} per step"
    )
    title = _title(comparison)  # rich would wrap it to the width of the table
    return f"{title}\n{rows}"


def _title(comparison: Comparison) -> str:
    network = comparison.network
    cluster = f"{comparison.num_workers} workers, {comparison.num_stages} stages, {_link(network)}"
    if network.inside is not None:
        cluster += f"; on {len(set(network.hosts))} hosts, inside of them {_link(network.inside)}"
    lines = [cluster, *_assumptions(comparison.costs)]
    if comparison.again_s:
        part = sum(comparison.again_s) / (sum(comparison.costs.forward_s) or 1.0)
        each = _each(comparison.again_s, show_seconds)
        lines.append(f"    each backward runs {each} of its stage again: {part:.0%} of a forward")
    return "\n".join(lines)


def _link(network: Network) -> str:
    return (
        f"{show_seconds(network.latency_s)} latency, {show_bytes(network.bandwidth_bytes_per_s)}/s"
    )


def _assumptions(costs: Costs) -> Iterator[str]:
    """Yield what is taken for given of the model, as nobody has measured it here."""
    forward_s, backward_s = sum(costs.forward_s), sum(costs.backward_s)
    cuts = costs.cut_bytes[1:]  # nothing enters stage 0 from another
    between = f"; {_each(cuts, show_bytes)} of activations per cut" if cuts else ""
    yield (
        f"assumed model: {show_bytes(sum(costs.param_bytes))} of parameters, "
        f"{_each(costs.param_bytes, show_bytes)} per stage{between}"
    )
    ratio = f" ({backward_s / forward_s:.3g} times as long)" if forward_s else ""
    yield (
        f"assumed compute: {show_seconds(forward_s + backward_s)} per micro-batch, "
        f"{show_seconds(forward_s)} forward and {show_seconds(backward_s)} backward{ratio}"
    )
    yield (
        f"    of a stage: {_each(costs.forward_s, show_seconds)} forward, "
        f"{_each(costs.backward_s, show_seconds)} backward, "
        f"{_each(costs.update_s, show_seconds)} per update"
    )
    sums = costs.sent_sum_bytes
    if costs.codes or sums not in (costs.param_bytes, costs.sent_param_bytes):
        yield (
            f"assumed codec: {_each(costs.sent_sum_bytes, show_bytes)} per stage of a gradient, "
            f"{_each(costs.encode_s, show_seconds)} to encode, "
            f"{_each(costs.decode_s, show_seconds)} to decode"
        )
    if any(costs.publish_s):
        yield (
            f"assumed codec: {_each(costs.sent_param_bytes, show_bytes)} per stage of new "
            f"weights, {_each(costs.publish_s, show_seconds)} of an update to encode them"
        )


def _each(by_stage: Sequence[float], show: Callable[[float], str]) -> str:
    """Say how much it is of one stage: a number where all are alike, else from which to which."""
    least, most = show(min(by_stage)), show(max(by_stage))
    return least if least == most else f"{least} to {most}"


def _rows(figures: Figures) -> Iterator[tuple[str, str]]:
    yield "time per step", show_seconds(figures.step_s)
    yield "micro-batches per step", f"{figures.num_microbatches:g}"
    yield "micro-batches per second", f"{figures.micro_per_s:.4g}"
    yield "bubble", f"{figures.bubble:.1%}"
    yield "bytes sent per worker and step", show_bytes(figures.sent_bytes)
    yield "messages sent per worker and step", f"{figures.sent_messages:g}"
    yield "NCCL communicators of a worker, if GPUs", str(figures.communicators)
    yield "weight versions read", str(figures.versions)
    yield "stage-activations kept per worker", f"{figures.activations:g}"
    yield "stage-activations kept by all workers", f"{figures.all_activations:g}"
    yield "memory of the worker with the most", show_bytes(figures.memory.total)
    for kind, name in _MEMORY.items():
        yield f"    {name}", show_bytes(getattr(figures.memory, kind))
