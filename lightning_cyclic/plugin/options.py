"""Options: what the user chose of a plan, and what follows (option_values.py checks values).

What an option means, and its default, stands in :class:`CyclicStrategy` or
:class:`PipelineStrategy`, whichever has it; most are theirs both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final

from torch import nn

from lightning_cyclic.errors import ConfigurationError, PlanError, one_of
from lightning_cyclic.plan import PRESETS, Plan, make_plan
from lightning_cyclic.plan.placement import Shared
from lightning_cyclic.plan.presets import (
    AXES,
    axes_of,
    default_num_stages,
    nearest,
    plausible_depth,
)
from lightning_cyclic.plan.weights import LocalSteps
from lightning_cyclic.planner.candidates import DEFAULT_BANDWIDTH, DEFAULT_LATENCY
from lightning_cyclic.plugin.checks import check_plan, is_stagewise
from lightning_cyclic.plugin.codec_checks import check_crossing_codec
from lightning_cyclic.plugin.disk_checks import check_disk
from lightning_cyclic.plugin.option_values import (
    Checkpointing,
    Clipping,
    Compress,
    bandwidth_of,
    compressed,
)
from lightning_cyclic.runtime.codecs.activations import AbstractCrossingCodec, crossing_codec_of
from lightning_cyclic.runtime.codecs.base import AbstractCodec
from lightning_cyclic.runtime.codecs.choice import CODECS, codec_of
from lightning_cyclic.runtime.codecs.weights import weight_codec_of
from lightning_cyclic.runtime.gradient_store import WIRE_DTYPES, SumDtypes
from lightning_cyclic.runtime.partial_step.collectives import rank_of
from lightning_cyclic.runtime.stages.evidence import ClockName
from lightning_cyclic.runtime.transport.choice import Route
from lightning_cyclic.runtime.whole_step.session import auto_stages
from lightning_cyclic.simulate import Network, parse_seconds

Axes: TypeAlias = tuple[tuple[str, str | LocalSteps], ...]


class _Use(NamedTuple):
    """Say where an option changes anything.

    Args:
        usual: the value that asks for nothing.
        is_used: whether a plan, with the options, heeds it.
        where: the same in words.
        example: arguments with which it is.
    """

    usual: object
    is_used: Callable[[Options, Plan], bool]
    where: str
    example: str


_USES: Final[Mapping[str, _Use]] = {
    "activation_checkpointing": _Use(
        "never",
        lambda _, plan: is_stagewise(plan),
        "workers that run single stages",
        "a pipeline",
    ),
    "compress": _Use(
        None,
        lambda options, plan: (
            not is_stagewise(plan)
            or options.compressed("gradients") is None
            or options.codec is not None  # of which _check_codec has more to say
            or options.replicas > 1
            or plan.axes.placement.takes_turns
        ),
        "gradients where workers send sums of them to each other, and not in one replica of a "
        "pipeline, each of whose workers adds up its own",
        "replicas=2, preset='cyclic_dp', or compress={'activations': ...}",
    ),
    "error_feedback": _Use(
        False,
        lambda _, plan: not plan.axes.weights.at_end_of_step,
        "presets without a flush, whose gradients are old",
        "preset='cyclic_dp' or 'pipedream_2bw'",
    ),
    "relay_buffers": _Use(
        "auto",
        lambda _, plan: not plan.axes.weights.is_local,
        "workers that have module buffers alike, not local steps, of which each has its own",
        "preset='lockstep_dp'",
    ),
    "group_size": _Use(
        "host",
        lambda options, plan: (
            options.group_size == 1
            or (plan.placement == "replicated" and options.num_microbatches is None)
        ),
        "workers that each run whole micro-batches, and are processes of their own",
        "preset='cyclic_dp' without num_microbatches",
    ),
}


def _check_optimal(options: Options, plan: Plan) -> None:
    """Refuse to choose what is run again where there is no limit, or no weights to run it with."""
    what = "activation_checkpointing='optimal'"
    if options.memory_limit_bytes is None:
        raise ConfigurationError(
            f"{what} without memory_limit_bytes, by which it chooses what is run again; allowed: "
            "a number of bytes that each worker may keep; use memory_limit_bytes=24 * 10**9, or "
            "activation_checkpointing='always'"
        )
    if plan.axes.weights.looks_ahead:
        raise ConfigurationError(
            f"{what} with preset {options.preset!r}, whose predicted weights are written over "
            "before the backward, so that a part of a forward cannot be run again; allowed: "
            "rules that keep what a forward has read; use activation_checkpointing='always', "
            "or preset='pipedream_2bw'"
        )


def _check_tiers(options: Options, plan: Plan) -> None:
    """Refuse that optimizer state comes and goes where nobody knows how much of it is to."""
    if options.memory_limit_bytes is None:
        raise ConfigurationError(
            f"disk={options.disk!r} without memory_limit_bytes, by which it is chosen how much "
            "optimizer state lies there; allowed: a number of bytes that each worker may keep; "
            "use memory_limit_bytes=24 * 10**9"
        )
    if plan.axes.weights.is_local:
        raise ConfigurationError(
            f"memory_limit_bytes={options.memory_limit_bytes} with preset {options.preset!r}, "
            "whose outer weights no plan of memory counts yet; allowed: workers that have the "
            "same weights; leave memory_limit_bytes and disk out, or use preset='lockstep_dp'"
        )
    if options.error_feedback:
        raise ConfigurationError(
            f"error_feedback=True with memory_limit_bytes={options.memory_limit_bytes}, by which "
            "optimizer state comes and goes, and which does not count its copy of the weights; "
            "allowed: one of them; leave one out"
        )
    if options.num_microbatches is not None or plan.placement != "replicated":
        raise ConfigurationError(
            f"memory_limit_bytes={options.memory_limit_bytes} with "
            f"num_microbatches={options.num_microbatches}, by which one device runs what so many "
            "workers would; allowed: workers that are processes; leave num_microbatches out, and "
            "use Trainer(accumulate_grad_batches=...)"
        )


def _check_codec(options: Options, plan: Plan) -> None:
    """Refuse a codec of single gradients where workers add up those of their own stages."""
    codec, allowed = options.codec, ", ".join(map(repr, WIRE_DTYPES))
    if plan.placement not in ("replicated", "single"):
        raise ConfigurationError(
            f"compress={options.compress!r} with preset {options.preset!r}, whose workers add up "
            "the gradients of their own stages, and send sums of them at most; allowed here: "
            f"{allowed}; use compress='bf16', or preset='cyclic_dp', whose workers send each "
            "their own"
        )
    assert codec is not None
    if codec.names is not None and plan.axes.weights.is_local:
        raise ConfigurationError(
            f"compress={codec!r} with preset {options.preset!r}, whose workers send how their "
            "weights have changed, not what a backward makes; allowed: codecs of any tensor; use "
            "compress=PowerSgd(rank=4), or preset='lockstep_dp'"
        )
    if codec.has_memory and (options.disk is not None or options.moves_state):
        raise ConfigurationError(
            f"compress={codec!r} with memory_limit_bytes={options.memory_limit_bytes}, by which "
            "optimizer state comes and goes, and which does not count what is left of gradients; "
            f"allowed: codecs that leave nothing, {allowed}, {', '.join(map(repr, CODECS))}; use "
            "compress='bf16', or leave memory_limit_bytes out"
        )


def _check_weight_codec(options: Options, plan: Plan) -> None:
    """Refuse to send what weights have changed where not all have the ones before."""
    what = f"compress={{'weights': {options.weight_codec!r}}}"
    if (
        plan.placement not in ("replicated", "single")
        or plan.axes.sharding.gathers
        or plan.axes.weights.is_local
    ):
        raise ConfigurationError(
            f"{what} with preset {options.preset!r}, whose workers do not all have the weights to "
            "which a change could be added; allowed: workers that have all weights, and the same; "
            "use preset='cyclic_dp' or 'lockstep_dp', or leave 'weights' out"
        )
    if options.disk is not None or options.moves_state:
        raise ConfigurationError(
            f"{what} with memory_limit_bytes={options.memory_limit_bytes}, by which optimizer "
            "state comes and goes, and which does not count what is kept of weights; allowed: "
            "one of them; leave one out"
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Hold what the user chose, and make plans of it.

    Args:
        network: the links between workers, by which stages are cut.
        workers_per_host: how many of them share a host, if all hosts have as many neighbours.
        late_updates: whether stages decide together about a step, as the Trainer's flags ask.
        norms: who is told the norms of all gradients, as these flags ask.
        stages: as in CyclicStrategy, or in PipelineStrategy, as are all others.
    """

    preset: str
    axes: Axes = ()
    stages: int | str | Sequence[str]
    num_microbatches: int | None
    slack: int = 0
    group_size: int | str = "host"
    clip_norm: Clipping | None
    relay_buffers: str = "auto"
    replicas: int = 1
    activation_checkpointing: Checkpointing = "never"
    memory_limit_bytes: int | None
    disk: str | os.PathLike[str] | None = None
    error_feedback: bool
    compress: Compress | None
    transport: Route
    save_distributed_checkpoint: bool
    verify: Literal["first_step"] | int
    network: Network = Network()
    num_workers: int | None = None
    workers_per_host: int = 1
    late_updates: bool = False
    norms: str = "none"

    def check(self) -> None:
        """Refuse early, before any process, what no number of workers would make right.

        Raises:
            PlanError: impossible numbers, or a plan that cannot be run yet.
            ConfigurationError: values that would be ignored.
        """
        probe = self._probe()
        check_plan(probe)
        for name, use in _USES.items():
            value = getattr(self, name)
            if value != use.usual and not use.is_used(self, probe):
                raise ConfigurationError(
                    f"{name}={value!r} with preset {self.preset!r}, which does not use it; "
                    f"allowed: {use.where}; use {use.example}, or leave {name} out"
                )
        if self.codec is not None:
            _check_codec(self, probe)
        if self.weight_codec is not None:
            _check_weight_codec(self, probe)
        if self.compressed("activations") is not None:
            check_crossing_codec(
                self.compressed("activations"),
                self.preset,
                self.stages,
                cuts_steps=self.cuts_steps,
                is_one=self.given_stages == 1,
            )
        if self.activation_checkpointing == "optimal":
            _check_optimal(self, probe)
        if self.disk is not None and is_stagewise(probe):
            check_disk(
                self.disk,
                self.activation_checkpointing,
                self.preset,
                is_bounded=self.memory_limit_bytes is not None,
                predicts=self.predicts,
                has_feedback=self.error_feedback,
            )
        elif self.disk is not None or self.moves_state:
            _check_tiers(self, probe)
        if self.stages == "measured" and probe.placement not in ("pipelined", "shared"):
            raise ConfigurationError(
                f"stages='measured' with preset {self.preset!r}, whose stages are cut by bytes, "
                "which nobody need measure; allowed: pipelines; use stages='auto', a number, or "
                "module paths"
            )

    # ------------------------------------------------------------------ which kind of training

    @property
    def is_stagewise(self) -> bool:
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
        return is_alone and not self.runs_again and self._probe().weights == "sync"

    @property
    def runs_again(self) -> bool:
        """Say whether backwards run forwards again, or parts of them."""
        return self.activation_checkpointing not in ("never", "offload")

    @property
    def predicts(self) -> bool:
        return self._probe().axes.weights.looks_ahead

    @property
    def moves_state(self) -> bool:
        """Say whether optimizer state is in memory only as far as there is room."""
        if self.memory_limit_bytes is None or self.is_stagewise:
            return False
        return self.disk is not None or not self._probe().axes.sharding.gathers

    @property
    def may_move_state_of_stages(self) -> bool:
        """Say whether that of single stages is, where there is a disk or a host to move it to."""
        is_bounded = self.memory_limit_bytes is not None and not self.error_feedback
        checkpointing = self.activation_checkpointing  # "optimal" keeps to the limit by itself
        return (
            is_bounded and checkpointing != "optimal" and self.is_stagewise and not self.predicts
        )

    @property
    def trains_plainly(self) -> bool:
        """Say whether this is one worker whose plan always reads the newest weights."""
        moves = self.disk is not None and self.may_move_state_of_stages
        if self.num_workers != 1 or self.moves_state or moves:
            return False
        plan = self.plan(1)
        return plan.delay(0) == 0 and not plan.axes.weights.is_local

    @property
    def lines(self) -> str:
        """Write down what all ranks must have alike, a line each."""
        names = [field.name for field in fields(self) if field.name != "disk"]  # of each host
        return "\n".join(f"{name}={getattr(self, name)!r}" for name in names)

    @property
    def compared_steps(self) -> int:
        """Return how many of the first steps are compared with plain ones."""
        return 1 if self.verify == "first_step" else int(self.verify)

    def sums(self, *, is_scaled: bool) -> SumDtypes:
        """Return the dtypes of sums of gradients.

        Args:
            is_scaled: whether a loss scale follows from gradients that are not finite.
        """
        given = self.compressed("gradients")
        wire = WIRE_DTYPES.get(given) if isinstance(given, str) else None
        return SumDtypes(wire, may_overflow=is_scaled)

    @property
    def codec(self) -> AbstractCodec | None:
        """Return what encodes single gradients; None where they, or sums of them, travel."""
        return codec_of(self.compressed("gradients"))

    @property
    def weight_codec(self) -> AbstractCodec | None:
        """Return what makes new weights smaller, if anything does."""
        given = self.compressed("weights")
        return None if given is None else weight_codec_of(given)

    def crossing_codec(self, *, is_scaled: bool) -> AbstractCrossingCodec | None:
        """Return what encodes activations and their gradients between stages, if anything does."""
        given = self.compressed("activations")
        return None if given is None else crossing_codec_of(given, is_scaled=is_scaled)

    def compressed(self, what: str) -> Any:
        """Return what the user chose to make gradients, weights or activations smaller."""
        return compressed(self.compress).get(what)

    @property
    def encoders(self) -> int:
        """Count the workers that a codec serves; one that is alone may stand for several."""
        workers = self.num_workers or 1
        several = workers if workers > 1 else self.num_microbatches or 1
        is_coded = self.codec is not None or self.weight_codec is not None
        return several if is_coded and several > 1 else 0

    @property
    def clock(self) -> ClockName:
        return "measured" if self.stages == "measured" else "counted"

    def worker_of(self, rank: int) -> int:
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
            relayed_until: the last stage in which those of each change.
            num_microbatches: of all replicas together; None for the user's choice.
            tied: groups of stages that share parameters.

        Raises:
            PlanError: axes and numbers do not fit, or the user asks for rounds.
        """
        asked = self.num_microbatches is not None and num_microbatches is None
        if self.num_microbatches is not None and num_microbatches is None:
            num_microbatches = self.num_microbatches * self.replicas
        workers = num_workers or self.num_workers or 1
        axes: dict[str, Any] = dict(self.axes) | {"placement": self._placement}
        plan = make_plan(
            self.preset,
            num_stages=num_stages,
            num_workers=workers,
            num_microbatches=num_microbatches,
            replicas=self.replicas,
            tied=tied,
            slack=self.slack,
            group_size=self._group_size(workers),
            offloads=self._offloads,
            relayed=relayed,
            relayed_until=relayed_until,
            late_updates=self.late_updates,
            norms=self.norms,
            to_owners=self.codec is not None and self.encoders > 0,
            **axes,
        )
        if asked and plan.rounds > 1:
            raise PlanError(
                f"num_microbatches={plan.num_microbatches} with {plan.num_workers} workers that "
                "run whole micro-batches, which do not cut their batches; allowed: "
                f"{plan.num_workers}; use num_microbatches={plan.num_workers}, and "
                f"Trainer(accumulate_grad_batches={plan.rounds})"
            )
        return plan

    @property
    def _offloads(self) -> bool:
        is_asked = self.activation_checkpointing == "offload"
        return is_asked and self.plans_placement != "replicated"  # which refuses it by name

    def _group_size(self, num_workers: int) -> int:
        if num_workers != self.num_workers:
            return 1  # of a plan of plausible numbers
        if self.group_size != "host":
            return int(self.group_size)
        are_staggered = self._schedule == "cyclic" and self.plans_placement == "replicated"
        return self.workers_per_host if are_staggered else 1

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
            return default_num_stages(self._schedule, self.num_workers // self.replicas)
        assert module is not None
        ps = [p for p in module.parameters() if p.requires_grad]
        wanted = auto_stages(
            self.num_workers,
            sum(p.numel() * p.element_size() for p in ps),
            come_and_go=self.moves_state,
        )
        return max(1, min(wanted, len(ps)))

    def _probe(self) -> Plan:
        """Make a plan of plausible numbers, as the real ones may not be known yet."""
        num_stages = self.given_stages or (2 if self.num_microbatches else 4)
        numbers = {"single": 1, "replicated": self.num_microbatches or 2}
        workers = self.replicas * plausible_depth(self._schedule, num_stages)
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
        return self._placement or PRESETS[self.preset].placement

    @property
    def cuts_steps(self) -> bool:
        """Say whether workers have single stages; not of one device that stands for others."""
        placement = self._given("placement") or PRESETS[self.preset].placement
        return placement != "replicated"

    def _given(self, axis: str) -> str | None:
        given = dict(self.axes).get(axis)
        return None if given is None else str(given)

    @property
    def _schedule(self) -> str:
        return self._given("schedule") or PRESETS[self.preset].schedule

    @property
    def _placement(self) -> str | None:
        given = self._given("placement")
        if given is None and self.num_workers == 1 and (self.num_microbatches or 1) > 1:
            return "single" if PRESETS[self.preset].placement == "replicated" else None
        return given


def chosen_preset(
    given: object, allowed: Sequence[str], placements: Sequence[str], other: str
) -> tuple[str, Axes]:
    """Return the name of a preset, and the axis values that are not its own.

    Raises:
        ConfigurationError: neither a name of one, nor a value for each of the four axes; or what
            the other strategy has.
    """
    if isinstance(given, LocalSteps):  # which has no other schedule, nor placement
        given = axes_of("diloco") | {"weights": given}
    if isinstance(given, Mapping):
        return _nearest(given, allowed, placements, other)
    if given in allowed:
        return str(given), ()
    if isinstance(given, str) and given in PRESETS:
        raise ConfigurationError(
            f"preset {given!r} is one of {other}; allowed here: {', '.join(map(repr, allowed))}; "
            f"use {other}({given!r}), or Trainer(strategy={given!r})"
        )
    use = f"use preset={allowed[0]!r}, or a mapping of {', '.join(AXES)}"
    raise ConfigurationError(one_of(given, list(allowed), "preset", use))


def _nearest(
    given: Mapping[Any, Any], allowed: Sequence[str], placements: Sequence[str], other: str
) -> tuple[str, Axes]:
    first = axes_of(allowed[0])
    if given.keys() != AXES.keys():
        raise ConfigurationError(
            f"preset={dict(given)!r}; allowed: a name, or a mapping that has a value for each of "
            f"{', '.join(map(repr, AXES))}; use preset={first!r}"
        )
    for axis, value in given.items():
        has_numbers = axis == "weights" and isinstance(value, LocalSteps)
        if not has_numbers and value not in list(AXES[axis]):  # of a list: it may be anything
            use = f"use preset={ {**given, axis: first[axis]}!r}"
            raise ConfigurationError(one_of(value, list(AXES[axis]), axis, use))
    if given["placement"] not in placements:
        raise ConfigurationError(
            f"placement {given['placement']!r} is one of {other}; allowed here: "
            f"{', '.join(map(repr, placements))}; use {other}(preset=...)"
        )
    name = nearest(given, allowed)
    return name, () if axes_of(name) == given else tuple(given.items())


def network_of(bandwidth: str | float | None) -> Network:
    """Return the links between workers, by default those of `lightning-cyclic plan`."""
    return Network(
        latency_s=parse_seconds(DEFAULT_LATENCY),
        bandwidth_bytes_per_s=bandwidth_of(DEFAULT_BANDWIDTH if bandwidth is None else bandwidth),
    )
