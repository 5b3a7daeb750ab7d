"""Setup: check the Trainer and the module, make the plan, and the training that follows from it.

The training is one of replicated.py, synchronous_pipeline.py and asynchronous_pipeline.py; none
where Lightning's own step runs on whole weights.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from lightning_cyclic.compat import (
    LightningModule,
    Trainer,
    TrainerFn,
    _auto_add_worker_init_fn,
    check_trainer,
    rank_zero_info,
)
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin import checkpoint as ckpt
from lightning_cyclic.plugin import torn_weights
from lightning_cyclic.plugin.asynchronous_pipeline import AsynchronousPipelineTraining
from lightning_cyclic.plugin.callbacks.flush import FlushCallback
from lightning_cyclic.plugin.callbacks.low_rank import low_rank_of
from lightning_cyclic.plugin.checkpoint_file import CheckpointFile
from lightning_cyclic.plugin.checks import (
    check_beyond_memory,
    check_fit,
    check_flow,
    check_hosts_of_groups,
    check_no_averaging,
    check_plan,
    check_samplers,
    workers_per_host,
)
from lightning_cyclic.plugin.compression import check_codec, check_weight_codec
from lightning_cyclic.plugin.hooks import Hooks
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.precision.sparse_state import SparseStatePrecision
from lightning_cyclic.plugin.reductions import HeldReductions, refusing_collectives
from lightning_cyclic.plugin.replicated import ReplicatedTraining, may_accumulate
from lightning_cyclic.plugin.strategy_checkpoints import Checkpoints
from lightning_cyclic.plugin.synchronous_pipeline import SynchronousPipelineTraining
from lightning_cyclic.plugin.training import TO_START, AbstractTraining, start_alike
from lightning_cyclic.runtime.agreement import require_same_lines
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.launchers import apart_from_earlier_attempts, end_with_agent, shelter
from lightning_cyclic.runtime.plain_copies import plain_copies
from lightning_cyclic.runtime.transport.crew import Crew, naming_start
from lightning_cyclic.runtime.transport.shared_gpus import naming_shared_gpus, refuse_shared_gpus
from lightning_cyclic.runtime.transport.streams import ask_for_queues


class Setup(Checkpoints):
    """Set a fit, a validation, a test or predictions up."""

    _plan: Plan | None
    _chosen: Options
    _reductions: HeldReductions
    _undo: ExitStack
    _workers_per_host: int

    @property
    def preset(self) -> str:
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        raise NotImplementedError

    @property
    def _when(self) -> str:
        raise NotImplementedError

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        if _kind_of_training(self._options, fitting=True) is None:
            return
        if model._trainer is None:  # whoever connects by hand runs no loop
            return
        callbacks: list[Any] = model.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, FlushCallback) for callback in callbacks):
            callbacks.insert(0, FlushCallback(self._get_training, self._fail))

    def _get_training(self) -> AbstractTraining | None:  # a method, as a Trainer may be pickled
        return self._training if isinstance(self._training, AbstractTraining) else None

    @override
    def setup_environment(self) -> None:
        """Forget the training before this one: a checkpoint is loaded before setup.

        A fit still knows which rank has which state of its optimizer.
        """
        self._plan = self._training.plan or self._plan
        self._training, self._unmade = Hooks(), None
        self.assembly.close()
        ask_for_queues()
        super().setup_environment()
        assert self.lightning_module is not None
        check_trainer(self.lightning_module.trainer)
        if self._checkpoint_io is None:
            self._checkpoint_io = CheckpointFile()

    @override
    def setup_distributed(self) -> None:
        """Let the workers meet, and refuse early that some share a GPU over NCCL."""
        end_with_agent()
        over_nccl = "nccl" in self._get_process_group_backend()
        refuse_shared_gpus(self.parallel_devices, has_nccl=over_nccl)
        assert self._timeout is not None
        limit_s = self._timeout.total_seconds()
        self.set_world_ranks()
        with (
            naming_start(self.global_rank, self.world_size, limit_s),
            naming_shared_gpus(),  # inside, or their error is taken for ranks that do not come
            apart_from_earlier_attempts(),
        ):
            super().setup_distributed()
            crew = Crew(limit_s)
            self.assembly = Assembly(crew, lambda: self._when)
        self._workers_per_host = workers_per_host(crew.names.hosts)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert trainer.state.fn is not None
        torn_weights.check(trainer.lightning_module, f"trainer.{trainer.state.fn.value}")
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._make_unmade(trainer, fitting=fitting)
        if fitting:
            self._choose_factors(trainer)
        self._prepare(trainer, self._options, fitting=fitting)
        if fitting and isinstance(self.precision_plugin, SparseStatePrecision):
            self.model_to_device()
            self._start_alike()  # now, as weights say what is pruned
        super().setup(trainer)
        options = self._options
        kind = _kind_of_training(options, fitting=fitting)
        if fitting:
            self._fitted = None
        if kind is None and not fitting:
            return
        self._plan = options.plan(options.expected_stages(self.lightning_module))
        check_plan(self._plan)
        if (crew := self.assembly.crew) is not None and self._plan.group_size > 1:
            check_hosts_of_groups(self._plan, crew.names.hosts)
            rank_zero_info(
                f"lightning_cyclic trains in {self._plan.num_groups} groups of "
                f"{self._plan.group_size} workers, those of a host, side by side"
            )
        if kind is not None:
            with self.assembly.waiting(what := "to set training up"):
                self.assembly.meet(what)  # who fails before is noticed here, not in new groups
                self._undo.enter_context(plain_copies(trainer.lightning_module))
                if self.world_size > 1:
                    self._undo.enter_context(refusing_collectives(self._reductions))
                training = kind(trainer, options, self._plan, self._reductions)
                self._training, self._fitted = training, training if fitting else self._fitted
            self._resume()
        elif self._saved is not None:  # Lightning itself trains, on the newest weights
            ckpt.warn_of_other_plan(self._saved, "sync")
            self._saved = None

    def _make_unmade(self, trainer: Trainer, *, fitting: bool) -> None:
        self._note_unmade()
        unmade, self._unmade = self._unmade, None
        if unmade is None:
            return
        unmade.check()
        if not self._exceeds_memory:
            unmade.make_all()
        elif fitting and self.world_size > 1:
            check_beyond_memory(
                trainer, in_files=not self._chosen.save_distributed_checkpoint,
                by_stages=self._options.is_stagewise,
            )  # fmt: skip

    def _choose_factors(self, trainer: Trainer) -> None:
        """Let workers send the factors of gradients that a callback has their backwards make.

        Raises:
            ConfigurationError: they are to send something else, or cannot.
        """
        callback, chosen = low_rank_of(trainer), self._chosen
        if callback is None:
            return
        if chosen.compress is not None:
            raise ConfigurationError(
                f"compress={chosen.compress!r} with the callback {callback!r}, which says what is "
                "sent of gradients, too; allowed: one of them; leave compress out, or remove the "
                "callback"
            )
        codec = callback.prepare(trainer, sends_whole=False)
        self._undo.callback(setattr, self, "_chosen", chosen)
        self._chosen = replace(chosen, compress=codec)
        self._chosen.check()  # as when the strategy is made: of any number of workers

    def _prepare(self, trainer: Trainer, options: Options, *, fitting: bool) -> None:
        if options.is_stagewise and options.replicas == 1:
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
        if kind is not None and fitting and options.codec is not None:
            accumulates = kind is not ReplicatedTraining and may_accumulate(trainer)
            check_codec(trainer, options.codec, accumulates=accumulates)
        if kind is not None and fitting and options.weight_codec is not None:
            check_weight_codec(trainer, options.weight_codec)
        if kind is not None and fitting:
            sync = self._layer_sync is not None
            check_fit(trainer, trainer.lightning_module, sync_batchnorm=sync)
        if kind is not None and kind is not ReplicatedTraining:
            check_no_averaging(trainer, "of which each worker of a pipeline has a part")
        if kind is AsynchronousPipelineTraining:
            check_flow(trainer)

    @override
    def configure_ddp(self) -> None:
        """Make all workers start from worker 0's module, without wrapping it."""
        self._start_alike()

    def _start_alike(self) -> None:
        assert self.lightning_module is not None
        if self.world_size > 1:
            require_same_lines(
                f"the arguments of {type(self).__name__}",
                self.assembly.share(self._options.lines, TO_START),
                "the same on every rank; start all ranks with one configuration",
            )
            start_alike(self.lightning_module, self.assembly)

    def check_compressed_states(self, options: Options | None = None) -> None:
        """Refuse to train with SparseStatePrecision where gradients or weights must be dense."""
        options = options or self._options
        found = {
            f"preset={options.preset!r}, which predicts weights": options.predicts,
            "save_distributed_checkpoint=True": options.save_distributed_checkpoint,
            "memory_limit_bytes": options.memory_limit_bytes is not None,
            "error_feedback=True": options.error_feedback,
            f"compress={options.compress!r}": (
                options.codec is not None or options.weight_codec is not None
            ),
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
        size = self.world_size // options.replicas
        return {"num_replicas": options.replicas, "rank": self.global_rank // size}


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
