"""The session of a pipeline, made of a Trainer and of what the user chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import nn

from lightning_cyclic.compat import (
    LightningModule,
    MixedPrecision,
    Trainer,
    TrainerFn,
    rank_zero_info,
)
from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.checks import scaler_of
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.training import agreed_seed
from lightning_cyclic.runtime.meta import is_unmade, lending
from lightning_cyclic.runtime.partial_step.collectives import rank_of
from lightning_cyclic.runtime.partial_step.config import StagewiseConfig
from lightning_cyclic.runtime.partial_step.micro_batches import BatchCutter, SplitBatch
from lightning_cyclic.runtime.partial_step.session import StagewiseSession
from lightning_cyclic.runtime.stages.best_places import Demands, most_stages
from lightning_cyclic.runtime.stages.cuts import Cuts, choose_cuts, refuse_written, whole
from lightning_cyclic.runtime.stages.evidence import Survey
from lightning_cyclic.runtime.stages.places import CutPoints, Load
from lightning_cyclic.runtime.stages.report import loads, report
from lightning_cyclic.runtime.stages.survey import survey
from lightning_cyclic.runtime.state_homes import (
    ACTIVATIONS,
    AbstractHome,
    FileHome,
    HostHome,
)
from lightning_cyclic.runtime.transport import CountingTransport
from lightning_cyclic.runtime.transport.choice import link
from lightning_cyclic.runtime.whole_step.tiers import TierConfig


@final
class CutFinder:
    """Find where the stages of a module begin, and remember what was seen of it.

    Args:
        state_per_param: bytes of optimizer state per byte of parameters; None for evaluation.
        moves_state: whether what of it the limit has no room for comes and goes.
    """

    def __init__(
        self,
        options: Options,
        state_per_param: float | None = None,
        *,
        moves_state: bool = False,
    ) -> None:
        self._options = options
        self._moves_state = moves_state
        self.state_per_param = state_per_param
        self._survey: Survey | None = None

    def find(self, module: nn.Module, step: Callable[[], Any]) -> Cuts:
        options = self._options
        if options.is_one_stage:
            return whole(module)  # without a run that users would see in their hooks and counts
        with lending(module):  # what is lent, a graph would hold: of that nobody sees more
            known = not is_unmade(module)
            self._survey = survey(module, step, clock=options.clock, for_backward=known)
        refuse_written(self._survey, keeps_order=options.keeps_order)
        stages = self._stages(self._survey, module)
        optimal = options.activation_checkpointing == "optimal"
        choose = partial(
            choose_cuts,
            self._survey,
            stages,
            # one device waits for nobody: memory is what it wants
            balance="activations" if options.plans_placement == "single" else "time",
            demands=self._demands(stages) if isinstance(stages, int) else None,
        )
        # which "optimal" keeps by what it runs again, wherever stages begin
        limit = None if optimal else options.memory_limit_bytes
        try:
            cuts = choose(memory_limit_bytes=limit)
        except PlanError:
            if not self._moves_state:
                raise
            cuts = choose()  # and state that moves keeps to it
        if options.num_workers != 1:
            _tell_of_idle(self._survey, cuts)
        kept = ((x.activation_bytes, x.crossing_bytes) for x in loads(self._survey, cuts))
        return replace(cuts, kept=tuple(kept))

    def _stages(self, survey: Survey, module: nn.Module) -> int | Sequence[str]:
        options = self._options
        if not isinstance(options.stages, int | str):
            return options.stages
        wanted = options.expected_stages(module)
        if (most := most_stages(CutPoints(survey))) >= wanted:
            return wanted
        if options.plans_placement == "single" and isinstance(options.stages, str):
            rank_zero_info(
                f"{survey.title} can be cut into {_counted(most)} at most, and "
                f"num_microbatches={wanted} "
                "would want as many: `lightning-cyclic doctor` says what stands against more."
            )
            return most
        least = replace(options, stages="auto").expected_stages(module)
        if most < least and options.plans_placement != "single":
            fits = f"Trainer(devices={most * options.replicas})"
            more = fits if options.plans_placement == "pipelined" else "fewer processes"
            raise PlanError(
                f"{options.num_workers} processes with preset {options.preset!r} need {least} "
                f"stages, but {survey.title} can be cut into {_counted(most)} at most; allowed: "
                f"no more processes than stages; use {more}, or strategy='cyclic_dp', whose ranks "
                "run whole steps; `lightning-cyclic doctor` says what stands against more"
            )
        return wanted

    def _demands(self, num_stages: int) -> Demands | None:
        """Return what the plan asks of the worker of each stage in training.

        Workers that take turns keep what no single stage decides.
        """
        options = self._options
        if self.state_per_param is None or options.plans_placement != "pipelined":
            return None
        return Demands.of(
            options.plan(num_stages),
            again=options.runs_again,
            network=options.network,
            state_per_param=self.state_per_param,
        )

    def loads(self, cuts: Cuts | None) -> list[Load] | None:
        return None if self._survey is None or cuts is None else loads(self._survey, cuts)

    def report(self, cuts: Cuts | None) -> str | None:
        if self._survey is None or cuts is None:
            return None
        return report(self._survey, cuts)


def _tell_of_idle(survey: Survey, cuts: Cuts) -> None:
    """Tell of a stage that has hardly anything to do, so that its workers wait."""
    times = [load.compute_ns for load in loads(survey, cuts)]
    least = min(times)
    if least * cuts.num_stages * 10 < sum(times):
        j = times.index(least)
        rank_zero_info(
            f"Stage {j} of {cuts.num_stages} has {least / sum(times):.1%} of a step's time, so "
            "that its workers wait for the others. Let stages begin elsewhere, "
            "stages=[...]: `lightning-cyclic doctor` lists the places; or use "
            "strategy='cyclic_dp', whose ranks run whole steps."
        )


def _counted(num_stages: int) -> str:
    return "one stage" if num_stages == 1 else f"{num_stages} stages"


def join_workers(trainer: Trainer, options: Options) -> CountingTransport | None:
    """Return what messages travel by; None for one worker."""
    if trainer.world_size == 1:
        return None
    size, strategy = trainer.world_size // options.replicas, cast("Any", trainer.strategy)
    device, assembly = strategy.root_device, strategy.assembly
    return link(options.transport, device, assembly, lambda w: rank_of(w, size))


def make_session(
    trainer: Trainer,
    options: Options,
    plan: Plan,
    finder: CutFinder,
    transport: CountingTransport | None,
    configured: Callable[[StagewiseConfig], StagewiseConfig],
) -> StagewiseSession:
    """Make this worker's session; all workers must call it."""

    def make_plan(
        num_stages: int,
        num_microbatches: int,
        tied: tuple[tuple[int, ...], ...],
        relayed: tuple[int, ...],
    ) -> Plan:
        return options.plan(num_stages, relayed, num_microbatches=num_microbatches, tied=tied)

    device, assembly = trainer.strategy.root_device, cast("Any", trainer.strategy).assembly
    is_scaled = scaler_of(trainer) is not None
    config = StagewiseConfig(
        make_plan=make_plan,
        find_cuts=finder.find,
        num_microbatches=plan.num_microbatches // options.replicas,
        replicas=options.replicas,
        split_batch=split_hook(trainer.lightning_module, trainer.datamodule),  # type: ignore[attr-defined]
        remat=options.activation_checkpointing,
        seed=agreed_seed(assembly),
        is_one_stage=options.is_one_stage and plan.weights == "sync",
        is_under_autocast=isinstance(trainer.precision_plugin, MixedPrecision),
        expected_stages=plan.num_stages,
        memory_limit_bytes=options.memory_limit_bytes,
        state_per_param=finder.state_per_param or 0.0,
        make_home=_homes(options, device),
        tiers=tiers_of(trainer, options),
        timeout_s=cast("Any", trainer.strategy)._timeout.total_seconds(),
        say=rank_zero_info,
        not_state=frozenset({*vars(LightningModule()), "log"}),
        is_delayed=plan.weights != "sync",
        verify=options.compared_steps if trainer.state.fn == TrainerFn.FITTING else 0,
        sums=options.sums(is_scaled=is_scaled),
        activations=options.crossing_codec(is_scaled=is_scaled),
    )
    worker = rank_of(trainer.global_rank, trainer.world_size // options.replicas)
    return StagewiseSession(
        trainer.lightning_module,
        configured(config),
        transport,
        worker,
        trainer.world_size,
        device,
        assembly,
    )


def tiers_of(trainer: Trainer, options: Options) -> TierConfig | None:
    """Return where optimizer state lies that the limit has no room for; None: all stays.

    Raises:
        ConfigurationError: a folder for what lies in the memory of a GPU's host; or of an
            optimizer whose state is not known.
    """
    is_fitting, device = trainer.state.fn == TrainerFn.FITTING, trainer.strategy.root_device
    limit = options.memory_limit_bytes
    if not is_fitting or not options.may_move_state_of_stages or limit is None:
        return None
    if (device.type, options.disk is None) not in {("cpu", False), ("cuda", True)}:
        if options.disk is None or options.activation_checkpointing == "offload":
            return None  # stages are cut by the limit; of a folder for activations others tell
        raise ConfigurationError(
            f"memory_limit_bytes={limit} and disk={options.disk!r} with preset "
            f"{options.preset!r} and accelerator {device.type!r}; allowed: of CPUs a folder, "
            "disk='/tmp', for optimizer state that does not stay; of a GPU none, as it lies in "
            "the host's memory; use that"
        )
    return TierConfig(
        limit_bytes=limit,
        folder=None if options.disk is None else Path(options.disk),
        device=device,
        optimizer=lambda: trainer.optimizers[0],
        say=rank_zero_info,
    )


def _homes(options: Options, device: torch.device) -> Callable[[int], AbstractHome] | None:
    """Return what makes room for activations that are away, (bytes) -> home; None: none are.

    Raises:
        ConfigurationError: it is not said where, or of a GPU, where it is the host's memory.
    """
    if options.activation_checkpointing != "offload":
        return None
    if (device.type, options.disk is None) not in {("cpu", False), ("cuda", True)}:
        raise ConfigurationError(
            f"activation_checkpointing='offload' and disk={options.disk!r} with accelerator "
            f"{device.type!r}; allowed: of CPUs a folder for what forwards leave, disk='/tmp'; of "
            "a GPU none, as it lies in the host's memory; use that"
        )
    if options.disk is None:
        return partial(HostHome, is_pinned=True)
    return partial(FileHome, Path(options.disk), what=ACTIVATIONS)


def split_hook(module: Any, datamodule: Any) -> SplitBatch | None:
    """Return the hook of the LightningModule, else that of the datamodule; None without.

    Raises:
        ConfigurationError: if it cannot be called.
    """
    for owner in (module, datamodule):
        hook: SplitBatch | None = getattr(owner, "split_batch", None)
        if hook is not None and not callable(hook):
            raise ConfigurationError(
                f"{type(owner).__name__}.split_batch is of type {type(hook).__name__}; allowed: a "
                "method split_batch(self, batch, num_microbatches) that returns the parts of a "
                "batch; give the attribute another name"
            )
        if hook is not None:
            return hook
    return None


def first_part(batch: Any, num_parts: int, module: Any, datamodule: Any) -> Any:
    """Return the first of the micro-batches that a fit would cut a batch into."""
    return BatchCutter(num_parts, split_hook(module, datamodule)).cut(batch)[0].batch
