"""Replicated training behind Lightning's hooks: each worker runs whole micro-batches.

training_step     session.forward        (the session finds the stages in the first one)
pre_backward      session.backward, up to post_backward
optimizer_step    closure; remember lr & co.; session.end_step -- the update comes later
state dicts       flush first
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.compat import (
    GradientAccumulationScheduler,
    Trainer,
    is_overridden,
    rank_zero_info,
)
from lightning_cyclic.errors import ConfigurationError, StepError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.checks import (
    check_is_apart,
    check_no_averaging,
    check_no_exchange,
    trained_parameters,
)
from lightning_cyclic.plugin.clipping import may_clip_by_norm
from lightning_cyclic.plugin.hooks import Closure, Own
from lightning_cyclic.plugin.local_steps import (
    RANKS,
    check_local_steps,
    own_state,
    put_buffers,
    put_optimizer_state,
    warn_of_lost_steps,
)
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.records import Recorder
from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.plugin.step_arguments import StepArguments
from lightning_cyclic.plugin.training import AbstractTraining, agreed_seed, epoch_ends
from lightning_cyclic.plugin.updates import Stages, no_update
from lightning_cyclic.plugin.weight_guard import WeightGuard
from lightning_cyclic.runtime.absent import is_absent, num_bytes_of
from lightning_cyclic.runtime.agreement import require_same_number
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.loss_scaling import Outcomes
from lightning_cyclic.runtime.meta import lending
from lightning_cyclic.runtime.stages.places import paste
from lightning_cyclic.runtime.transport import CountingTransport
from lightning_cyclic.runtime.values.trees import map_tensors
from lightning_cyclic.runtime.whole_step.config import SessionConfig
from lightning_cyclic.runtime.whole_step.engine import Engine
from lightning_cyclic.runtime.whole_step.session import Session
from lightning_cyclic.runtime.whole_step.tiers import TierConfig


@final
class ReplicatedTraining(AbstractTraining):
    """Train a replica of the module on each worker."""

    def __init__(
        self, trainer: Trainer, options: Options, plan: Plan, reductions: HeldReductions
    ) -> None:
        if plan.local is not None:
            check_local_steps(trainer, options, plan)
        super().__init__(trainer, options, plan, reductions)
        self._own: Mapping[str, Any] | None = None  # that a checkpoint has of this rank alone
        # parameters come for each batch of a step, so the plan has to know how many there are
        self._plans_batches = plan.axes.sharding.gathers and may_accumulate(trainer)
        self._agreed_epoch = -1  # the last for which all workers have been asked
        if options.memory_limit_bytes is not None and plan.axes.sharding.gathers:
            check_no_averaging(trainer, "of which no rank ever has all")
            check_is_apart(self._module, options.memory_limit_bytes)
        self._backward = ExitStack()  # open while a backward runs
        self._owes_update = False  # for the step whose backward is over
        several = not plan.has_one_version
        is_late = several and plan.weights == "freshest"  # updates are not over when a step is
        optimizer = (lambda: trainer.optimizers[0]) if is_late else None
        self._guard = WeightGuard(self._of_module, plan.preset, optimizer, has_versions=several)
        check_no_exchange(trainer.optimizers[0], plan.preset)
        self._outcomes = None if self._scaling is None else Outcomes()
        options, assembly = self._options, cast("Assembly", cast("Any", trainer.strategy).assembly)
        config = SessionConfig(
            forms=self._forms,
            sums=options.sums(is_scaled=self._scaling is not None),
            codes=self._codes,
            weights=self._weights,
            make_plan=partial(plan_of_rounds, options),
            stages=options.stages,
            seed=agreed_seed(assembly),
            assembly=assembly,
            route=options.transport,
            relay_buffers=options.relay_buffers,
            paced=self._clip != "global" or plan.weights != "freshest",
            accumulates=may_accumulate(trainer) and not self._plans_batches,
            memory_limit_bytes=options.memory_limit_bytes,
            outcomes=self._outcomes,
            tiers=(tiers := self._make_tiers(trainer, options)),
        )
        self._updates_early = tiers is not None and tiers.early
        self._session: Session = Session(
            self._module,
            trained_parameters(self._module, trainer.optimizers[0], self._forms),
            config,
            trainer.global_rank,
            trainer.strategy.root_device,
            self._updates.apply,
        )
        self._stop_as(self._session, lambda: self._session.stopping)

    def _make_tiers(self, trainer: Trainer, options: Options) -> TierConfig | None:
        """Return where optimizer state lies, if not in memory."""
        if not options.moves_state or options.memory_limit_bytes is None:
            return None
        device = trainer.strategy.root_device
        if (device.type, options.disk is None) not in {("cpu", False), ("cuda", True)}:
            raise ConfigurationError(
                f"memory_limit_bytes={options.memory_limit_bytes} and disk={options.disk!r} with "
                f"preset {self._plan.preset!r} and accelerator {device.type!r}; allowed: of CPUs "
                "a folder, disk='/tmp', for optimizer state that does not stay; of a GPU none, as "
                "it lies in the host's memory; or preset='cyclic_zero', or a pipeline, whose "
                "workers each have parts of the module"
            )
        found = {
            f"precision {trainer.precision!r}, whose loss scale is one decision for all stages": (
                self._scaling is not None
            ),
            "accumulate_grad_batches (or GradientAccumulationScheduler) and sharded weights": (
                self._plans_batches
            ),
            "gradients clipped by the norm over the stages of all ranks": (
                self._options.norms != "none"
            ),
        }
        first = next((what for what, is_so in found.items() if is_so), None)
        if first is not None:
            raise ConfigurationError(
                f"memory_limit_bytes={options.memory_limit_bytes}, for which optimizer state "
                f"comes and goes, with {first}; allowed: precision '32-true' or 'bf16-mixed', one "
                "batch per step where weights are sharded, and with several ranks "
                "clip_norm='stage'; use these, or leave memory_limit_bytes out"
            )
        return TierConfig(
            limit_bytes=options.memory_limit_bytes,
            folder=None if options.disk is None else Path(options.disk),
            device=device,
            optimizer=lambda: trainer.optimizers[0],
            # one forward per step; and a GPU evaluates with weights that are on it
            moves_weights=not may_accumulate(trainer)
            and (device.type == "cpu" or not trainer.enable_validation),
            early=self._may_update_early(trainer),
            say=rank_zero_info,
        )

    def _may_update_early(self, trainer: Trainer) -> bool:
        """Say whether nobody can tell an update behind a stage's backward from a later one."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        return self._plan.has_one_version and not (
            may_accumulate(trainer)
            or (self._clip == "global" and may_clip_by_norm(trainer))
            or is_overridden("optimizer_step", trainer.lightning_module)
            or any(
                is_overridden("on_after_backward", x)
                for x in (trainer.lightning_module, *callbacks)
            )
        )

    @property
    def _decides_together(self) -> bool:
        """Say whether one step is one decision: whether its update is skipped, of all stages."""
        return self._clip == "global" or self._plan.weights != "freshest"

    @override
    def _telling_norms(self, options: Options, plan: Plan) -> tuple[Options, Plan]:
        is_alone = plan.num_workers == 1 or not self._decides_together or plan.local is not None
        return (options if is_alone else replace(options, norms="owners")), plan

    def _of_module(self) -> dict[str, nn.Parameter]:
        away = self._session.foreign_names  # which others guard
        return {n: p for n, p in self._module.named_parameters() if n not in away}

    @property
    def _engine(self) -> Engine:
        assert self._session.engine is not None
        return self._session.engine

    @override
    def parameters_of(self, j: int) -> Sequence[nn.Parameter]:
        return self._engine.parameters(j)

    @override
    def total_norm(self, t: int, order: Sequence[nn.Parameter]) -> Tensor:
        return self._engine.total_norm(t, order)

    @override
    def overflowed(self, t: int, stages: Stages) -> Collection[int]:
        own = super().overflowed(t, stages)
        for j in own if self._decides_together else ():  # whatever hooks make of them
            self._engine.norms.note_overflow(t, j)
        return own

    @override
    def skipped(self, t: int, stages: Sequence[int], own: Collection[int]) -> Collection[int]:
        if self._scaling is None or not self._decides_together:
            return own
        return () if self._engine.all_finite(t, own) else stages

    @override
    def _was_finite(self, t: int) -> bool | None:
        assert self._outcomes is not None
        return self._outcomes.are_finite(t, self._engine.plan.num_stages)

    @override
    def _kept_by_stages(self) -> list[tuple[int, int]] | None:
        stages = self._session.stages
        kept = [] if stages is None else [stage.activation_bytes for stage in stages.stages]
        counted = [(x, 0) for x in kept if x is not None]  # inputs are among them
        return counted if len(counted) == len(kept) > 0 else None

    @property
    @override
    def transport(self) -> CountingTransport | None:
        return self._session.transport

    @override
    def report(self) -> str | None:
        starts = self._session.starts
        return None if starts is None else paste(starts)

    # ------------------------------------------------------------------ one step

    @override
    def training_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        if self._skips_backward():
            return own(*args, **kwargs)
        self._plan_batches()
        session = self._session
        if session.is_between_steps:
            self._require_update()
            self._guard.check()
        self._follow_freezing()
        self._updates.expect_groups()
        self._is_under_way = True
        if session.looks_first and session.engine is None:
            args, kwargs = self._find_stages(own, StepArguments(args, kwargs)), {}
        batch, last = args[0] if args else kwargs, not self._accumulating
        self._check_planned(last=last)
        ends = epoch_ends(self._trainer)
        running = self._reductions.running(together=session.runs_together)
        with session.forward(batch, last=last, ends=ends), self._reductions.held(), running:
            output = own(*args, **kwargs)
            if output is None:
                raise StepError(
                    f"training_step of rank {self._trainer.global_rank} returned None (step "
                    f"{session.t}); allowed: a loss in every step, since other workers wait "
                    "for its gradients; return 0 * loss to skip a batch"
                )
        self._tell_stages()
        self._reductions.adding = not last and self._trainer.world_size > 1
        if last and not self._plan.axes.sharding.gathers:
            # the worker behind begins its window when this one's is over
            self._reductions.run(self._trainer.strategy.reduce)
        return output

    @override
    def validation_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        with lending(self._module):  # before the first step layers may be on the meta device
            return own(*args, **kwargs)

    def _plan_batches(self) -> None:
        if not self._plans_batches or not self._session.is_between_steps:
            return
        trainer, session = self._trainer, self._session
        if self._agreed_epoch != trainer.current_epoch:
            self._agreed_epoch = trainer.current_epoch
            require_same_number(
                "accumulate_grad_batches",
                trainer.accumulate_grad_batches,
                session.assembly,
                "to begin an epoch",
            )
        rounds = batches_of_step(trainer)
        if rounds != session.rounds:
            self.flush_own()
            session.take_rounds(rounds)

    def _check_planned(self, *, last: bool) -> None:
        """Check that a step ends with the batch with which its plan does."""
        done, rounds = self._session.batches + 1, self._session.rounds
        if self._plans_batches and last != (done == rounds):
            raise StepError(
                f"batch {done} of step {self._session.t} {'ends it' if last else 'does not'}, but "
                f"it was to have {rounds}, as the length of the dataloader and "
                f"accumulate_grad_batches={self._trainer.accumulate_grad_batches} say; allowed: a "
                "number of batches that stays what it is when the epoch begins; set "
                "Trainer(limit_train_batches=...) to a number that there is, change "
                "accumulate_grad_batches between epochs, or use strategy='cyclic_dp' or "
                "'lockstep_dp'"
            )

    def _find_stages(self, own: Own, given: StepArguments) -> tuple[Any, ...]:
        copied = given.around(map_tensors(torch.clone, given.batch))
        records = Recorder(self._module)
        running = self._reductions.running(together=False)
        with records.holding(lambda *_: None), self._reductions.held(), running:
            self._session.find_stages(given.batch, lambda: own(*copied))
        return given.around(given.batch)

    @override
    def _follow_freezing(self) -> None:
        if self._session.is_between_steps:
            super()._follow_freezing()
        elif self._freezing is not None and self._freezing.has_changed:
            raise ConfigurationError(
                "a parameter was frozen, unfrozen or given to the optimizer between batches that "
                "are added up to one step; allowed: between steps; do it in on_train_epoch_start, "
                "or use accumulate_grad_batches=1"
            )

    @override
    def _train_others(self) -> None:
        optimizer = self._trainer.optimizers[0]
        self._guard.forget()  # first: what it watches may leave
        self._session.train_others(trained_parameters(self._module, optimizer, self._forms))

    def reduce(self, own: Own, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if (self._reductions.holding or self._reductions.updating) and isinstance(tensor, Tensor):
            return self._reductions.hold(tensor, group, reduce_op)
        if isinstance(tensor, Tensor):  # anything else is returned as it is
            self._reductions.check_meeting("a reduction (self.log with sync_dist=True, say)")
        return own(tensor, group, reduce_op)

    def pre_backward(self, own: Own, closure_loss: Tensor) -> None:
        last = not self._accumulating
        plan, t = self.plan, self._session.t
        if self._scaling is not None and plan is not None:  # else the scaler has step 0's
            assert self._outcomes is not None
            self._scaling.show(plan, t)
            self._outcomes.forget(plan.ended_before(t))
        self._backward = ExitStack()  # an earlier one that failed stays as it was
        self._backward.enter_context(self._session.backward(closure_loss, last=last))
        together = self._session.runs_together
        self._backward.enter_context(self._reductions.running(together=together))

    def post_backward(self, own: Own, closure_loss: Tensor) -> None:
        self._backward.close()
        self._owes_update = not self._accumulating

    @override
    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Closure, model: Any = None, **kwargs: Any
    ) -> Any:
        session, updates, trained = self._session, self._updates, self._trainer.optimizers[0]
        if self._updates_early:  # in the closure
            updates.remember(session.t, trained, kwargs)
            with updates.unchanged():
                output = closure()
        else:
            output = closure()
            updates.remember(session.t, trained, kwargs)
        updates.require_groups()
        self._keep_owned_state()
        session.end_step()
        self._owes_update = False
        if self._plan.axes.sharding.gathers:  # others wait for parameters until this step is over
            self._reductions.run(self._trainer.strategy.reduce)
        self._guard.note()
        return output

    def _require_update(self) -> None:
        if self._owes_update and not self._session.failed:
            raise no_update(self._plan.preset, self._session.t)

    @override
    def update_together(self) -> bool:
        plan = self._engine.plan
        if plan.axes.weights.is_local:
            return True
        owners = {plan.owner(j) for j in range(plan.num_stages)}
        return plan.weights == "sync" and len(owners) == plan.num_workers

    def _skips_backward(self) -> bool:
        # stochastic weight averaging runs an epoch of forwards alone, for BatchNorm statistics
        return bool(self._trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward)

    # ------------------------------------------------------------------ between steps

    @override
    def begin_epoch(self) -> None:
        super().begin_epoch()
        if self._plans_batches and self._trainer.num_training_batches == math.inf:
            raise ConfigurationError(
                "accumulate_grad_batches (or GradientAccumulationScheduler) with "
                f"sharding={self._plan.sharding!r} and an epoch whose number of batches is not "
                "known, so that nobody knows how many its last step has; allowed: datasets with a "
                "length, or Trainer(limit_train_batches=...) with a whole number; use one of "
                "these, accumulate_grad_batches=1, or strategy='cyclic_dp' or 'lockstep_dp'"
            )

    @property
    @override
    def is_between_steps(self) -> bool:
        return self._session.is_between_steps

    def _check_between_steps(self) -> None:
        """Refuse to finish updates while batches are added up to a step."""
        if not self._session.is_between_steps and not self._session.failed:
            raise StepError(
                f"validation, a checkpoint or the end of an epoch came behind "
                f"{self._session.batches} of the batches that are added up to step "
                f"{self._session.t}, which no worker can leave in its middle; allowed: behind the "
                "last of them; let val_check_interval be a multiple of accumulate_grad_batches, "
                "save, stop and skip where global_step has changed, use Timer(interval='epoch') "
                "in the place of max_time, and no limit_train_batches beyond the data"
            )

    @override
    def flush(self) -> None:
        self._check_between_steps()
        self._require_update()
        is_flushed = self._session.is_flushed
        with self._guard.ending() if self._has_stages else nullcontext():
            super().flush()
        if not is_flushed:
            self._settle_scale()

    def _settle_scale(self) -> None:
        session = self._session
        if self._scaling is not None and not session.failed:
            assert self._outcomes is not None
            self._outcomes.settle(self._scaling.known, session.t, session.assembly)
            self._scaling.catch_up(session.t)

    @override
    def flush_own(self) -> None:
        if not self._plan.axes.sharding.gathers:
            self.flush()
            return
        self._check_between_steps()
        if not self._session.is_flushed:
            self._guard.check()  # of what is here: absent parameters have no bits to compare
            self._session.flush(whole=False)
            self._settle_scale()
            self._guard.note()

    @override
    def resume(self, saved: Mapping[str, Any] | None) -> bool:
        goes_on = super().resume(saved)
        self._guard.forget()
        if saved is not None and goes_on and RANKS in saved:
            self._own = saved[RANKS][str(self._trainer.global_rank)]
            put_buffers(self._own, self._module)
        return goes_on

    @override
    def load_optimizer_state_dict(self, own: Own, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(own, checkpoint)
        if self._own is not None:
            put_optimizer_state(self._own, self._trainer.optimizers[0])
            self._own = None

    @override
    def end_fit(self) -> None:
        super().end_fit()
        if self.plan is not None and self.plan.local is not None:
            warn_of_lost_steps(self.plan, self._session.t)

    # ------------------------------------------------------------------ checkpoints

    @override
    def _part_of_delayed_state(self) -> dict[str, Any] | None:
        state = super()._part_of_delayed_state()
        if state is None or self._plan.local is None:
            return state
        rank = self._trainer.global_rank
        return state | own_state(self._trainer.optimizers[0], self._module, rank)

    @override
    def _whole_weights(self, own: Own) -> dict[str, Any]:
        state: dict[str, Any] = own()
        if self._trainer.is_global_zero:
            # parameters are views of flat buffers, which torch.save would write whole
            state = {k: v.clone() if _is_part(v) else v for k, v in state.items()}
        return state

    @override
    def _untold(self) -> Sequence[nn.Parameter]:
        # nobody knows yet who updates what is frozen, when it is unfrozen
        weights = self._module.parameters()
        return [self._forms.trained(p) for p in weights if not (p.requires_grad or is_absent(p))]

    # ------------------------------------------------------------------ the end

    @override
    def close(self) -> None:
        self._guard.forget()
        self._session.close()
        super().close()


def _is_part(x: Any) -> bool:
    """Say whether a tensor is a part of its memory, and not all of it."""
    return isinstance(x, Tensor) and x.untyped_storage().nbytes() > num_bytes_of(x)


def batches_of_step(trainer: Trainer) -> int:
    """Count the batches of the step that begins: fewer at the end of an epoch, which ends it."""
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    every = trainer.accumulate_grad_batches
    left = trainer.num_training_batches - ready + 1
    return int(min(every - (ready - 1) % every, left))


def plan_of_rounds(
    options: Options,
    num_stages: int,
    relayed: tuple[int, ...],
    relayed_until: tuple[int, ...],
    rounds: int,
) -> Plan:
    """Make a plan in which each worker runs so many batches per step."""
    num_microbatches = rounds * (options.num_workers or 1) if rounds > 1 else None
    return options.plan(num_stages, relayed, relayed_until, num_microbatches=num_microbatches)


def may_accumulate(trainer: Trainer) -> bool:
    scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks)  # type: ignore[attr-defined]
    return scheduled or trainer.accumulate_grad_batches != 1
