"""Options: what the user chose of a plan, checked as soon as it is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import final, get_args

from torch import nn

from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.plan import PRESETS, Plan, make_plan
from lightning_cyclic.plan.placement import Shared
from lightning_cyclic.plan.presets import check_number
from lightning_cyclic.planner.candidates import DEFAULT_BANDWIDTH, DEFAULT_LATENCY
from lightning_cyclic.plugin.checks import (
    REMAT,
    check_adds,
    check_bytes,
    check_choice,
    check_delayed,
    check_once,
    check_plan,
    check_switch,
    check_timed,
    check_used,
    is_stagewise,
)
from lightning_cyclic.plugin.clipping import CLIPPING
from lightning_cyclic.runtime.partial_step.ranks import rank_of
from lightning_cyclic.runtime.stages.evidence import ClockName
from lightning_cyclic.runtime.sum_dtypes import WIRE_DTYPES, SumDtypes
from lightning_cyclic.runtime.transport.choice import Route
from lightning_cyclic.runtime.whole_step.session import auto_stages
from lightning_cyclic.simulate import Network, parse_bandwidth, parse_seconds

TRAINING_S = 300.0  # limit of a wait for another rank, where the user sets none
STARTING_S = 1800.0  # until training has begun, and where code may be compiled; as torch has it


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Hold the arguments of CyclicStrategy that decide the plan, and make plans of them.

    Args:
        preset: as in CyclicStrategy, as are all but the last eight.
        schedule: overrides the preset's.
        placement: overrides the preset's.
        weights: overrides the preset's.
        sharding: overrides the preset's.
        stages: "auto", "measured", a number, or module paths.
        num_microbatches: micro-batches per update, of each replica.
        slack: slots that messages are given to travel.
        groups: of workers that run in the same slots. [each worker is one]
        clip: "stage", "global" or None.
        relay_buffers: "auto" or "all".
        replicas: replicas of a pipeline.
        remat: "never", "always" or "except_last".
        memory_limit_bytes: of a stage; None for any.
        error_feedback: as in CyclicStrategy.
        transport: how messages travel.
        reduce_dtype: in which sums of gradients travel.
        timeout_s: limit of every wait for another rank in training, in seconds.
        starting_s: limit before it, and where code may be compiled, in seconds.
        save_distributed_checkpoint: whether checkpoints are folders, of which ranks write parts.
        verify: how many of the first steps are compared with the plain one.
        num_workers: how many there are; None while it is not known.
        late_updates: whether stages decide together about a step, as the Trainer's flags ask.
        norms: who is told the norms of all gradients, as these flags ask.
        network: the links between workers, by which stages are cut.
    """

    preset: str
    schedule: str | None
    placement: str | None
    weights: str | None
    sharding: str | None
    stages: int | str | Sequence[str]
    num_microbatches: int | None
    slack: int
    groups: int | None
    clip: str | None
    relay_buffers: str
    replicas: int
    remat: str
    memory_limit_bytes: int | None
    error_feedback: bool
    transport: Route
    reduce_dtype: str | None
    timeout_s: float
    starting_s: float
    save_distributed_checkpoint: bool = False
    verify: int = 0
    num_workers: int | None = None
    late_updates: bool = False
    norms: str = "none"
    network: Network = Network()

    def check(self) -> None:
        """Refuse early, before any process, what no number of workers would make right.

        Raises:
            PlanError: unknown names, impossible numbers, or a plan that cannot be run yet.
            ConfigurationError: values that are not understood, or would be ignored.
        """
        check_choice(self.relay_buffers, ("auto", "all"), "relay_buffers")
        check_switch(self.save_distributed_checkpoint, "save_distributed_checkpoint")
        if self.clip is not None:
            check_choice(self.clip, CLIPPING, "clip")
        if self.groups is not None:
            check_number("groups", self.groups)
        check_choice(self.remat, REMAT, "remat")
        check_choice(self.transport, get_args(Route), "transport")
        if self.reduce_dtype is not None:
            check_choice(self.reduce_dtype, tuple(WIRE_DTYPES), "reduce_dtype")
        check_bytes(self.memory_limit_bytes, "memory_limit_bytes")
        check_number("replicas", self.replicas)
        probe = self._probe()
        check_plan(probe)
        check_used(probe, self.remat, self.memory_limit_bytes)
        check_timed(probe, self.stages)
        check_adds(probe, self.reduce_dtype, self.replicas)
        check_delayed(probe, self.error_feedback)

    # ------------------------------------------------------------------ which kind of training

    @property
    def is_stagewise(self) -> bool:
        """Say whether workers run single stages of the step."""
        return is_stagewise(self._probe())

    @property
    def makes_stages_apart(self) -> bool:
        """Say whether no worker needs the whole module, so that each makes its own stages."""
        return self.is_stagewise or self._probe().axes.sharding.gathers

    @property
    def is_cut(self) -> bool:
        """Say whether the step or its batch is cut; else one worker runs Lightning's own step."""
        if not self.is_stagewise or self.num_workers != 1:
            return self.is_stagewise
        plan = self.plan(self.expected_stages(None))
        return plan.num_stages > 1 or plan.num_microbatches > 1 or not self.trains_plainly

    @property
    def is_one_stage(self) -> bool:
        """Say whether one worker has all of the module in one stage, and only its batch is cut."""
        is_bounded = self.memory_limit_bytes is not None
        return self.num_workers == 1 and not is_bounded and self.expected_stages(None) == 1

    @property
    def flows(self) -> bool:
        """Say whether steps of a pipeline begin before those ahead of them have ended."""
        return self._probe().flows

    @property
    def keeps_order(self) -> bool:
        """Say whether each forward is run once, with the newest weights, as on one device."""
        is_alone = self.replicas == 1  # else each replica would change a copy of its own
        return is_alone and self._probe().weights == "sync" and self.remat == "never"

    @property
    def predicts(self) -> bool:
        """Say whether forwards read guesses of weights."""
        return self._probe().axes.weights.looks_ahead

    @property
    def trains_plainly(self) -> bool:
        """Say whether this is one worker whose plan always reads the newest weights."""
        return self.num_workers == 1 and self.plan(1).delay(0) == 0

    @property
    def lines(self) -> str:
        """Write down what all ranks must have alike, a line each."""
        names = [field.name for field in fields(self)]
        return "\n".join(f"{name}={getattr(self, name)!r}" for name in names)

    def sums(self, *, is_scaled: bool) -> SumDtypes:
        """Return the dtypes of sums of gradients.

        Args:
            is_scaled: whether a loss scale follows from gradients that are not finite.
        """
        wire = None if self.reduce_dtype is None else WIRE_DTYPES[self.reduce_dtype]
        return SumDtypes(wire, may_overflow=is_scaled)

    @property
    def clock(self) -> ClockName:
        """Return whose times decide where stages begin."""
        return "measured" if self.stages == "measured" else "counted"

    def worker_of(self, rank: int) -> int:
        """Return which worker a rank is; known once the number of workers is."""
        assert self.num_workers is not None
        return rank_of(rank, self.num_workers // self.replicas) if self.is_stagewise else rank

    # ------------------------------------------------------------------ plans

    def plan(
        self,
        num_stages: int,
        relayed: tuple[int, ...] = (),
        relayed_until: tuple[int, ...] = (),
        *,
        num_workers: int | None = None,
        num_microbatches: int | None = None,
        tied: tuple[tuple[int, ...], ...] = (),
    ) -> Plan:
        """Make the plan.

        Args:
            num_stages: how many stages there are.
            relayed: stages whose buffers travel.
            relayed_until: the last stage in which those of each change.
            num_workers: None for as many as there are.
            num_microbatches: of all replicas together; None for the user's choice.
            tied: groups of stages that share parameters.

        Raises:
            PlanError: axes and numbers do not fit, or the user asks for rounds.
        """
        asked = self.num_microbatches is not None and num_microbatches is None
        if self.num_microbatches is not None and num_microbatches is None:
            num_microbatches = self.num_microbatches * self.replicas
        is_probe = num_workers is not None and num_workers != self.num_workers
        plan = make_plan(
            self.preset,
            num_stages=num_stages,
            num_workers=num_workers or self.num_workers or 1,
            num_microbatches=num_microbatches,
            replicas=self.replicas,
            tied=tied,
            slack=self.slack,
            groups=None if self.groups is None else 1 if is_probe else self.groups,
            relayed=relayed,
            relayed_until=relayed_until,
            schedule=self.schedule,
            placement=self._placement,
            weights=self.weights,
            sharding=self.sharding,
            late_updates=self.late_updates,
            norms=self.norms,
        )
        if asked and plan.rounds > 1:
            raise PlanError(
                f"num_microbatches={plan.num_microbatches} with {plan.num_workers} workers that run whole "
                f"micro-batches, which do not cut their batches; allowed: {plan.num_workers}; use "
                f"num_microbatches={plan.num_workers}, and Trainer(accumulate_grad_batches={plan.rounds})"
            )
        return plan

    def expected_stages(self, module: nn.Module | None) -> int:
        """Return how many stages there will be, as far as that is known before the first step.

        Args:
            module: whose parameters decide, where each worker runs whole micro-batches.
        """
        if self.given_stages is not None:
            return self.given_stages
        if self._placement == "single":
            return self.num_microbatches or 1
        assert self.num_workers is not None
        if self.plans_placement == "shared":
            return Shared.fewest_stages(self.num_workers)
        if self.is_stagewise:
            return max(1, self.num_workers // self.replicas)
        assert module is not None
        ps = [p for p in module.parameters() if p.requires_grad]
        wanted = auto_stages(self.num_workers, sum(p.numel() * p.element_size() for p in ps))
        return max(1, min(wanted, len(ps)))

    def _probe(self) -> Plan:
        """Make a plan of plausible numbers, as the real ones may not be known yet."""
        num_stages = self.given_stages or (2 if self.num_microbatches else 4)
        numbers = {"single": 1, "replicated": self.num_microbatches or 2}
        workers = min(2, num_stages) * self.replicas
        return self.plan(num_stages, num_workers=numbers.get(self.plans_placement, workers))

    @property
    def given_stages(self) -> int | None:
        """Return how many stages the user asked for; None for "auto" and "measured"."""
        if isinstance(self.stages, str):
            return None
        return self.stages if isinstance(self.stages, int) else len(self.stages) + 1

    @property
    def plans_placement(self) -> str:
        """Return the placement of the plan: the one that was chosen, or follows."""
        return self._placement or self._preset_placement

    @property
    def _placement(self) -> str | None:
        """Return the placement that was chosen; None for the preset's.

        One worker that is given several micro-batches runs them on the timetable of as many.
        """
        given = self.placement
        if given is None and self.num_workers == 1 and (self.num_microbatches or 1) > 1:
            return "single" if self._preset_placement == "replicated" else None
        return given

    @property
    def _preset_placement(self) -> str:
        known = PRESETS.get(self.preset)  # make_plan refuses unknown ones
        return known.placement if known else "replicated"


def network_of(bandwidth: str | float | None, latency: str | float | None) -> Network:
    """Return the links between workers, by default those of `lightning-cyclic plan`.

    Args:
        bandwidth: like "10Gbit/s", or bytes per second.
        latency: like "50us", or seconds.

    Raises:
        PlanError: text that is no such number.
    """
    return Network(
        latency_s=_number(DEFAULT_LATENCY if latency is None else latency, parse_seconds),
        bandwidth_bytes_per_s=_number(
            DEFAULT_BANDWIDTH if bandwidth is None else bandwidth, parse_bandwidth
        ),
    )


def _number(given: object, parse: Callable[[str], float]) -> float:
    """Return a number that is given as it is, or as text with a unit."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return float(given) if is_number else parse(str(given))  # type: ignore[arg-type]


def check_network(options: Options, given: Mapping[str, object]) -> None:
    """Refuse numbers of links where nothing is decided by them.

    Args:
        options: with the preset.
        given: bandwidth and latency, None where they are not.

    Raises:
        ConfigurationError: with the argument.
    """
    name, value = next(((n, v) for n, v in given.items() if v is not None), ("", None))
    if name and options.plans_placement != "pipelined":
        raise ConfigurationError(
            f"{name}={value!r} is of no use with placement {options.plans_placement!r} (preset "
            f"{options.preset!r}), where nothing is chosen by it; allowed: {name}=None, or a "
            "pipeline, whose stages are cut by it; use `lightning-cyclic plan`, which chooses a "
            f"preset and its numbers by it, and leave {name} out"
        )


def checked_stages(stages: object) -> int | str | list[str]:
    """Return stages that are understood.

    Raises:
        ConfigurationError: neither "auto" nor "measured", nor a number, nor paths.
        PlanError: a path that is named twice.
    """
    if isinstance(stages, str) and stages in ("auto", "measured"):
        return stages
    if isinstance(stages, int) and stages is not True and stages >= 1:
        return stages
    if isinstance(stages, list | tuple) and all(isinstance(s, str) for s in stages):
        check_once(stages)
        return list(stages)
    raise ConfigurationError(
        f'stages={stages!r} is not understood; allowed: "auto", "measured" (by times), a number '
        'from 1, or a list of module paths; use CyclicStrategy(stages=["layer2", "layer3"])'
    )


def checked_verify(verify: object) -> int:
    """Return how many first steps are compared.

    Raises:
        ConfigurationError: neither "first_step", nor a whole number, nor False.
    """
    if isinstance(verify, str) and verify == "first_step":
        return 1
    if verify is False:
        return 0
    if isinstance(verify, int) and verify is not True and verify >= 0:
        return verify
    raise ConfigurationError(
        f'verify={verify!r} is not understood; allowed: "first_step", the number of first steps '
        'that are compared with the plain ones, or False; use CyclicStrategy(verify="first_step")'
    )
