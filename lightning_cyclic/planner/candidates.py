"""Candidates: every way to spend the workers that the planner looks at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self, final

from lightning_cyclic.errors import PlanError, one_of
from lightning_cyclic.plan import Plan, make_plan
from lightning_cyclic.plan.placement import Shared
from lightning_cyclic.plan.presets import (
    PLACEMENTS,
    PRESETS,
    SCHEDULES,
    SHARDINGS,
    WEIGHTS,
    default_num_stages,
)
from lightning_cyclic.plan.schedules import AbstractSchedule
from lightning_cyclic.planner.profile import ModelProfile
from lightning_cyclic.planner.ring import RingNumbers, best_around_ring
from lightning_cyclic.planner.stages import Stages
from lightning_cyclic.simulate.coding import Coding
from lightning_cyclic.simulate.costs import Costs, Network

PRECISIONS: Final = {"32-true": 4, "bf16-true": 2, "16-true": 2}  # bytes of each weight
CHECKPOINTING: Final = ("never", "always", "optimal", "offload")
_FLOAT32_BYTES = 4
_INDEX_BYTES = 4  # int32
_FINENESS = (1, 2, 4)  # stages per worker that runs whole micro-batches: finer ones overlap better
DEFAULT_BANDWIDTH: Final = "10Gbit/s"  # of each worker, in each direction
DEFAULT_LATENCY: Final = "50us"  # of a message
INSIDE_BANDWIDTH: Final = "100Gbit/s"  # the same between workers of a host
INSIDE_LATENCY: Final = "5us"
# schedules that let workers wait less for each other
_FOR_SEVERAL = {n for n, x in SCHEDULES.items() if x.splits or x.stages_per_worker > 1}
_DOUBLINGS = 2  # of a single profile's micro-batch


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StatesPerParam:
    """Hold what training keeps and sends beside the weights, of each byte of them in forwards.

        dense       weights | gradient | masters, float32 gradient | optimizer state
        compressed  weights | gradient f | masters, float32 gradient, state f | index f

    Weights stay dense, with zeros where they are pruned, as forwards and backwards need them so.
    Everything else has the kept fraction f of the elements alone, behind one int32 index. Bytes
    per parameter with Adam, at the optimizer's step: 20 or 22 f + 2 in low precision with master
    weights, 16 or 20 f + 4 in "32-true".

    Args:
        gradient: of a gradient, and of a sum of them.
        optimizer: of its state, and of what it has in its step: master weights and gradients in
            float32, or the kept weights side by side.
        kept: fraction of the elements that are kept, and that messages carry.
        sums: of a sum of gradients of several workers, which is float32.
        break_even: fraction from which on compressed states take more than dense ones.
    """

    gradient: float
    optimizer: float
    index: float
    kept: float
    sums: float
    break_even: float

    @classmethod
    def of(cls, precision: str, sparsity: float | None, state_per_param: float) -> Self:
        """Count what is kept.

        Args:
            sparsity: pruned fraction; None for dense training.
            state_per_param: bytes of optimizer state per byte of parameters in float32.

        Raises:
            PlanError: an unknown precision, or a sparsity outside [0, 1).

        Source: section III of SAMO, https://arxiv.org/abs/2302.05045, without its copy in the
            step, as weights are written in place.

        Example:
            >>> states = StatesPerParam.of("bf16-true", 0.9, 2.0)
            >>> round(2 * (1 + states.gradient + states.optimizer + states.index), 9)
            4.2
        """
        if precision not in PRECISIONS:
            raise PlanError(one_of(precision, list(PRECISIONS), "precision", "use bf16-true"))
        if sparsity is not None and not 0 <= sparsity < 1:
            raise PlanError(
                f"sparsity={sparsity}; allowed: from 0 to below 1, the pruned fraction of the "
                "parameters; give 0.9 for nine in ten, or leave it out for dense training"
            )
        size = PRECISIONS[precision]
        float32 = _FLOAT32_BYTES / size
        is_low = size < _FLOAT32_BYTES
        dense = state_per_param * float32 + 2 * float32 * is_low  # masters, gradients in float32
        # weights in float32 are no masters: the optimizer's step has a copy of those kept
        compressed = dense + float32 * (not is_low)
        index = _INDEX_BYTES / size
        kept = 1.0 if sparsity is None else 1.0 - sparsity
        is_dense = sparsity is None
        return cls(
            gradient=kept,
            optimizer=dense if is_dense else kept * compressed,
            index=0.0 if is_dense else kept * index,
            kept=kept,
            sums=float32,
            break_even=(1 + dense) / (1 + compressed + index),
        )


def _default_presets() -> tuple[str, ...]:
    """Leave out names for the axes of an earlier preset, and local steps.

    How often workers have to meet is not a question of speed.
    """
    first: dict[tuple[str, ...], str] = {}
    for name, preset in PRESETS.items():
        if WEIGHTS[preset.weights].is_local:
            continue
        axes = preset.schedule, preset.placement, preset.weights, preset.sharding
        first.setdefault(axes, name)
    return tuple(first.values())


DEFAULT_PRESETS: Final = _default_presets()


@final
@dataclass(frozen=True, kw_only=True)  # no slots: what is derived is cached in __dict__
class Problem:
    """Hold what is asked of the planner.

    Args:
        profiles: of the model, one per size of a micro-batch that was measured. A single one is
            also taken twofold and fourfold, which is safe: samples are not slower in company.
            Smaller ones are not guessed, as they would look faster than they are.
        batch_size: samples per update. [for each worker the largest measured micro-batch]
        presets: names of presets to look at. [those that a strategy runs]
        checkpointing: what pipelines may do with what forwards leave, as activation_checkpointing
            says it. [all but "offload"]
        disk_bytes_per_s: of the disk of "offload", each way.
        state_per_param: bytes of optimizer state per byte of parameters in float32. [2: Adam's
            moments]
        slack: slots that a new version needs to travel, for the ``freshest`` rule. [0; around a
            ring of workers the planner may choose more]
        sparsity: pruned fraction of the parameters, from 0 to below 1, of which no gradient,
            master weight and optimizer state is kept or sent (SAMO). [None: dense]
        host_network: the links of workers that run whole micro-batches, where hosts have several.
            [network]
        group_sizes: how many of these may run in the same slots. [each alone]
        precision: in which the profiles' bytes are; in "bf16-true" and "16-true" the optimizer
            has master weights and gradients in float32 besides. ["32-true"]

    Raises:
        PlanError: numbers that cannot be, profiles of one size or of different units, or an
            unknown preset.
    """

    profiles: tuple[ModelProfile, ...]
    num_workers: int
    memory_bytes: float
    network: Network = Network()
    batch_size: int = 0
    presets: tuple[str, ...] = DEFAULT_PRESETS
    checkpointing: tuple[str, ...] = ("never", "always", "optimal")
    disk_bytes_per_s: float | None = None
    state_per_param: float = 2.0
    slack: int = 0
    sparsity: float | None = None
    precision: str = "32-true"
    host_network: Network | None = None
    group_sizes: tuple[int, ...] = (1,)
    coding: Coding | None = None

    def __post_init__(self) -> None:
        for preset in self.presets:
            if preset not in PRESETS:
                raise PlanError(one_of(preset, list(PRESETS), "preset", "use cyclic_pipeline"))
            if WEIGHTS[PRESETS[preset].weights].is_local:
                raise PlanError(
                    f"preset={preset!r}, of which no time says how often workers have to meet to "
                    f"learn as well; allowed: {', '.join(DEFAULT_PRESETS)}; use these, and "
                    f"`lightning-cyclic simulate {preset} --every 100` to see what it costs"
                )
        for name, least in (("num_workers", 1), ("batch_size", 0), ("state_per_param", 0)):
            if getattr(self, name) < least:
                raise PlanError(
                    f"{name}={getattr(self, name)}; allowed: {least} or more; correct it"
                )
        if not self.memory_bytes > 0:
            raise PlanError(
                f"memory_bytes={self.memory_bytes}; allowed: above 0; give what a worker has"
            )
        sizes = [profile.micro_size for profile in self.profiles]
        units = {tuple(unit.name for unit in profile.units) for profile in self.profiles}
        if not sizes or len(set(sizes)) != len(sizes) or len(units) > 1:
            raise PlanError(
                f"profiles of micro-batches of {sizes} samples; allowed: one or more of the same "
                "units, each of another size; give one profile per size"
            )

        self._check_checkpointing()
        if self.sparsity is not None and self.needs_whole_micros:
            raise PlanError(
                f"compress={self.coding} with sparsity={self.sparsity}, whose messages have kept "
                "elements alone; allowed: one of them, or a dtype, in which sums travel; use "
                'compress="bf16", or leave sparsity out'
            )
        assert self.states  # which looks at sparsity and precision

    def _check_checkpointing(self) -> None:
        for choice in self.checkpointing:
            if choice not in CHECKPOINTING:
                raise PlanError(one_of(choice, CHECKPOINTING, "checkpointing", 'use "never"'))
        if "offload" in self.checkpointing and self.disk_bytes_per_s is None:
            raise PlanError(
                "checkpointing='offload' without disk_bytes_per_s, by which it takes its time; "
                "allowed: bytes per second; use disk_bytes_per_s=1e9"
            )

    @cached_property
    def states(self) -> StatesPerParam:
        return StatesPerParam.of(self.precision, self.sparsity, self.state_per_param)

    @property
    def to_owners(self) -> bool:
        """Say whether gradients go straight to owners, where workers run whole micro-batches."""
        return self.coding is not None and self.coding.to_owners

    @property
    def codes_weights(self) -> bool:
        """Say whether new weights are sent as what they add to those that all workers have."""
        return self.coding is not None and self.coding.weights is not None

    @property
    def needs_whole_micros(self) -> bool:
        """Say whether its codec is for workers that run whole micro-batches alone."""
        return self.to_owners or self.codes_weights

    @property
    def param_bytes(self) -> float:
        """Return the bytes of all parameters; what units share counts once."""
        tied = sum(tie.bytes * (len(tie.units) - 1) for tie in self.profiles[0].ties)
        return sum(unit.param_bytes for unit in self.profiles[0].units) - tied

    @property
    def left_bytes(self) -> float:
        """Return what each worker keeps of gradients that it has not sent, in float32."""
        if self.coding is None or not self.coding.has_memory:
            return 0.0
        return self.param_bytes * self.states.sums

    @property
    def versions_bytes(self) -> float:
        """Return what new weights of a codec take besides, on each worker.

        Who owns a stage has what its weights lack beside those that all have; all others have the
        newest version to which the next one adds.
        """
        return self.param_bytes * self.codes_weights

    @property
    def besides_bytes(self) -> float:
        """Return what codecs keep on each worker, beside all that a plan counts."""
        return self.left_bytes + self.versions_bytes

    @property
    def room_bytes(self) -> float:
        """Return what a worker has for all that a plan counts."""
        return self.memory_bytes - self.besides_bytes

    def costs(self, stages: Stages) -> Costs:
        """Return what stages cost, with what is sent of their gradients."""
        costs = stages.costs(kept=self.states.kept, sums=self.states.sums)
        return costs if self.coding is None else self.coding.of(costs)

    @property
    def ring_network(self) -> Network:
        """Return the links of workers that run whole micro-batches."""
        return self.host_network or self.network

    @property
    def samples(self) -> int:
        return self.batch_size or max(p.micro_size for p in self.profiles) * self.num_workers

    @cached_property
    def by_size(self) -> dict[int, ModelProfile]:
        """Return profiles by the size of a pipeline's micro-batch, measured or scaled."""
        found = {profile.micro_size: profile for profile in self.profiles}
        if len(found) > 1:
            return found
        (base,) = self.profiles
        larger = [base.micro_size << k for k in range(1, _DOUBLINGS + 1)]
        return found | {size: base.scaled(size) for size in larger}

    def profile(self, micro_size: int) -> ModelProfile:
        """Return the profile of a micro-batch: of a size asked for, else the nearest, scaled."""
        return self.by_size.get(micro_size) or self._nearest(micro_size)

    def _nearest(self, micro_size: int) -> ModelProfile:
        nearest = min(self.profiles, key=lambda p: abs(p.micro_size - micro_size))
        return nearest if nearest.micro_size == micro_size else nearest.scaled(micro_size)

    @property
    def num_units(self) -> int:
        return len(self.profiles[0].units)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Hold one way to spend the workers, before anybody knows where stages begin.

    Args:
        num_microbatches: micro-batches per update, of all replicas together.
        checkpointing: what activation_checkpointing is.
        ring: numbers of workers around a ring that were chosen for their network. [no groups, and
            the problem's slack]
    """

    preset: str
    replicas: int
    num_stages: int
    num_microbatches: int
    micro_size: int
    checkpointing: str = "never"
    ring: RingNumbers | None = None

    @property
    def runs_whole_micro(self) -> bool:
        """Say whether a worker runs all stages of its micro-batches."""
        return PLACEMENTS[PRESETS[self.preset].placement].runs_whole_micro

    @property
    def has_flush(self) -> bool:
        """Say whether a pipeline runs empty at each update."""
        return PRESETS[self.preset].weights == "sync"

    @property
    def schedule(self) -> type[AbstractSchedule]:
        return SCHEDULES[PRESETS[self.preset].schedule]

    @property
    def remat(self) -> bool:
        """Say whether stages keep their inputs alone, and run again as a whole."""
        return self.checkpointing == "always"

    @property
    def offload(self) -> bool:
        """Say whether what forwards leave is away until their backward."""
        return self.checkpointing == "offload"

    @property
    def fills_limit(self) -> bool:
        """Say whether stages run again what their worker's limit has no room for."""
        return self.checkpointing == "optimal"

    @property
    def of_each(self) -> int:
        """Return the micro-batches per update of each replica."""
        return self.num_microbatches // self.replicas

    def plan(
        self, problem: Problem, *, num_steps: int, tied: Sequence[Sequence[int]] = ()
    ) -> Plan:
        """Make the plan; that its program can run is for :func:`proof_of` to say."""
        return make_plan(
            self.preset,
            num_stages=self.num_stages,
            num_workers=problem.num_workers,
            num_microbatches=self.num_microbatches,
            num_steps=num_steps,
            slack=problem.slack if self.ring is None else self.ring.slack,
            group_size=1 if self.ring is None else self.ring.group_size,
            replicas=self.replicas,
            tied=tied,
            offloads=self.offload,
            to_owners=problem.to_owners and self.runs_whole_micro,
            proved=False,
        )


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Yield every candidate.

    Of pipelines: each replicas and depth whose product is the number of workers, with as many
    stages of a worker as the schedule has by default, each size of a micro-batch that divides the
    batch, with and without rematerialisation. Of workers that run whole micro-batches: one, two
    and four stages per worker, one micro-batch for each, and around a ring the numbers that are
    predicted to be fastest. Whether axes and numbers fit together is not asked here.

    Source: the search space of PipeDream-2BW's planner, section 4,
        https://arxiv.org/abs/2006.09503; presets are added.
    """
    for preset in problem.presets:
        placement = PLACEMENTS[PRESETS[preset].placement]
        if problem.codes_weights and SHARDINGS[PRESETS[preset].sharding].gathers:
            continue  # no worker has all weights, to which a change could be added
        if placement.runs_whole_micro:
            yield from _replicated(problem, preset)
        elif problem.needs_whole_micros:
            continue
        elif PRESETS[preset].placement == "shared":
            yield from _pipelines(problem, preset, 1, Shared.fewest_stages(problem.num_workers))
        else:
            for replicas in range(1, problem.num_workers + 1):
                if problem.num_workers % replicas == 0:
                    yield from _pipelines(
                        problem, preset, replicas, problem.num_workers // replicas
                    )


def _replicated(problem: Problem, preset: str) -> Iterator[Candidate]:
    micro_size, rest = divmod(problem.samples, problem.num_workers)
    if not micro_size or rest:
        return
    counts = {min(k * problem.num_workers, problem.num_units) for k in _FINENESS}
    ring = _around_ring(problem, preset, micro_size)
    numbers = [(num_stages, None) for num_stages in sorted(counts)]
    for num_stages, found in [*numbers, *([] if ring is None else [(ring.num_stages, ring)])]:
        yield Candidate(
            preset=preset,
            replicas=1,
            num_stages=num_stages,
            num_microbatches=problem.num_workers,
            micro_size=micro_size,
            ring=found,
        )


def _around_ring(problem: Problem, preset: str, micro_size: int) -> RingNumbers | None:
    """Choose stages, slack and groups for a preset's rule; None where it has no ring."""
    axes = PRESETS[preset]
    is_delayed = axes.weights == "delayed"
    has_ring = axes.placement == "replicated" and not SHARDINGS[axes.sharding].gathers
    if problem.num_workers == 1 or not has_ring or not (is_delayed or axes.weights == "freshest"):
        return None
    profile = problem.profile(micro_size)
    return best_around_ring(
        preset,
        lambda num_stages: problem.costs(Stages.even(profile, num_stages, together=True)),
        problem.ring_network,
        problem.num_workers,
        problem.num_units,
        slack=problem.slack or None,
        group_sizes=problem.group_sizes,
        to_owners=problem.to_owners,
    )


def _pipelines(problem: Problem, preset: str, replicas: int, depth: int) -> Iterator[Candidate]:
    schedule = PRESETS[preset].schedule
    num_stages = default_num_stages(schedule, depth)
    for micro_size in sorted(problem.by_size, reverse=True):
        num_microbatches, rest = divmod(problem.samples, micro_size)
        if (
            num_stages > problem.num_units
            or (depth == 1 and schedule in _FOR_SEVERAL)  # a worker alone gains nothing
            or rest
            or num_microbatches < replicas
            or num_microbatches % replicas
        ):
            continue
        for checkpointing in problem.checkpointing:
            if checkpointing == "optimal" and not _can_fill(problem, preset):
                continue
            yield Candidate(
                preset=preset,
                replicas=replicas,
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                micro_size=micro_size,
                checkpointing=checkpointing,
            )


def _can_fill(problem: Problem, preset: str) -> bool:
    """Say whether a run can choose what runs again, and whether what it counts is known here."""
    is_plain = problem.sparsity is None and problem.precision == "32-true"
    return is_plain and not WEIGHTS[PRESETS[preset].weights].looks_ahead
