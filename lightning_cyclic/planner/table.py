"""A ranking as a table, and as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any, final

from lightning_cyclic.plan import program_of
from lightning_cyclic.planner.candidates import Problem
from lightning_cyclic.planner.gains import Gains
from lightning_cyclic.planner.ring import ALIKE
from lightning_cyclic.planner.search import RankedPlan, Ranking
from lightning_cyclic.planner.stages import Stages
from lightning_cyclic.simulate.coding import CodecCosts, Coding
from lightning_cyclic.simulate.compare import memory_of_lockstep
from lightning_cyclic.simulate.lockstep import Lockstep, best_lockstep
from lightning_cyclic.simulate.memory import Memory
from lightning_cyclic.simulate.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 100
_BOUNDS = "too long to simulate; no step with these stages is faster, and it may be much slower"
_DISK = "/tmp"  # of which the user knows better
_REMAT = {"never": "", "always": "yes", "optimal": "some", "offload": "away"}
_COLUMNS = ("w x S", "micro", "remat", "step", "samples/s", "memory", "bubble", "stale")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    step: Lockstep
    samples: int
    memory_bytes: float

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step.step_s if self.step.step_s else float("inf")


def reference(problem: Problem) -> Reference | None:
    """Predict DistributedDataParallel, each worker with an equal part of the samples.

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


def table(ranking: Ranking, *, colour: bool = False) -> str:
    """Print the plans, and of the first what to write and what its fullest worker keeps.

    Behind them those that would take too long to simulate, by their bounds.

    Args:
        colour: use the colours of a terminal. [False: plain text]
    """
    from rich.console import Console  # noqa: PLC0415

    console = Console(width=_WIDTH, force_terminal=colour, no_color=not colour, highlight=False)
    with console.capture() as capture:
        numbers = map(str, range(1, len(ranking.plans) + 1))
        console.print(_grid(_title(ranking), zip(numbers, ranking.plans, strict=True)))
        for line in _notes(ranking):
            console.print(line, markup=False, soft_wrap=True)
        if ranking.bounds:
            console.print()
            console.print(_grid(_BOUNDS, (("", plan) for plan in ranking.bounds)))
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def _grid(title: str, plans: Iterable[tuple[str, RankedPlan]]) -> Table:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    grid = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    grid.add_column("", justify="right", no_wrap=True)
    grid.add_column("preset", style="bold", no_wrap=True)
    for name in _COLUMNS:
        grid.add_column(name, justify="right", no_wrap=True)
    for number, plan in plans:
        grid.add_row(number, *_row(plan), style="green" if number == "1" else "")
    return grid


def _title(ranking: Ranking) -> str:
    problem = ranking.problem
    network = problem.network
    return (
        f"{problem.profiles[0].name}: {problem.samples} samples per update, "
        f"{problem.num_workers} workers of {show_bytes(problem.memory_bytes)}, "
        f"{show_seconds(network.latency_s)} latency, "
        f"{show_bytes(network.bandwidth_bytes_per_s)}/s"
    )


def _row(plan: RankedPlan) -> Iterator[str]:
    candidate = plan.fit.candidate
    yield candidate.preset
    yield f"{candidate.replicas} x {candidate.num_stages}"
    yield f"{candidate.num_microbatches} of {candidate.micro_size}"
    yield _REMAT[candidate.checkpointing]
    yield f"{'' if plan.is_simulated else '>='}{show_seconds(plan.step_s)}"
    yield f"{'' if plan.is_simulated else '<='}{plan.samples_per_s:.4g}"
    yield show_bytes(plan.fit.memory_bytes)
    yield f"{'' if plan.is_simulated else '>='}{plan.bubble:.1%}"
    yield _staleness(plan)


def _staleness(plan: RankedPlan) -> str:
    mean, most = plan.staleness
    return (f"{mean:.2g}, {most}" if most else "0") + (" p" if plan.horizon else "")


def _notes(ranking: Ranking) -> Iterator[str]:
    yield "w: replicas, S: stages; micro: micro-batches per update, of so many samples"
    predicted = (
        "; p: and predict the rest"
        if any(plan.horizon for plan in (*ranking.plans, *ranking.bounds))
        else ""
    )
    yield f"stale: updates that forwards are behind, mean and most{predicted}"
    if ranking.num_left_out:
        yield f"{ranking.num_left_out} candidates with more micro-batches were not looked at"
    yield from _beside(ranking)
    states, sparsity = ranking.problem.states, ranking.problem.sparsity
    if sparsity is not None and states.kept > states.break_even:
        yield (
            f"sparsity={sparsity:g} is below break-even: of "
            f"{ranking.problem.precision} with f > {states.break_even:.3f} kept, compressed "
            "states take more than dense ones"
        )
    yield ""
    yield f"1: {written(ranking.plans[0], ranking.problem)}"
    fullest = max(ranking.plans[0].fit.memory, key=lambda worker: worker.total)
    most = max(program_of(ranking.plans[0].fit.plan).communicators.values(), default=0)
    text = f"its fullest worker keeps {_parts(fullest)}"
    if besides := " and ".join(_besides(ranking.problem)):
        text += f"; and {besides}, which memory above lacks"
    text += f"; on GPUs a worker is in {most} NCCL communicators at most" if most else ""
    yield from wrap(text, _WIDTH - 1, initial_indent="   ", subsequent_indent="   ")


def _beside(ranking: Ranking) -> Iterator[str]:
    """Yield what DistributedDataParallel is predicted to do."""
    ddp = reference(ranking.problem)
    if ddp is not None:
        yield (
            f'strategy="ddp" ({ddp.step.all_reduce} all-reduce): '
            f"{show_seconds(ddp.step.step_s)} per step, {ddp.samples_per_s:.4g} samples/s, "
            f"{show_bytes(ddp.memory_bytes)} per worker"
        )
        if ddp.samples_per_s * ALIKE >= ranking.plans[0].samples_per_s:
            yield 'which is as fast as plan 1, or faster: use Trainer(strategy="ddp")'


def _besides(problem: Problem) -> Iterator[str]:
    """Yield what codecs keep on each worker."""
    if left := problem.left_bytes:
        yield f"{show_bytes(left)} of what gradients left"
    if versions := problem.versions_bytes:
        yield f"{show_bytes(versions)} for new weights"


def _parts(memory: Memory) -> str:
    parts = ((name, size) for name, size in asdict(memory).items() if size)
    return ", ".join(f"{show_bytes(size)} of {name}" for name, size in parts)


def arguments_of(plan: RankedPlan) -> dict[str, Any]:
    """Return the arguments of the strategy that runs a plan, as plain data.

    Where stages begin is said by paths, so that the strategy need not choose.
    """
    candidate, names, made = plan.fit.candidate, plan.fit.stages.names[1:], plan.fit.plan
    found: dict[str, Any] = {"preset": candidate.preset, "stages": list(names) if names else 1}
    if not candidate.runs_whole_micro:
        found["num_microbatches"] = candidate.of_each
    if candidate.replicas > 1:
        found["replicas"] = candidate.replicas
    if candidate.checkpointing != "never":
        found["activation_checkpointing"] = candidate.checkpointing
    if plan.fit.limit_bytes is not None:
        found["memory_limit_bytes"] = plan.fit.limit_bytes
    if candidate.offload:
        found["disk"] = _DISK
    if made.slack:
        found["slack"] = made.slack
    if candidate.runs_whole_micro and made.schedule == "cyclic":
        found["group_size"] = made.group_size  # also 1, as the strategy's choice depends on hosts
    return found


def codec_of(plan: RankedPlan, problem: Problem) -> Coding | None:
    """Return what makes messages smaller; None where no gradients and new weights are sent."""
    candidate = plan.fit.candidate
    sends = candidate.runs_whole_micro or candidate.replicas > 1
    return problem.coding if sends or plan.fit.plan.axes.placement.takes_turns else None


def written(plan: RankedPlan, problem: Problem) -> str:
    """Write a plan as the strategy that runs it."""
    preset, *others = arguments_of(plan).items()
    arguments = [json.dumps(preset[1]), *(f"{name}={json.dumps(x)}" for name, x in others)]
    if (coding := codec_of(plan, problem)) is not None:
        arguments.append(f"compress={coding}")
    return f"{_door(plan)}({', '.join(arguments)})"


def _door(plan: RankedPlan) -> str:
    return "CyclicStrategy" if plan.fit.candidate.runs_whole_micro else "PipelineStrategy"


def as_config(plan: RankedPlan, problem: Problem, layout: str) -> dict[str, Any]:
    """Return a plan as the configuration of a strategy.

    Args:
        layout: "lightning", as LightningCLI reads it, or "hydra", as Hydra instantiates it.
    """
    arguments = arguments_of(plan)
    if (coding := codec_of(plan, problem)) is not None:
        codecs = {what: _codec(codec, layout) for what, codec in coding.parts()}
        arguments["compress"] = codecs["gradients"] if coding.weights is None else codecs
    if layout == "hydra":  # lists and mappings are to be plain ones
        arguments = {"_convert_": "all", **arguments}
    return _made(_door(plan), arguments, layout)


def _codec(codec: CodecCosts, layout: str) -> str | dict[str, Any]:
    return _made(codec.kind, dict(codec.numbers), layout) if codec.numbers else codec.kind


def _made(name: str, arguments: dict[str, Any], layout: str) -> dict[str, Any]:
    """Return an object of this package as a configuration has it."""
    path = f"lightning_cyclic.{name}"
    if layout == "hydra":
        return {"_target_": path, **arguments}
    return {"class_path": path, "init_args": arguments}


def as_data(ranking: Ranking, gains: Gains | None = None) -> list[dict[str, Any]]:
    """Return the plans, the best first, as plain data.

    Args:
        gains: what sends less than the first of them. [nothing does]
    """
    told = None if gains is None else {
        "alone_s": gains.alone_s, "ways": [way._asdict() for way in gains.ways]
    }  # fmt: skip
    return [
        asdict(plan.fit.candidate)
        | {
            "remat": plan.fit.candidate.remat,
            "offload": plan.fit.candidate.offload,
            "ring": None if (ring := plan.fit.candidate.ring) is None else ring._asdict(),
            "stages": list(plan.fit.stages.names),
            "again_s": list(plan.fit.stages.again_s),
            "step_s": plan.step_s,
            "is_simulated": plan.is_simulated,
            "samples_per_s": plan.samples_per_s,
            "bubble": plan.bubble,
            "staleness": {"mean": plan.staleness[0], "most": plan.staleness[1]},
            "horizon": plan.horizon,
            "memory": [asdict(worker) for worker in plan.fit.memory],
            "strategy": written(plan, ranking.problem),
            "gains": told if n == 0 else None,
        }
        for n, plan in enumerate((*ranking.plans, *ranking.bounds))
    ]
