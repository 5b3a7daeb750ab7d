"""What one worker of a pipeline has, as soon as the stages are found.

Its plans, which stages it runs and which of them it updates, which parameters are here, and who
has the others. It does nothing by itself: the session, the exchange, updates and the verifier
look here.
"""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan, program_of
from lightning_cyclic.plan.actions import Action
from lightning_cyclic.plan.program import Program
from lightning_cyclic.planner.rematerialisation import Room, rooms
from lightning_cyclic.runtime.absent import is_absent, make_present
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.partial_step.collectives import Collectives, rank_of
from lightning_cyclic.runtime.partial_step.config import Plans, StagewiseConfig
from lightning_cyclic.runtime.partial_step.ownership import ForeignWeights, Ownership
from lightning_cyclic.runtime.partial_step.versions import Versions
from lightning_cyclic.runtime.predict import Foresight
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.stages.stage_map import Stage, StageMap
from lightning_cyclic.runtime.state_tier import ALL_STAYS, StateTiers
from lightning_cyclic.runtime.whole_step.tiers import PlannedTiers


@final
class OwnStages:
    """Hold it.

    Args:
        assembly: all ranks.
        collectives: by which weights are put together.

    Raises:
        PlanError: the stages do not go with the plan.
    """

    def __init__(
        self,
        module: nn.Module,
        config: StagewiseConfig,
        cuts: Cuts,
        worker: int,
        num_workers: int,
        device: torch.device,
        *,
        assembly: Assembly,
        collectives: Collectives,
    ) -> None:
        self.module = module
        self.config = config
        self.cuts = cuts
        self.worker = worker
        self.num_workers = num_workers
        self.device = device
        self.assembly = assembly
        self._size = num_workers // config.replicas
        self._trained = self._had_versions = self._read_trained()
        frozen = {n for n, _ in module.named_parameters()} - self._trained
        self._plans = Plans(config, cuts, num_workers, frozen)
        if self.plan.axes.placement.takes_turns:
            cuts.refuse_early_metrics()
        self.ownership = Ownership(module, cuts, self.stages_of(worker), config.forms)
        fits = not any(map(is_absent, module.parameters()))
        make_present(*self.ownership.here().values())
        self.tiers = self._make_tiers()
        self.versions: Versions | None = None
        self.foreign = ForeignWeights(
            module,
            cuts.changing,
            self.ownership,
            lambda j: rank_of(self.plan.owner(j), self._size),
            fits,
            lambda: collectives.gather(cuts, self.plan),
        )

    def _make_tiers(self) -> StateTiers:
        """Plan which optimizer state stays in memory; return what moves the rest of it."""
        config, cuts = self.config, self.cuts
        if config.tiers is None:
            return ALL_STAYS
        kept, sent = zip(*(cuts.kept or [(None, 0)] * cuts.num_stages), strict=True)
        each = zip(("", *cuts.starts), cuts.parameters, kept, strict=True)
        stages = StageMap(
            tuple(Stage(start=s, parameters=ps, activation_bytes=x) for s, ps, x in each)
        )
        planned = PlannedTiers(
            config.tiers, self.plan, self.module, stages, config.forms,
            sent=sent, again=config.remat not in ("never", "offload"),
        )  # fmt: skip
        self._plans.move_state(planned.plan.tiers)
        return planned.tiers(self.worker)

    # ------------------------------------------------------------------ plans

    @property
    def plan(self) -> Plan:
        """Return the plan of a step whose batch has as many micro-batches as asked for."""
        return self._plans.usual

    @property
    def program(self) -> Program:
        return program_of(self.plan)

    def plan_of(self, num_microbatches: int) -> Plan:
        return self._plans.of(num_microbatches)

    def evaluation(self, t: int) -> list[Action]:
        """Return the forward of one batch that is not cut, numbered as step ``t``."""
        return self._plans.evaluation(self.worker, t)

    @property
    def flows(self) -> bool:
        """Say whether steps begin before those ahead of them have ended, in training."""
        return self.plan.flows and self.config.apply is not None

    # ------------------------------------------------------------------ stages

    def stages_of(self, worker: int) -> tuple[int, ...]:
        workers_of = self.plan.axes.placement.workers_of
        return tuple(j for j in range(self.plan.num_stages) if worker in workers_of(j))

    @property
    def updated(self) -> list[int]:
        """Return the stages that this worker updates."""
        return [j for j in range(self.plan.num_stages) if self.plan.owner(j) == self.worker]

    def worker_of(self, stage: int) -> int:
        """Return the worker of a stage in this worker's replica."""
        return self.plan.worker_of(self.worker // self._size, stage)

    @property
    def rank(self) -> int:
        return rank_of(self.worker, self._size)

    def own_names(self) -> set[str]:
        """Return the names of the parameters and buffers of stages that this worker updates."""
        return {n for j in self.updated for n in (*self.cuts.parameters[j], *self.cuts.buffers[j])}

    def rooms(self) -> dict[int, Room]:
        """Return how much of activations each stage of this worker may keep."""
        limit, state = self.config.memory_limit_bytes, self.config.state_per_param
        assert limit is not None
        sizes = [
            sum(p.numel() * p.element_size() for p in map(self.module.get_parameter, names))
            for names in self.cuts.parameters
        ]
        return rooms(self.plan, sizes, int(limit), state)[self.worker]

    # ------------------------------------------------------------------ what is trained

    def trained_of(self, j: int) -> list[nn.Parameter]:
        """Return what the optimizer has of a stage, in the order of its parameters."""
        return list(map(self.config.forms.trained, self.ownership.owned(j)))

    @property
    def shares_state(self) -> bool:
        """Say whether replicas that do not update need the optimizer's state to predict."""
        return self.plan.axes.weights.looks_ahead and self.plan.replicas > 1

    @property
    def with_state(self) -> list[nn.Parameter]:
        """Return what this worker has optimizer state for: of what it updates, or predicts."""
        stages = self.ownership.stages if self.shares_state else self.updated
        return [p for j in stages for p in self.trained_of(j)]

    def _read_trained(self) -> set[str]:
        return {n for n, p in self.module.named_parameters() if p.requires_grad}

    def make_versions(self, t: int) -> None:
        """Keep versions of weights from step ``t`` on, if the plan reads older ones."""
        plan, guess, foresight = self.plan, self.config.guess, None
        if plan.weights == "sync" or (plan.flows and not self.flows):
            return
        stages = self._versioned()
        if plan.axes.weights.looks_ahead:
            self.ownership.refuse_ties(plan.weights)
            assert guess is not None
            foresight = Foresight(plan, stages, guess)
        readers = self.ownership.readers(stages)
        self.versions = Versions(
            self.module, plan, stages, t, readers, foresight, self.config.forms
        )

    def _versioned(self) -> dict[int, dict[str, nn.Parameter]]:
        """Return stage -> name -> parameter of which this worker has versions."""
        looks_ahead = self.plan.axes.weights.looks_ahead
        return self.ownership.versioned(() if looks_ahead else self._had_versions)

    def train_others(self) -> None:
        """Train other parameters from now on; behind a flush, and on all workers at once.

        What is frozen keeps its versions, which forwards still read, unless they are predicted.

        Raises:
            PlanError: on every worker, for a parameter that stages share.
        """
        if self.versions is None:
            return
        trained = self._read_trained()
        changed, self._trained = self._trained ^ trained, trained
        tied = next((n for n in self.cuts.tied if n in changed), None)
        if tied is not None:
            raise PlanError(
                f"parameter {tied!r}, which stages {list(self.cuts.tied[tied])} share, was frozen "
                f"or unfrozen between two steps, which preset {self.plan.preset!r} does "
                "not support; allowed: parameters of one stage; let one stage have all modules "
                "that share it, stages=[...], or use strategy='1f1b'"
            )
        self._had_versions = self._had_versions | trained
        self.versions.train_others(self._versioned())
