"""CyclicStrategy: Lightning's hooks, each handed on to the training that is under way.

setup      check, make the plan, and the training: replicated.py, synchronous_pipeline.py,
           asynchronous_pipeline.py, or none
hooks      the training answers, given what Lightning itself would do (training.py)
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import nn
from typing_extensions import override

from lightning_cyclic.compat import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    DDPStrategy,
    LightningModule,
    Precision,
    Trainer,
    TrainerFn,
    TrainerStatus,
    _auto_add_worker_init_fn,
    check_trainer,
)
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin import checkpoint as ckpt
from lightning_cyclic.plugin import sealed_file
from lightning_cyclic.plugin.asynchronous_pipeline import AsynchronousPipelineTraining
from lightning_cyclic.plugin.callbacks.drain import DrainCallback
from lightning_cyclic.plugin.checkpoint_files import CheckpointFiles
from lightning_cyclic.plugin.checkpoint_folder import (
    Apart,
    CheckpointFolder,
    by_names,
    check_folder,
    check_names,
    with_tensors,
    write_folder,
)
from lightning_cyclic.plugin.checks import (
    check_beyond_memory,
    check_hosts_of_groups,
    check_no_averaging,
    check_no_leftovers,
    check_plan,
    refuse_file,
)
from lightning_cyclic.plugin.collective_calls import refusing_collectives
from lightning_cyclic.plugin.departed import refuse_departed
from lightning_cyclic.plugin.newest import checkpoints_of, newest_whole
from lightning_cyclic.plugin.options import (
    STARTING_S,
    TRAINING_S,
    Options,
    check_network,
    checked_stages,
    checked_verify,
    network_of,
)
from lightning_cyclic.plugin.precision.sparse_state import SparseStatePrecision
from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.plugin.replicated import ReplicatedTraining
from lightning_cyclic.plugin.samplers import check_samplers
from lightning_cyclic.plugin.synchronous_pipeline import SynchronousPipelineTraining
from lightning_cyclic.plugin.training import (
    AbstractTraining,
    agreed_seed,
    start_alike,
)
from lightning_cyclic.plugin.unwritten import none_on_exception
from lightning_cyclic.runtime.absent import num_bytes_of
from lightning_cyclic.runtime.agreement import (
    Together,
    gather_texts,
    put_together,
    require_same_lines,
)
from lightning_cyclic.runtime.launchers import (
    apart_from_earlier_attempts,
    end_with_agent,
    shelter,
)
from lightning_cyclic.runtime.meetings import START, Meetings, naming_start
from lightning_cyclic.runtime.meta import MetaWeights, is_unmade, lending
from lightning_cyclic.runtime.plain_copies import plain_copies
from lightning_cyclic.runtime.transport.choice import (
    Route,
    naming_shared_gpus,
    refuse_shared_gpus,
)

_TO_WRITE = "to write a checkpoint"


def _lending(hook: str) -> Any:
    """Make the method of a step of evaluation, which a training answers, or Lightning.

    Lightning's own calls modules whole: what is absent is there while it is called.
    """

    def answer(self: CyclicStrategy, *args: Any, **kwargs: Any) -> Any:
        own = getattr(super(CyclicStrategy, self), hook)
        answered = getattr(self._training, hook, None)
        if answered is not None:
            return answered(own, *args, **kwargs)
        assert self.lightning_module is not None
        with lending(self.lightning_module):
            return own(*args, **kwargs)

    return answer


def _forwarded(hook: str, meets: str = "") -> Any:
    """Make the method of a hook that a training answers, or Lightning where it does not.

    Args:
        hook: its name.
        meets: what all ranks come together to do there, if they do.
    """

    def answer(self: CyclicStrategy, *args: Any, **kwargs: Any) -> Any:
        own = getattr(super(CyclicStrategy, self), hook)
        answered = getattr(self._training, hook, None)
        if answered is None:
            return own(*args, **kwargs)
        with self.naming(meets) if meets else nullcontext():
            return answered(own, *args, **kwargs)

    return answer


@final
class CyclicStrategy(DDPStrategy):
    """Train an unmodified LightningModule by a plan.

    Args:
        preset: name of the plan: "cyclic_dp", "cyclic_dp_v1" or "lockstep_dp" run whole
            micro-batches on each worker, and so does "cyclic_zero", which shards weights; "gpipe"
            and "1f1b" are pipelines with a flush, "cyclic_pipeline", "pipedream",
            "pipedream_2bw", "pipeoptim" and "spectrain" are pipelines without; under "cyclic_mp"
            workers take turns with the stages. Which is fastest for a model, with which numbers,
            `lightning-cyclic plan` predicts.
        schedule: overrides the preset's schedule.
        placement: overrides the preset's placement.
        weights: overrides the preset's weight rule.
        sharding: overrides the preset's sharding.
        stages: "auto", a number, or the module paths that begin stages 1, 2, ... Pipelines are
            cut by FLOPs and bytes, counted, so that stages are the same in every run; "measured"
            is "auto" by times, which rank 0 takes in the first step.
        num_microbatches: micro-batches per update; with replicated placement one per worker.
        slack: slots that messages are given to travel before a version counts as fresh.
        groups: into how many groups of neighbours workers are divided that have all stages. Those
            of a group, which must be on one host, run side by side, as under DDP; groups are
            staggered as single workers would be. A sum visits as many places as there are groups,
            and crosses hosts as often, so that many workers hold a step up less; weights are as
            late as with so many workers. One group is plain data parallelism, its sums added in
            the order of workers. [None: each worker is a group]
        clip: what gradient_clip_val (norm) looks at: "stage", "global", or None for the default:
            "stage" for freshest weights (said once), "global" otherwise.
        relay_buffers: "auto" relays the buffers that the first step changed (BatchNorm
            statistics), "all" relays every buffer.
        width: replicas of a pipeline; workers = width * workers of each.
        remat: of pipelines: run a stage again for its backward instead of keeping what its
            forward saved: "never", "always", or "except_last" micro-batch.
        memory_limit_bytes: most bytes that a worker may keep, as the planner counts them: weights
            of all versions, gradients, optimizer state, and activations of all micro-batches
            under way. Of pipelines with a stage per worker, whose stages are cut so; elsewhere
            of the parameters and one micro-batch's activations of a stage. [any number]
        error_feedback: where gradients are old, turn each update u_t into 2 * u_t - u_(t-1), for
            one more buffer of the size of the weights. Experimental.
        bandwidth: of each worker of a pipeline, like "10Gbit/s" or bytes per second; stages are
            cut by it. [10Gbit/s]
        latency: the same: of a message, like "50us" or seconds. [50us]
        transport: how messages travel. "auto": on CPUs by name over gloo; on GPUs over NCCL,
            channel by channel; through the host's memory where workers share a GPU, or with
            process_group_backend="gloo". Or one of these: "named", "edges", "host_staged".
        reduce_dtype: in which sums of gradients travel between workers: "fp32", "bf16" or "fp16".
            Each is rounded where it is sent, and the next gradient added in the wider of both
            dtypes. None is that of the gradients, and "fp32" where they have a lower precision
            (docs/precision.md).
        save_distributed_checkpoint: whether a checkpoint is a folder, into which each rank writes
            the weights and optimizer state that it has, as under ModelParallelStrategy; else a
            file, for which rank 0 puts them together. [a file]
        resume: "auto": a fit goes on from the newest whole checkpoint of this run, if it was
            started before (docs/start.md), else from what fit(ckpt_path=...) names.
        verify: where a step is run in stages: whether the first step of a fit is compared, bit by
            bit, with training_step on the whole module, which rank 0 runs before it; a number
            compares as many steps, where one version of the weights is read; False compares none
            (docs/is_it_right.md).
        accelerator: as in DDPStrategy.
        parallel_devices: as in DDPStrategy.
        cluster_environment: as in DDPStrategy.
        checkpoint_io: as in DDPStrategy.
        precision_plugin: as in DDPStrategy.
        process_group_backend: as in DDPStrategy.
        timeout: limit of every wait for another rank. [5 minutes; 30 until training has begun, and
            in the first steps of a fit and behind its first evaluation, which may be compiled]
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
        num_microbatches: int | None = None,
        slack: int = 0,
        groups: int | None = None,
        clip: str | None = None,
        relay_buffers: str = "auto",
        width: int = 1,
        remat: str = "never",
        memory_limit_bytes: int | None = None,
        error_feedback: bool = False,
        bandwidth: str | float | None = None,
        latency: str | float | None = None,
        transport: Route = "auto",
        reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None,
        save_distributed_checkpoint: bool = False,
        resume: Literal["auto"] | None = None,
        verify: Literal["first_step"] | int = "first_step",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        refuse_departed({
            "preset": preset, "schedule": schedule, "sharding": sharding, "slack": slack,
            "groups": groups, **kwargs,
        })  # fmt: skip
        check_no_leftovers(kwargs, inspect.signature(CyclicStrategy).parameters)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout or timedelta(seconds=STARTING_S),
            start_method=start_method,
        )
        self._chosen = Options(
            preset=preset,
            schedule=schedule,
            placement=placement,
            weights=weights,
            sharding=sharding,
            stages=checked_stages(stages),
            num_microbatches=num_microbatches,
            slack=slack,
            groups=groups,
            clip=clip,
            relay_buffers=relay_buffers,
            width=width,
            remat=remat,
            memory_limit_bytes=memory_limit_bytes,
            error_feedback=error_feedback,
            transport=transport,
            reduce_dtype=reduce_dtype,
            timeout_s=timeout.total_seconds() if timeout else TRAINING_S,
            starting_s=timeout.total_seconds() if timeout else STARTING_S,
            save_distributed_checkpoint=save_distributed_checkpoint,
            resume=resume,
            verify=checked_verify(verify),
            network=network_of(bandwidth, latency),
        )
        self._options.check()
        check_network(self._chosen, {"bandwidth": bandwidth, "latency": latency})
        self._plan: Plan | None = None
        self._training: AbstractTraining | None = None  # Lightning itself answers
        self._reductions = HeldReductions()
        self._files = CheckpointFiles(self._get_checkpoint_io, self._is_fitting)
        self._meetings: Meetings | None = None  # from the start of the process group on
        self._saved: Mapping[str, Any] | None = None
        self._folder: CheckpointFolder | None = None  # from which a run goes on
        self._unmade: MetaWeights | None = None  # until setup
        self._undo = ExitStack()  # what setup has changed of the Trainer, until teardown

    @property
    def _options(self) -> Options:
        """Return what the user chose, with the number of workers as soon as it is known."""
        known = self.parallel_devices is not None
        return replace(self._chosen, num_workers=self.world_size if known else None)

    # ------------------------------------------------------------------ what users ask

    @property
    def preset(self) -> str:
        """Return the name of the plan."""
        return self._chosen.preset

    @property
    def slack(self) -> int:
        """Return how many slots messages are given to travel."""
        return self._chosen.slack

    @property
    def plan(self) -> Plan:
        """Return the plan; after the first training step it has the stages that were found."""
        plan = self._planned
        if plan is None:
            raise ConfigurationError(
                "strategy.plan was read before setup; allowed: after Trainer.fit has set up; "
                "read it in a callback's on_fit_start or later"
            )
        return plan

    @property
    def _planned(self) -> Plan | None:
        return (self._training and self._training.plan) or self._plan

    @property
    def stage_of(self) -> dict[str, int]:
        """Return parameter name -> stage; known from the first training step on."""
        found = None if self._training is None else self._training.stage_of
        if found is not None:
            return found
        if self.lightning_module is not None and self._options.trains_plainly:
            return {n: 0 for n, _ in self.lightning_module.named_parameters()}
        raise ConfigurationError(
            "strategy.stage_of was read before the first training step found the stages; "
            "allowed: after it; read it in on_train_batch_end or later"
        )

    @property
    def own_stages(self) -> tuple[int, ...]:
        """Return the stages whose parameters this rank has; of replicated workers all."""
        own = None if self._training is None else self._training.own_stages
        return tuple(sorted(set(self.stage_of.values()))) if own is None else own

    @property
    def updated_parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters whose gradients on_before_optimizer_step sees whole, on this rank.

        Replicated workers, and pipelines without a flush, call it for each of their stages.
        """
        if self._training is None:
            return list(self.model.parameters()) if self.model is not None else []
        return self._training.updated_parameters

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Run the body with the whole module on every rank; all ranks must call it.

        In hooks of validation, at the end of epochs and behind the fit each rank has it anyway.

        Raises:
            StepError: the body reads what does not fit (memory_limit_bytes).
        """
        with nullcontext() if self._training is None else self._training.whole():
            yield

    def report(self) -> str:
        """Return the profile of a pipelined module, where stages could begin and where they do.

        The last lines name the stages, to paste, and how batches are cut; of replicated workers
        there is no more.
        """
        report = None if self._training is None else self._training.report()
        if report is None:
            raise ConfigurationError(
                "strategy.report() was asked for where no module has been looked at; allowed: "
                "from the first step on, of a pipeline on rank 0; or run `lightning-cyclic doctor "
                "PATH:CLASS` without training"
            )
        return report

    @property
    def steps_compared(self) -> int:
        """Return how many steps of this fit have been found equal to the plain ones."""
        return 0 if self._training is None else self._training.steps_compared

    @property
    def route(self) -> str:
        """Return how messages travel: "named", "edges" or "host_staged"; "" where none do."""
        transport = None if self._training is None else self._training.transport
        return transport.route if transport else ""

    @property
    def messages_sent(self) -> int:
        """Return how many point-to-point messages this worker has sent in training."""
        transport = None if self._training is None else self._training.transport
        return sum(transport.messages.values()) if transport else 0

    @property
    def bytes_sent(self) -> int:
        """Return how many bytes this worker has sent in training, point-to-point."""
        transport = None if self._training is None else self._training.transport
        return sum(transport.num_bytes.values()) if transport else 0

    # ------------------------------------------------------------------ setting up

    @override
    def connect(self, model: LightningModule) -> None:
        """Insert the drain in front of all callbacks."""
        super().connect(model)
        if _kind_of_training(self._options, fitting=True) is None:
            return
        if model._trainer is None:  # whoever connects by hand runs no loop
            return
        callbacks: list[Any] = model.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, DrainCallback) for callback in callbacks):
            callbacks.insert(0, DrainCallback(self._get_training, self._fail))

    def _get_training(self) -> AbstractTraining | None:
        return self._training  # by a method, as a Trainer may be pickled

    @override
    def setup_environment(self) -> None:
        """Forget the training before this one: a checkpoint is loaded before setup."""
        self._plan = self._planned
        self._training = self._unmade = None
        self._part()
        super().setup_environment()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        check_trainer(trainer)
        if self._chosen.resume is not None and trainer.state.fn == TrainerFn.FITTING:
            self._go_on_from_newest(trainer)

    def _go_on_from_newest(self, trainer: Trainer) -> None:
        """Let Lightning load what rank 0 finds, in place of what fit was given."""
        found = [*checkpoints_of(trainer)]  # which all ranks refuse alike
        path = self.broadcast(newest_whole(found) if self.is_global_zero else None)
        if path is None:
            return
        connector = trainer._checkpoint_connector
        start = connector.resume_start  # to which Lightning is about to give fit's ckpt_path
        self._undo.callback(vars(connector).pop, "resume_start")
        vars(connector)["resume_start"] = lambda _=None, **kwargs: start(str(path), **kwargs)

    @override
    def setup_distributed(self) -> None:
        """Let the workers meet, and refuse early that some share a GPU over NCCL."""
        end_with_agent()
        over_nccl = "nccl" in self._get_process_group_backend()
        refuse_shared_gpus(self.parallel_devices, has_nccl=over_nccl)
        limit_s = self._chosen.starting_s
        self.set_world_ranks()
        with (
            naming_start(self.global_rank, self.world_size, limit_s),
            naming_shared_gpus(),  # inside, or their error is taken for ranks that do not come
            apart_from_earlier_attempts(),
        ):
            super().setup_distributed()
        if self.world_size > 1:
            self._meetings = Meetings(limit_s)

    @override
    def setup(self, trainer: Trainer) -> None:
        """Check everything that can be checked before the first step."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._make_unmade(trainer, fitting=fitting)
        self._prepare(trainer, self._options, fitting=fitting)
        if fitting and isinstance(self.precision_plugin, SparseStatePrecision):
            self.model_to_device()
            self._start_alike()  # now, as weights say what is pruned
        super().setup(trainer)
        options = self._options
        kind = _kind_of_training(options, fitting=fitting)
        if kind is None and not fitting:
            return
        self._plan = options.plan(options.expected_stages(self.lightning_module))
        check_plan(self._plan)
        if self._meetings is not None:
            check_hosts_of_groups(self._plan, self._meetings.names.hosts)
        if kind is not None:
            with self.naming("to set training up"):
                super().barrier()  # who fails before it is noticed here, and not in new groups
                self._undo.enter_context(plain_copies(trainer.lightning_module))
                if self.world_size > 1:
                    self._undo.enter_context(refusing_collectives(self._reductions))
                self._training = kind(trainer, options, self._plan, self._reductions)
            if self._meetings is not None:
                self._meetings.heed(self._training)
            self._resume()
        elif self._saved is not None:  # Lightning itself trains, on the newest weights
            ckpt.warn_of_other_plan(self._saved, "sync")
            self._saved = None

    def _note_unmade(self) -> None:
        """Find layers on the meta device, to which a checkpoint may give values before setup."""
        module = self.lightning_module
        if self._training is None and self._unmade is None and module and is_unmade(module):
            self._unmade = MetaWeights(module, self.root_device, agreed_seed())

    def _make_unmade(self, trainer: Trainer, *, fitting: bool) -> None:
        """Make layers of the meta device, or let each rank make its own of what exceeds all."""
        self._note_unmade()
        unmade, self._unmade = self._unmade, None
        if unmade is None:
            return
        unmade.check()
        if not self._exceeds_memory:
            unmade.make_all()
        elif fitting:
            check_beyond_memory(
                trainer, in_files=not self._chosen.save_distributed_checkpoint,
                by_stages=self._options.is_stagewise,
            )  # fmt: skip

    @property
    def _exceeds_memory(self) -> bool:
        """Say whether no rank may have all parameters, and the plan needs none to."""
        options, limit = self._options, self._chosen.memory_limit_bytes
        if limit is None or self.world_size == 1 or not options.makes_stages_apart:
            return False
        assert self.lightning_module is not None
        return sum(map(num_bytes_of, self.lightning_module.parameters())) > limit

    def _prepare(self, trainer: Trainer, options: Options, *, fitting: bool) -> None:
        """Check the Trainer, and let workers that see the same batches have the whole loader."""
        if options.is_stagewise and options.width == 1:
            # all workers see the same batches, in the loader's own order
            connector, name = trainer._accelerator_connector, "use_distributed_sampler"
            self._undo.callback(setattr, connector, name, getattr(connector, name))
            setattr(connector, name, False)
        self._check(trainer, options, fitting=fitting)

    def _check(self, trainer: Trainer, options: Options, *, fitting: bool) -> None:
        if options.save_distributed_checkpoint:
            check_no_averaging(trainer, "but only rank 0's own values are kept in a folder")
        if fitting and isinstance(self.precision_plugin, SparseStatePrecision):
            self.check_compressed_states(options)
        kind = _kind_of_training(options, fitting=fitting)
        if kind is not None:
            kind.check(trainer, sync_batchnorm=self._layer_sync is not None)

    @override
    def configure_ddp(self) -> None:
        """Make all workers start from worker 0's module, without wrapping it."""
        self._start_alike()

    def _start_alike(self) -> None:
        assert self.lightning_module is not None
        if self.world_size > 1:
            with self.naming("to start alike"):
                require_same_lines(
                    "the arguments of CyclicStrategy",
                    gather_texts(self._options.lines),
                    "the same on every rank; start all ranks with one configuration",
                )
                start_alike(self.lightning_module)

    def check_compressed_states(self, options: Options | None = None) -> None:
        """Refuse to train with SparseStatePrecision where gradients or weights must be dense.

        Args:
            options: that may be chosen. [those of this run]

        Raises:
            ConfigurationError: with what was found.
        """
        options = options or self._options
        found = {
            f"preset={options.preset!r}, which predicts weights": options.predicts,
            "save_distributed_checkpoint=True": options.save_distributed_checkpoint,
            "memory_limit_bytes": options.memory_limit_bytes is not None,
            "error_feedback=True": options.error_feedback,
        }
        first = next((what for what, is_so in found.items() if is_so), None)
        if first is not None:
            raise ConfigurationError(
                f"SparseStatePrecision was given with {first}, where gradients or weights are "
                "dense; allowed: presets that predict no weights, checkpoints of one file; use "
                "Trainer(strategy='cyclic_dp'), 'cyclic_zero', '1f1b' or 'pipedream_2bw', without "
                "that"
            )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Let the workers of a loader live on when a signal asks this rank to stop; check it."""
        _auto_add_worker_init_fn(dataloader, self.global_rank)  # which Lightning does behind this
        usual = getattr(signal, "SIGUSR1", signal.SIGTERM)  # there is none on Windows
        requeue = getattr(self.cluster_environment, "requeue_signal", None) or usual
        signals = frozenset({signal.SIGTERM, signal.SIGINT, requeue})
        self._undo.callback(shelter(dataloader, signals))
        if self._options.is_stagewise and self.world_size > 1:
            check_samplers(dataloader, self.distributed_sampler_kwargs, self.preset)
        return super().process_dataloader(dataloader)

    @property
    @override
    def root_device(self) -> torch.device:
        """Return this rank's device; on CPUs Ray gives a node's ranks one for all."""
        devices = self.parallel_devices or []
        if len(devices) == 1 and devices[0].type == "cpu":
            return devices[0]
        return super().root_device

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Feed replicas, not workers."""
        options = self._options
        if not options.is_stagewise:  # Ray's ranks are more than devices times nodes
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        size = self.world_size // options.width
        return {"num_replicas": options.width, "rank": self.global_rank // size}

    # ------------------------------------------------------------------ what a training answers

    training_step = _forwarded("training_step")
    validation_step = _lending("validation_step")
    test_step = _lending("test_step")
    predict_step = _lending("predict_step")
    pre_backward = _forwarded("pre_backward")
    post_backward = _forwarded("post_backward")
    optimizer_step = _forwarded("optimizer_step")
    lightning_module_state_dict = _forwarded("lightning_module_state_dict", _TO_WRITE)
    optimizer_state = _forwarded("optimizer_state", _TO_WRITE)
    reduce = _forwarded("reduce")
    reduce_boolean_decision = _forwarded("reduce_boolean_decision")

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        training, own = self._training, super().block_backward_sync
        with own() if training is None else training.accumulating():
            yield

    # ------------------------------------------------------------------ all workers together

    @override
    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self._reductions.check_meeting("all_gather")
        with self.naming("to gather"):
            return super().all_gather(*args, **kwargs)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._reductions.check_meeting("barrier")
        with self.naming("to meet"):
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._reductions.check_meeting("broadcast")
        with self.naming("to learn what one of them has"):
            return super().broadcast(obj, src)

    def naming(self, what: str) -> AbstractContextManager[None]:
        """Name the ranks that do not come while the body waits for all of them."""
        return nullcontext() if self._meetings is None else self._meetings.naming(self._when, what)

    @property
    def _when(self) -> str:
        return START if self._training is None else self._training.when

    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends."""
        if self._training is not None:
            self._training.fail(error)
            assert self.lightning_module is not None
            self._undo.enter_context(none_on_exception(self.lightning_module.trainer))
        elif self._meetings is not None:
            self._meetings.fail(error)

    def _part(self) -> None:
        if self._meetings is not None:
            self._meetings.close()
        self._meetings = None

    # ------------------------------------------------------------------ between steps

    def flush(self) -> None:
        """Finish updates in flight, so that the module holds the newest weights."""
        if self._training is not None:
            self._training.flush()

    # ------------------------------------------------------------------ checkpoints

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint with one more key for what is delayed: a file, or a folder."""
        if self._chosen.save_distributed_checkpoint:
            self._save_folder(checkpoint, filepath, storage_options)
            return
        self._add_delayed(checkpoint, put_together)
        if not self._files.has(filepath) or storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            self._files.save(checkpoint, Path(filepath))

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, but for one that the last should have replaced and could not."""
        self._files.remove(filepath, super().remove_checkpoint, writes=self.is_global_zero)

    def _get_checkpoint_io(self) -> CheckpointIO:
        return self.checkpoint_io  # by a method, as a Trainer may be pickled

    def _is_fitting(self) -> bool:
        state = self.lightning_module.trainer.state if self.lightning_module is not None else None
        return state is not None and (state.fn, state.status) == (
            TrainerFn.FITTING,
            TrainerStatus.RUNNING,
        )

    def _add_delayed(self, checkpoint: dict[str, Any], together: Together) -> None:
        state = None
        if self._training is not None:
            with self.naming(_TO_WRITE):
                state = self._training.delayed_state(together)
        if state is not None:
            checkpoint[ckpt.KEY] = {"format": ckpt.FORMAT} | state

    def _save_folder(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        """Write this rank's part of a checkpoint."""
        check_folder(path, self.checkpoint_io, storage_options)
        assert self.lightning_module is not None
        apart, training = Apart(), self._training
        self._add_delayed(checkpoint, apart.together)
        if training is None and not self.is_global_zero:
            checkpoint["state_dict"] = {}  # rank 0 has the same
        named = partial(by_names, module=self.lightning_module)
        states = checkpoint.get("optimizer_states", [])
        checkpoint["optimizer_states"] = list(map(named, states, self.optimizers))
        group = None if training is None else training.group
        folder = Path(self.broadcast(path))
        with self._files.warning(folder), self.naming(_TO_WRITE):
            write_folder(checkpoint, folder, apart.tensors, group)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a checkpoint, and keep what is delayed for the training."""
        if self._files.is_behind(checkpoint_path):  # it may be on its way
            self._files.wait()
            self.barrier("load_checkpoint")
        is_file, self._folder = self._files.has(checkpoint_path), None
        if is_file:
            with self.naming("to check a checkpoint"):
                sealed_file.check(checkpoint_path, together=True)
        if is_file and Path(checkpoint_path).is_dir():
            self._folder = CheckpointFolder(Path(checkpoint_path))
            meta = super().load_checkpoint(self._folder.meta, *args, **kwargs)
            loaded = self._folder.completed(meta)
        else:
            loaded = super().load_checkpoint(checkpoint_path, *args, **kwargs)  # from 2.6 on more
        saved = with_tensors(loaded)
        ckpt.check_format(saved, checkpoint_path)
        saved.pop("format", None)
        self._saved = saved or None
        return loaded

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights; versions in flight give way to them."""
        assert self.lightning_module is not None
        if self._folder is not None:
            check_names(self._folder.path, checkpoint["state_dict"], self.lightning_module, strict)
        self.flush()
        self._note_unmade()
        if self._unmade is not None and self._folder is None and self._exceeds_memory:
            refuse_file("a checkpoint to go on from")
        with nullcontext() if self._training is None else self._training.writable():
            super().load_model_state_dict(checkpoint, strict=strict)
        self._resume()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of optimizers; of a folder each rank reads what it needs of it."""
        if self._folder is not None:
            module, training = self.lightning_module, self._training
            assert module is not None
            wanted = None if training is None else training.with_state
            states = checkpoint["optimizer_states"]
            read = [
                self._folder.optimizer_state(k, saved, optimizer, module, wanted)
                for k, (saved, optimizer) in enumerate(zip(states, self.optimizers, strict=True))
            ]
            checkpoint = {**checkpoint, "optimizer_states": read}
            self._folder = None
        own = super().load_optimizer_state_dict
        if self._training is None:
            own(checkpoint)
        else:
            self._training.load_optimizer_state_dict(own, checkpoint)

    def _resume(self) -> None:
        if self._training is not None:
            self._training.resume(self._saved)
            self._saved = None

    # ------------------------------------------------------------------ the end

    @override
    def teardown(self) -> None:
        """Take everything off the module again, and finish what a thread writes."""
        with closing(self._files):  # last, as nobody waits for its files
            self._take_off()

    def _take_off(self) -> None:
        if self._training is not None:
            self._training.close()
        self._part()
        self._undo.close()
        module = self.lightning_module
        if module is not None and any(p.is_meta for p in module.parameters()):
            self._lightning_module = None  # it was refused; Lightning would move it, and fail
        super().teardown()


def _kind_of_training(
    options: Options, *, fitting: bool
) -> type[SynchronousPipelineTraining | AsynchronousPipelineTraining | ReplicatedTraining] | None:
    """Return what is to be set up; None where Lightning's own step runs on whole weights.

    That is also so behind a replicated fit, whose session still answers for checkpoints.
    """
    if options.is_cut:
        return (
            AsynchronousPipelineTraining
            if options.flows and fitting
            else SynchronousPipelineTraining
        )
    return ReplicatedTraining if fitting and not options.trains_plainly else None
