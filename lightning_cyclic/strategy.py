"""CyclicStrategy: Lightning's hooks, answered by a session of the runtime.

setup             check, agree, make the plan           (the session finds the stages in the
training_step     session.forward                        first training step)
pre_backward      session.backward, up to post_backward
optimizer_step    closure; remember lr & co.; session.end_step -- the update comes later
state dicts       flush first
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, final

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_cyclic import checkpoint as ckpt
from lightning_cyclic.callbacks.drain import DrainCallback
from lightning_cyclic.checks import (
    CLIPPING,
    REMAT,
    check_choice,
    check_no_leftovers,
    check_once,
    check_optimizers,
    check_pipeline,
    check_plan,
    check_trainer,
    check_used,
    clip_mode,
    is_stagewise,
    trained_parameters,
)
from lightning_cyclic.deferred import DeferredUpdates
from lightning_cyclic.errors import ConfigurationError, StepError
from lightning_cyclic.pipelines import PIPELINE_PAYLOADS, PipelinedTraining
from lightning_cyclic.plan import PRESETS, Plan, make_plan
from lightning_cyclic.reductions import HeldReductions
from lightning_cyclic.runtime.agreement import require_same_module, require_same_number
from lightning_cyclic.runtime.session import Session, SessionConfig, auto_stages
from lightning_cyclic.runtime.stagewise.cuts import Cuts, choose_cuts
from lightning_cyclic.runtime.stagewise.evidence import Survey
from lightning_cyclic.runtime.stagewise.ranks import rank_of
from lightning_cyclic.runtime.stagewise.report import report
from lightning_cyclic.runtime.stagewise.session import StagewiseConfig, StagewiseSession
from lightning_cyclic.runtime.stagewise.survey import survey
from lightning_cyclic.runtime.transport import CountingTransport, DistributedTransport
from lightning_cyclic.stopping import replace_stop_broadcast, restore_stop_broadcast


@final
class CyclicStrategy(DDPStrategy):
    """Train an unmodified LightningModule by a plan with replicated placement.

    Args:
        preset: name of the plan: "cyclic_dp", "cyclic_dp_v1" or "lockstep_dp".
        schedule: overrides the preset's schedule.
        placement: overrides the preset's placement.
        weights: overrides the preset's weight rule.
        sharding: overrides the preset's sharding.
        stages: "auto", a number, or the module paths that begin stages 1, 2, ...
        num_micro: micro-batches per update; with replicated placement one per worker.
        slack: slots that messages are given to travel before a version counts as fresh.
        clip: what gradient_clip_val (norm) looks at: "stage", "global", or None for the default:
            "stage" for freshest weights (said once), "global" otherwise.
        relay_buffers: "auto" relays the buffers that the first step changed (BatchNorm
            statistics), "all" relays every buffer.
        width: replicas of a pipeline; workers = width * workers of each.
        remat: of pipelines: run a stage again for its backward instead of keeping what its
            forward saved: "never", "always", or "except_last" micro-batch.
        memory_limit_bytes: most bytes of parameters and of one micro-batch's activations that a
            stage of a pipeline may have. [any number]
        accelerator: as in DDPStrategy.
        parallel_devices: as in DDPStrategy.
        cluster_environment: as in DDPStrategy.
        checkpoint_io: as in DDPStrategy.
        precision_plugin: as in DDPStrategy.
        process_group_backend: as in DDPStrategy.
        timeout: limit of every wait for another worker.
        start_method: "popen", "spawn", "fork" or "forkserver".
        **kwargs: none; DDP's own arguments are refused by name.

    Raises:
        PlanError: unknown names, impossible numbers, or a plan that cannot be run yet.
        ConfigurationError: a Trainer flag, module or optimizer that does not fit.

    Source: Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep
        Neural Networks", arXiv 2403.08837 (CDP-v1, CDP-v2).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> Trainer(strategy=CyclicStrategy("cyclic_dp", slack=2), devices=1, accelerator="cpu",
        ...         logger=False, enable_checkpointing=False).strategy.slack
        2
    """

    def __init__(  # noqa: PLR0913  (the Trainer's users set each by name; DDPStrategy's are ours too)
        self,
        preset: str = "cyclic_dp",
        *,
        schedule: str | None = None,
        placement: str | None = None,
        weights: str | None = None,
        sharding: str | None = None,
        stages: int | str | list[str] = "auto",
        num_micro: int | None = None,
        slack: int = 0,
        clip: str | None = None,
        relay_buffers: str = "auto",
        width: int = 1,
        remat: str = "never",
        memory_limit_bytes: int | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        check_no_leftovers(kwargs)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.preset = preset
        self.slack = slack
        self._axes = {
            "schedule": schedule,
            "placement": placement,
            "weights": weights,
            "sharding": sharding,
        }
        self._stages = _checked_stages(stages)
        self._num_micro = num_micro
        self._clip = clip
        self._relay_buffers = relay_buffers
        check_choice(relay_buffers, ("auto", "all"), "relay_buffers")
        if clip is not None:
            check_choice(clip, CLIPPING, "clip")
        check_choice(remat, REMAT, "remat")
        self._width = width
        self._remat = remat
        self._memory_limit_bytes = memory_limit_bytes
        # refuse early, before any process; how many workers there will be is not known yet
        check_plan(self._probe_plan())
        check_used(self._probe_plan(), remat, memory_limit_bytes)
        self._plan: Plan | None = None
        self._session: Session | None = None
        self._pipeline: PipelinedTraining | None = None
        self._pipeline_transport: CountingTransport | None = None
        self._survey: Survey | None = None
        self._updates: DeferredUpdates | None = None
        self._accumulating = False
        self._reductions = HeldReductions()
        self._backward = ExitStack()  # open while a backward runs
        self._saved: Mapping[str, Any] | None = None
        self._seed = 0
        self._pruned = False
        self._sampling: bool | None = None  # the Trainer's use_distributed_sampler, where not used

    # ------------------------------------------------------------------ what users ask

    @property
    def plan(self) -> Plan:
        """Return the plan; after the first training step it has the stages that were found."""
        if self._session is not None and self._session.engine is not None:
            return self._session.engine.plan
        if self._pipeline is not None and self._pipeline.session.plan is not None:
            return self._pipeline.session.plan
        if self._plan is None:
            raise ConfigurationError(
                "strategy.plan was read before setup; allowed: after Trainer.fit has set up; "
                "read it in a callback's on_fit_start or later"
            )
        return self._plan

    @property
    def stage_of(self) -> dict[str, int]:
        """Return parameter name -> stage; known from the first training step on."""
        found = self._pipeline.stage_of if self._pipeline is not None else None
        if found is not None:
            return found
        if self._trains_plainly and self.lightning_module is not None:
            return {n: 0 for n, _ in self.lightning_module.named_parameters()}
        if self._session is None or self._session.stages is None:
            raise ConfigurationError(
                "strategy.stage_of was read before the first training step found the stages; "
                "allowed: after it; read it in on_train_batch_end or later"
            )
        return self._session.stages.stage_of

    def report(self) -> str:
        """Return the profile of a pipelined module, where stages could begin and where they do.

        Raises:
            ConfigurationError: before the first step, and elsewhere than on rank 0, where the
                module is looked at.
        """
        cuts = self._pipeline.session.cuts if self._pipeline is not None else None
        if self._survey is None or cuts is None:
            raise ConfigurationError(
                "strategy.report() was asked for where no module has been looked at; allowed: on "
                "rank 0, from the first step of a pipeline on; or run `lightning-cyclic doctor "
                "PATH:CLASS` without training"
            )
        return report(self._survey, cuts)

    @property
    def messages_sent(self) -> int:
        """Return how many point-to-point messages this worker has sent in training."""
        return sum(self._transport.messages.values()) if self._transport else 0

    @property
    def bytes_sent(self) -> int:
        """Return how many bytes this worker has sent in training, point-to-point."""
        return sum(self._transport.num_bytes.values()) if self._transport else 0

    @property
    def _transport(self) -> CountingTransport | None:
        return self._session.transport if self._session else self._pipeline_transport

    # ------------------------------------------------------------------ setting up

    def connect(self, model: LightningModule) -> None:
        """Insert the drain in front of all callbacks."""
        super().connect(model)
        if self._trains_plainly:
            return
        callbacks: list[Any] = model.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, DrainCallback) for callback in callbacks):
            callbacks.insert(0, DrainCallback(self))

    def setup(self, trainer: Trainer) -> None:
        """Check everything that can be checked before the first step."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._is_stagewise and self._width == 1:
            # all workers see the same batches, in the loader's own order
            self._sampling = trainer._accelerator_connector.use_distributed_sampler
            trainer._accelerator_connector.use_distributed_sampler = False
        if self._is_cut:
            self._setup_pipeline(trainer, fitting=fitting)
            return
        if fitting:
            assert self.lightning_module is not None
            sync_batchnorm = self._layer_sync is not None
            if not self._trains_plainly:
                check_trainer(trainer, self.lightning_module, sync_batchnorm=sync_batchnorm)
        super().setup(trainer)
        if fitting:
            self._plan = self._make_plan(self._expected_stages(), ())
            check_plan(self._plan)
            if not self._trains_plainly:
                self._begin_session(trainer)

    @property
    def _is_stagewise(self) -> bool:
        """Say whether workers run single stages of the step."""
        return is_stagewise(self._probe_plan())

    @property
    def _is_cut(self) -> bool:
        """Say whether the step or its batch is cut; else one worker runs Lightning's own step."""
        if not self._is_stagewise or self.world_size > 1:
            return self._is_stagewise
        plan = self._make_plan(self._expected_stages(), ())
        return plan.num_stages > 1 or plan.num_micro > 1

    def _probe_plan(self) -> Plan:
        """Make a plan of plausible numbers, as the real ones are not known yet."""
        known = PRESETS.get(self.preset)  # make_plan refuses unknown ones
        placement = self._placement or (known.placement if known else "replicated")
        numbers = {"single": 1, "replicated": self._num_micro or 2}
        return self._make_plan(4, (), num_workers=numbers.get(placement, 2 * self._width))

    @property
    def _placement(self) -> str | None:
        """Return the placement that was chosen; None for the preset's.

        One worker that is given several micro-batches runs them on the timetable of as many.
        """
        given = self._axes["placement"]
        one_worker = self.parallel_devices is not None and self.world_size == 1
        if given is None and one_worker and (self._num_micro or 1) > 1:
            return "single" if PRESETS[self.preset].placement == "replicated" else None
        return given

    def _setup_pipeline(self, trainer: Trainer, *, fitting: bool) -> None:
        module = self.lightning_module
        assert module is not None
        if self._pipeline is not None:
            self._pipeline.close()
        check_pipeline(
            trainer, module, fitting=fitting, sync_batchnorm=self._layer_sync is not None
        )
        super().setup(trainer)
        self._plan = self._make_plan(self._expected_stages(), ())
        check_plan(self._plan)
        if fitting:
            check_optimizers(self.optimizers)
        self._pipeline = pipeline = self._make_pipeline(trainer, module)
        if fitting and pipeline.stop is not None:
            stop = pipeline.stop
            replace_stop_broadcast(trainer, stop, lambda: stop.agreed)
        vars(self.precision_plugin)["clip_grad_by_norm"] = self._clip_pipeline
        self._resume_pipeline()

    def _make_pipeline(self, trainer: Trainer, module: LightningModule) -> PipelinedTraining:
        size = self.world_size // self._width
        transport, group = None, None
        if self.world_size > 1:
            made = DistributedTransport(
                PIPELINE_PAYLOADS, self._timeout_s, lambda w: rank_of(w, size)
            )
            transport, group = CountingTransport(made), made.group
        self._pipeline_transport = transport
        assert self._plan is not None
        self._seed = self._agreed_seed()
        config = StagewiseConfig(
            make_plan=self._plan_of_pipeline,
            find_cuts=self._find_cuts,
            num_micro=self._plan.num_micro // self._width,
            width=self._width,
            remat=self._remat,
            seed=self._seed,
        )
        session = StagewiseSession(
            module, config, transport, rank_of(self.global_rank, size), self.world_size,
            self.root_device, group,
        )  # fmt: skip
        return PipelinedTraining(trainer, module, session, self._reductions)

    def _plan_of_pipeline(
        self,
        num_stages: int,
        num_micro: int,
        tied: tuple[tuple[int, ...], ...],
        relayed: tuple[int, ...],
    ) -> Plan:
        return self._make_plan(num_stages, relayed, num_micro=num_micro, tied=tied)

    def _find_cuts(self, module: nn.Module, step: Callable[[], Any]) -> Cuts:
        found = survey(module, step, repeats=2)  # for quiet times
        stages = self._expected_stages() if self._stages == "auto" else self._stages
        assert stages != "auto"
        self._survey = found
        return choose_cuts(found, stages, memory_limit_bytes=self._memory_limit_bytes)

    def _clip_pipeline(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all stages."""
        assert self._pipeline is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        plan = self.plan
        by_stage = clip_mode(self.lightning_module.trainer, plan, self._clip) == "stage"  # type: ignore[union-attr]
        self._pipeline.clip(parameters, clip_val, by_stage=by_stage)

    @property
    def _timeout_s(self) -> float:
        return self._timeout.total_seconds() if self._timeout else 1800.0

    def configure_ddp(self) -> None:
        """Make all workers start from worker 0's module, without wrapping it."""
        if self.world_size == 1:
            return
        assert self.lightning_module is not None
        require_same_module(self.lightning_module, self.root_device)
        with torch.no_grad():
            for tensor in [*self.lightning_module.parameters(), *self.lightning_module.buffers()]:
                torch.distributed.broadcast(tensor, 0)

    @property
    def _trains_plainly(self) -> bool:
        """Say whether this is one worker whose plan always reads the newest weights."""
        return self.world_size == 1 and self._make_plan(1, ()).reads(1, 0, 0) == 1

    def _begin_session(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        assert self._plan is not None
        check_optimizers(self.optimizers)
        parameters = trained_parameters(module, self.optimizers[0])
        self._seed = self._agreed_seed()
        clip = clip_mode(trainer, self._plan, self._clip)
        self._updates = DeferredUpdates(trainer, clip, self._reductions)
        config = SessionConfig(
            make_plan=self._make_plan,
            stages=self._stages,
            seed=self._seed,
            timeout_s=self._timeout.total_seconds() if self._timeout else 1800.0,
            relay_buffers=self._relay_buffers,
            paced=clip != "global" or self._plan.weights != "freshest",
        )
        self._session = Session(
            module, parameters, config, self.global_rank, self.root_device, self._updates.apply
        )
        self._updates.session = self._session
        # on the instance: the module's own configure_gradient_clipping still leads here
        vars(self.precision_plugin)["clip_grad_by_norm"] = self._updates.clip_grad_by_norm
        self._pruned = False
        self._parameter_ids = frozenset(map(id, parameters.values()))
        session = self._session
        replace_stop_broadcast(
            trainer, session, lambda: session.engine is not None and session.engine.stopping
        )
        self._resume()

    def _agreed_seed(self) -> int:
        seed = torch.tensor([torch.initial_seed() % 2**63], device=self.root_device)
        torch.distributed.broadcast(seed, 0)
        return int(seed)

    def _expected_stages(self) -> int:
        if isinstance(self._stages, int):
            return self._stages
        if isinstance(self._stages, list):
            return len(self._stages) + 1
        if self._placement == "single":
            return self._num_micro or 1
        if self._is_stagewise:
            return max(1, self.world_size // self._width)
        assert self.lightning_module is not None
        ps = [p for p in self.lightning_module.parameters() if p.requires_grad]
        wanted = auto_stages(self.world_size, sum(p.numel() * p.element_size() for p in ps))
        return max(1, min(wanted, len(ps)))

    def _make_plan(
        self,
        num_stages: int,
        relayed: tuple[int, ...],
        num_workers: int | None = None,
        num_micro: int | None = None,
        tied: tuple[tuple[int, ...], ...] = (),
    ) -> Plan:
        if num_micro is None and self._num_micro is not None:
            num_micro = self._num_micro * self._width
        return make_plan(
            self.preset,
            num_stages=num_stages,
            num_workers=num_workers or self.world_size,
            num_micro=num_micro,
            width=self._width,
            tied=tied,
            slack=self.slack,
            relayed=relayed,
            schedule=self._axes["schedule"],
            placement=self._placement,
            weights=self._axes["weights"],
            sharding=self._axes["sharding"],
        )

    # ------------------------------------------------------------------ one step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step as the forward of this worker's micro-batch."""
        if self._pipeline is not None:
            return self._pipeline.training_step(self._train_context, *_positional(args, kwargs))
        if self._session is None or self._skips_backward():
            return super().training_step(*args, **kwargs)
        batch, last = args[0] if args else kwargs, not self._accumulating
        ends = self._epoch_ends()
        with self._session.forward(batch, last=last, ends=ends), self._reductions.held():
            output = super().training_step(*args, **kwargs)
            if output is None:
                raise StepError(
                    f"training_step of worker {self.global_rank} returned None (step "
                    f"{self._session.t}); allowed: a loss in every step, since other workers wait "
                    "for its gradients; return 0 * loss to skip a batch"
                )
        if last:  # the worker behind begins its window when this one's is over
            self._reductions.run(super().reduce)
        return output

    @property
    def _train_context(self) -> Callable[[], Any]:
        return self.precision_plugin.train_step_context

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step, stage by stage once the stages are apart."""
        if self._pipeline is None:
            return super().validation_step(*args, **kwargs)
        if self._before_training:
            step = super().validation_step
            return self._pipeline.evaluate_whole(lambda: step(*args, **kwargs))
        return self._evaluate(
            "validation_step", self.precision_plugin.val_step_context, args, kwargs
        )

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step, stage by stage."""
        if self._pipeline is None:
            return super().test_step(*args, **kwargs)
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict step, stage by stage."""
        if self._pipeline is None:
            return super().predict_step(*args, **kwargs)
        return self._evaluate(
            "predict_step", self.precision_plugin.predict_step_context, args, kwargs
        )

    def _evaluate(self, kind: str, context: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        assert self._pipeline is not None
        return self._pipeline.evaluate(kind, context, *_positional(args, kwargs))

    @property
    def _before_training(self) -> bool:
        """Say whether a fit has not had its first step: the module is whole on every worker."""
        assert self._pipeline is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING  # type: ignore[union-attr]
        return fitting and self._pipeline.session.cuts is None

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Gather from all workers, where all of them pass."""
        self._reductions.check_meeting("all_gather")
        return super().all_gather(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all workers, where all of them pass."""
        self._reductions.check_meeting("barrier")
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object to all workers, where all of them pass."""
        self._reductions.check_meeting("broadcast")
        return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over all workers; what training_step asks for, when its forward is over.

        Over the replicas of a pipeline, as its stages have the same values.
        """
        if self._pipeline is not None:
            self._reductions.check_meeting("a reduction")
            return self._pipeline.reduce(tensor, reduce_op)
        if (self._reductions.holding or self._reductions.updating) and isinstance(tensor, Tensor):
            return self._reductions.hold(tensor, group, reduce_op)
        return super().reduce(tensor, group, reduce_op)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Begin a backward, in which gradients leave for the sum as their stages complete."""
        if self._session is not None:
            last = not self._accumulating
            self._backward = ExitStack()  # an earlier one that failed stays as it was
            self._backward.enter_context(self._session.backward(closure_loss, last=last))

    def post_backward(self, closure_loss: Tensor) -> None:
        """Hand over the gradients of stages that the backward did not complete."""
        self._backward.close()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure and leave the update to the program."""
        if self._session is None:
            if self._pipeline is None:
                return super().optimizer_step(optimizer, closure, model, **kwargs)
            closure = self._pipeline.before_update(closure)
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
            self._pipeline.end_step()
            return output
        assert self._updates is not None
        output = closure()
        self._keep_owned_state()
        self._updates.remember(self._session.t, self.optimizers[0], kwargs)
        self._session.end_step()
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate on this worker: gradients stay in ``p.grad`` until the window closes."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _epoch_ends(self) -> bool:
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        loop = trainer.fit_loop.epoch_loop
        return bool(
            loop.batch_progress.is_last_batch
            or loop.batch_idx + 1 >= trainer.num_training_batches
            or trainer.global_step + 1 >= trainer.max_steps > 0
        )

    def _skips_backward(self) -> bool:
        # stochastic weight averaging runs an epoch of forwards alone, for BatchNorm statistics
        loop = self.lightning_module.trainer.fit_loop.epoch_loop  # type: ignore[union-attr]
        return bool(loop.automatic_optimization._skip_backward)

    # ------------------------------------------------------------------ between steps

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide by all (or any) workers' decisions."""
        if self._pipeline is None:
            return bool(super().reduce_boolean_decision(decision, all))
        agreed = self._pipeline.reduce(torch.tensor(int(decision), device=self.root_device), "sum")
        return bool(agreed == self._width) if all else bool(agreed > 0)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Feed replicas, not workers."""
        if not self._is_stagewise:
            return super().distributed_sampler_kwargs
        return {
            "num_replicas": self._width,
            "rank": self.global_rank // (self.world_size // self._width),
        }

    def flush(self) -> None:
        """Finish updates in flight, so that the module holds the newest weights."""
        if self._session is not None:
            self._session.flush()

    def end_epoch(self) -> None:
        """Bring metrics to all workers before anybody computes them."""
        if self._pipeline is not None:
            self._pipeline.share_metrics()

    def fail(self, text: str) -> None:
        """Communicate no more, and tell the other workers why."""
        if self._session is not None:
            self._session.fail(text)
        if self._pipeline is not None:
            self._pipeline.session.fail(text)

    def begin_epoch(self) -> None:
        """Check that every worker has the same number of batches and the same parameters."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        session = self._session
        if session is None:
            return
        with session.naming_peers("all workers to begin an epoch"):
            require_same_number(
                "numbers of training batches", trainer.num_training_batches, self.root_device,
                session.group,
            )  # fmt: skip
        now = trained_parameters(self.lightning_module, self.optimizers[0])
        if frozenset(map(id, now.values())) != self._parameter_ids:
            raise ConfigurationError(
                "the set of trained parameters changed between epochs (a callback froze, unfroze "
                "or replaced some); allowed: the same parameters throughout one fit; unfreeze "
                "before fit, or call fit once per phase"
            )

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the newest weights, full on every worker."""
        self.flush()
        if self._pipeline is not None:
            return self._pipeline.state_dict()
        state = super().lightning_module_state_dict()
        if self._session is not None and self.is_global_zero:
            # parameters are views of flat buffers, which torch.save would write whole
            state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole optimizer state on worker 0."""
        if self._pipeline is not None and self._pipeline.has_stages:
            optimizer = getattr(optimizer, "_optimizer", optimizer)
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            own = [p for p in self._pipeline.session.holdings.own if id(p) in held]
            return ckpt.gather_optimizer_state(optimizer, own)
        engine = self._session.engine if self._session else None
        if engine is None or self._session is None or self._session.failed:
            return super().optimizer_state(optimizer)
        self.flush()
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        owned = [p for j in engine.script.owned for p in engine.parameters(j)]
        return ckpt.gather_optimizer_state(optimizer, owned)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a plain checkpoint with one more key for what is delayed."""
        state = self._session.state() if self._session else None
        if state is not None and self._session is not None and self._session.stages is not None:
            checkpoint[ckpt.KEY] = ckpt.delayed_state(
                self.plan, self._session.stages, state, self._seed
            )
        if self._pipeline is not None and self._pipeline.session.cuts is not None:
            checkpoint[ckpt.KEY] = ckpt.stagewise_state(self.plan, self._pipeline.session)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Read a checkpoint, and keep what is delayed for the session."""
        loaded = super().load_checkpoint(checkpoint_path, weights_only)
        self._saved = loaded.get(ckpt.KEY)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights; versions in flight give way to them."""
        self.flush()
        if self._pipeline is not None:
            with self._pipeline.session.whole():
                super().load_model_state_dict(checkpoint, strict=strict)
            self._resume_pipeline()
            return
        super().load_model_state_dict(checkpoint, strict=strict)
        if self._session is not None and not self._resume():
            self._session.restart()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the whole optimizer state; each worker keeps the part that it owns."""
        super().load_optimizer_state_dict(checkpoint)
        self._pruned = False
        if self._pipeline is not None and self._pipeline.is_apart:
            ckpt.keep_owned_state(self.optimizers[0], self._pipeline.session.holdings.own)

    def _resume_pipeline(self) -> None:
        """Go on with the stages and the step of a checkpoint that this plan has written."""
        saved = self._saved
        if saved is None or self._pipeline is None or "cuts" not in saved:
            return
        self._saved = None
        session = self._pipeline.session
        session.t = saved["t"]
        session.config = replace(session.config, seed=saved["seed"])
        assert self._plan is not None
        if session.cuts is None and ckpt.fits(saved, self._plan):
            session.begin(Cuts.from_data(saved["cuts"]))
            session.put_previous(saved["previous"])

    def _resume(self) -> bool:
        saved, self._saved = self._saved, None
        if saved is None or self._session is None or self._plan is None:
            return False
        if not ckpt.fits(saved, self._plan):
            rank_zero_warn(
                f"The checkpoint was written under {saved['plan']}; this run has another plan and "
                "goes on from its newest weights, as any strategy would, not with the same bits."
            )
            return False
        self._session.resume(*ckpt.restored(saved), seed=saved["seed"])
        self._seed = saved["seed"]
        return True

    def _keep_owned_state(self) -> None:
        engine = self._session.engine if self._session else None
        if engine is not None and not self._pruned:
            owned = [p for j in engine.script.owned for p in engine.parameters(j)]
            ckpt.keep_owned_state(self.optimizers[0], owned)
            self._pruned = True

    # ------------------------------------------------------------------ the end

    def teardown(self) -> None:
        """Take everything off the module again."""
        if self._pipeline is not None:
            self._plan = self._pipeline.session.plan or self._plan
            self._pipeline.close()
            self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
            restore_stop_broadcast(self.lightning_module.trainer)  # type: ignore[union-attr]
        if self._session is not None:
            self._session.close()
            self.__dict__.pop("_parameter_ids", None)
            self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
            restore_stop_broadcast(self.lightning_module.trainer)  # type: ignore[union-attr]
            if self._session.engine is not None:
                self._plan = self._session.engine.plan
        if self._sampling is not None:
            connector = self.lightning_module.trainer._accelerator_connector  # type: ignore[union-attr]
            connector.use_distributed_sampler = self._sampling
            self._sampling = None
        super().teardown()


def _positional(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return a step's arguments as Lightning gives them: the batch first."""
    return (*args, *kwargs.values())


def _checked_stages(stages: int | str | Sequence[str]) -> int | str | list[str]:
    number = isinstance(stages, int) and not isinstance(stages, bool) and stages >= 1
    paths = isinstance(stages, list | tuple) and all(isinstance(s, str) for s in stages)
    if not (stages == "auto" or number or paths):
        raise ConfigurationError(
            f'stages={stages!r} is not understood; allowed: "auto", a number from 1, or a list of '
            'module paths; use CyclicStrategy(stages=["layer2", "layer3"])'
        )
    if paths:
        check_once(stages)  # type: ignore[arg-type]
    return stages if isinstance(stages, int | str) else list(stages)
