"""Training: who answers a strategy's hooks, where it is not Lightning itself.

    ReplicatedTraining   each worker runs whole micro-batches (replicated.py)
    PipelineTraining       each worker runs single stages (pipeline.py)
      SynchronousPipelineTraining    a flush between steps (synchronous_pipeline.py)
      AsynchronousPipelineTraining      none: steps flow into each other (asynchronous_pipeline.py)

What a training does not say is as in hooks.py. Gradients become weights in one place, for all of
them: updates.py, which asks a training about the gradients of its stages.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.compat import LightningModule, Trainer, TrainerFn, rank_zero_info
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin import checkpoint as ckpt
from lightning_cyclic.plugin import compression, torn_weights
from lightning_cyclic.plugin.checks import check_optimizers, scaler_of
from lightning_cyclic.plugin.clipping import clip_mode, may_clip_by_norm
from lightning_cyclic.plugin.error_feedback import ErrorFeedback
from lightning_cyclic.plugin.hooks import Hooks, Own
from lightning_cyclic.plugin.loader_position import LoaderPosition
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.planned_memory import planned_memory, state_per_param
from lightning_cyclic.plugin.precision.sparse_state import SparseStatePrecision
from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.plugin.stop_signal import Asked, StopSignals
from lightning_cyclic.plugin.updates import Stages, Updates
from lightning_cyclic.plugin.weight_guard import FreezingWatch
from lightning_cyclic.runtime.absent import is_absent
from lightning_cyclic.runtime.agreement import require_same_module, require_same_number
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.codecs.coded import Codes
from lightning_cyclic.runtime.codecs.weights import CodedWeights
from lightning_cyclic.runtime.failure_words import lack_of_memory, relief
from lightning_cyclic.runtime.flight_recorder import FOLDER, write_down
from lightning_cyclic.runtime.loss_scaling import LossScaling
from lightning_cyclic.runtime.partial_step.session import StagewiseSession
from lightning_cyclic.runtime.stages.places import paste
from lightning_cyclic.runtime.weight_forms import ALL, WeightForms
from lightning_cyclic.runtime.whole_step.session import Session
from lightning_cyclic.simulate import Memory

TO_START = "to start alike"


class AbstractTraining(Hooks, ABC):
    """Answer a strategy's hooks, from its setup to its teardown."""

    _session: Session | StagewiseSession

    def __init__(
        self, trainer: Trainer, options: Options, plan: Plan, reductions: HeldReductions
    ) -> None:
        self._trainer = trainer
        self._options = options
        self._plan = plan
        self._reductions = reductions
        self._feedback = ErrorFeedback(is_on=options.error_feedback)
        codec = options.codec if options.encoders else None
        self._codes = None if codec is None else Codes(codec)
        coded = options.weight_codec if options.encoders else None
        self._weights = None if coded is None else CodedWeights(coded)
        if self._codes is not None:
            self._codes.begin(self._worker)
        self._accumulating = self._is_under_way = False
        self._has_told_stages = self._closed = self._owned_is_kept = False
        self._signals: StopSignals | None = None
        self._loaders: LoaderPosition | None = None
        self._freezing: FreezingWatch | None = None
        self._forms = ALL
        if trainer.state.fn == TrainerFn.FITTING:
            check_optimizers(trainer.optimizers)
            self._forms = self._make_forms(trainer)
            self._freezing = FreezingWatch(trainer, self._forms)
            self._loaders = LoaderPosition(trainer)
        self._clip = clip_mode(trainer, plan, options.clip_norm)
        scaler, self._scaling = scaler_of(trainer), None
        if scaler is not None:
            at_once = self._lag is None
            self._scaling = LossScaling(scaler, self._was_finite, at_once=at_once)
        if scaler is not None or (self._clip == "global" and may_clip_by_norm(trainer)):
            self._options, self._plan = self._telling_norms(options, plan)
        self._updates = Updates(
            trainer,
            plan.preset,
            self._clip,
            self,
            reductions,
            self._forms,
            self._lag,
            # or noted, where stages are clipped one by one by the norm of all
            told_before=options.moves_state or (self._plan.flows and self._plan.norms != "none"),
        )
        # on the instance: the module's own configure_gradient_clipping still leads here
        vars(trainer.precision_plugin)["clip_grad_by_norm"] = self._updates.clip_grad_by_norm

    # ------------------------------------------------------------------ updates

    _lag: int | None = 2  # see Updates

    @abstractmethod
    def _telling_norms(self, options: Options, plan: Plan) -> tuple[Options, Plan]:
        """Let those know the norms of all gradients who decide about a step by them."""

    @abstractmethod
    def _was_finite(self, t: int) -> bool | None:
        """Say whether the gradients of a step that has ended were; None: there were none."""

    @abstractmethod
    def parameters_of(self, j: int) -> Sequence[nn.Parameter]: ...

    @abstractmethod
    def total_norm(self, t: int, order: Sequence[nn.Parameter]) -> Tensor: ...

    def overflowed(self, t: int, stages: Stages) -> Collection[int]:
        """Take the scale out of gradients; return the stages whose own are not finite."""
        scaling, plan = self._scaling, self.plan
        if scaling is None:
            return ()
        assert plan is not None
        grads = {j: [p.grad for p in ps] for j, ps in stages.items()}
        return [j for j in stages if not scaling.unscaled(plan, t, grads[j])]

    @abstractmethod
    def skipped(self, t: int, stages: Sequence[int], own: Collection[int]) -> Collection[int]: ...

    @contextmanager
    def changing(self, t: int, stages: Stages) -> Iterator[None]:
        assert self.plan is not None
        parameters = [p for ps in stages.values() for p in ps]
        coded = nullcontext() if self._weights is None else self._weights.updating(parameters)
        with coded, self._feedback.corrected(self.plan, stages):
            yield

    def update_together(self) -> bool:
        """Say whether every rank makes updates, of some stages, at the end of each step."""
        return False

    def _keep_owned_state(self) -> None:
        """Give up what the optimizer has of other workers' stages: a checkpoint has it of all."""
        if not self._owned_is_kept:
            mine = self._session.with_state
            ckpt.keep_owned_state(self._trainer.optimizers[0], mine)
            self._forms.leave([*mine, *self._untold()])
            self._owned_is_kept = True

    def _untold(self) -> Sequence[nn.Parameter]:
        """Return what the optimizer has of which nobody knows yet who will update it."""
        return ()

    @override
    def load_optimizer_state_dict(self, own: Own, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(own, checkpoint)
        self._owned_is_kept = False
        if self._is_apart:  # else when it is known which are the own ones
            self._keep_owned_state()

    def _make_forms(self, trainer: Trainer) -> WeightForms:
        """Return what of weights is trained, and travels; all workers must call it."""
        precision = trainer.precision_plugin
        if not isinstance(precision, SparseStatePrecision):
            return ALL
        return precision.forms(cast("Any", trainer.strategy).assembly)

    def _stop_as(self, asked: Asked, has_agreed: Callable[[], bool]) -> None:
        self._signals = StopSignals(self._trainer, asked, has_agreed)
        self._signals.begin()

    @property
    def _module(self) -> LightningModule:
        return self._trainer.lightning_module

    @property
    def _has_stages(self) -> bool:
        """Say whether the stages are known, and each worker has optimized its own."""
        return self._session.plan is not None and not self._session.failed

    # ------------------------------------------------------------------ what users ask

    @property
    def plan(self) -> Plan | None:
        return self._session.plan

    @property
    def stage_of(self) -> dict[str, int] | None:
        return self._session.stage_of

    @property
    def updated_parameters(self) -> Sequence[nn.Parameter]:
        return self._updates.updated

    @override
    def planned_memory(self, batch_bytes: int) -> Memory | None:
        if not self._has_stages or self.plan is None:
            return None
        parameters = dict(self._module.named_parameters())
        return planned_memory(
            self.plan,
            parameters,
            self.stage_of or {},
            self._session.assembly.ask_first(
                self._kept_by_stages, "to compare memory with the plan"
            ),
            batch_bytes=batch_bytes,
            again=self._options.runs_again,
            state_per_param=state_per_param(self._trainer.optimizers, parameters.values()),
        )[self._worker]

    def _kept_by_stages(self) -> list[tuple[int, int]] | None:
        """Return activations and what each stage is sent, in bytes, if rank 0 has looked at it."""
        return None

    # ------------------------------------------------------------------ steps

    def _tell_stages(self) -> None:
        """Say once where stages begin, as text to paste: the same stages in any other run."""
        starts = self._session.starts
        if starts is None or self._has_told_stages:
            return
        self._has_told_stages = True
        count = f"{len(starts) + 1} stages" if starts else "one stage"
        name = type(self._module).__name__
        rank_zero_info(f"lightning_cyclic trains {name} in {count}: {paste(starts)}")

    def _follow_freezing(self) -> None:
        if self._freezing is not None and self._freezing.has_changed:
            self.flush()
            self._freezing.agree(self._session)
            self._train_others()
            self._owned_is_kept = False
            if self._weights is not None:
                self._weights.keep_trained()

    @abstractmethod
    def _train_others(self) -> None:
        """Make other plans, as other parameters are trained; behind a flush."""

    @override
    @contextmanager
    def accumulating(self, own: Own) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    # ------------------------------------------------------------------ between steps

    @property
    def is_between_steps(self) -> bool:
        """Say whether no batches have been added up that an update waits for."""
        return True

    @property
    def has_versions(self) -> bool:
        """Say whether checkpoints have weights of more than one version."""
        return self._plan.weights != "sync"

    def flush(self) -> None:
        self._session.flush()

    @override
    def bring(self) -> None:
        self._is_under_way = False  # until the next step all ranks have weights of one step

    def agree_to_stop(self) -> None:  # only where ranks learn metrics late
        """Behind a flush, see that all ranks go on, or that all stop."""

    def begin_epoch(self) -> None:
        """Check that every worker has the same number of batches.

        Raises:
            ConfigurationError: on every worker, with every number.
        """
        if self._signals is not None:
            self._signals.hear_interrupts()
        require_same_number(
            "numbers of training batches",
            self._trainer.num_training_batches,
            self._session.assembly,
            "to begin an epoch",
        )

    def begin_evaluation(self, what: str, numbers: Sequence[float]) -> None: ...

    def end_batch(self) -> None:  # only where ranks learn metrics late
        """Check what has been decided by metrics of the step."""

    def end_epoch(self) -> None:
        """Show the newest weights, and what metrics have seen, before anybody computes."""
        self.flush()

    def end_fit(self) -> None:
        """Show the newest weights, which are those that the fit leaves."""
        self.flush()

    def fail(self, error: BaseException) -> None:
        """Communicate no more; tell the other ranks why, and write down what was done last."""
        self._reductions.stop_refusing()
        if self._session.failed:
            return
        if self._is_under_way and self.plan is not None and not self._stays_whole:
            torn_weights.note(self._module, f"by {type(error).__name__} {self.when}")
        lack, todo = lack_of_memory(error), ""
        if lack:
            todo = relief(self.plan or self._plan, self._options.activation_checkpointing)
            error.add_note(f"{self._name} ran {lack} {self.when}. {todo}")
        rows, plan = self._session.flight.take(), self.plan or self._plan
        self._session.fail(error, todo)
        rank, worker = f"{self._name} ended {self.when}", self._worker
        write_down(self._failure_path, error, rank, worker, plan, rows)

    @property
    def _stays_whole(self) -> bool:
        """Say whether this rank has all weights of one step, also within the next one."""
        return False

    @property
    def _name(self) -> str:
        if self.transport is not None:
            return self.transport.crew.names.of(self._trainer.global_rank)
        return f"rank {self._trainer.global_rank} on {socket.gethostname()}"

    @property
    def _worker(self) -> int:
        return self._options.worker_of(self._trainer.global_rank)

    @property
    def _failure_path(self) -> Path:
        root = self._trainer.default_root_dir
        folder = Path(root if ckpt.is_local(root) else ".")
        return folder / FOLDER / f"failure-rank{self._trainer.global_rank}.txt"

    @property
    def when(self) -> str:
        return self._session.when

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self, own: Own) -> dict[str, Any]:
        torn_weights.check(self._module, "save_checkpoint")
        if not self._writes_parts:
            self.flush()
            return self._whole_weights(own)
        self.flush_own()
        is_first = self._trainer.is_global_zero
        if self._is_apart:
            return ckpt.part_of_state(self._module, self._session.own_names(), rest=is_first)
        return own() if is_first else {}

    @property
    def _writes_parts(self) -> bool:
        return self._options.save_distributed_checkpoint

    @property
    def _is_apart(self) -> bool:
        """Say whether it is known which worker has what; else the first has all."""
        return self._has_stages and not self._closed

    def flush_own(self) -> None:
        """Finish updates in flight, without bringing weights to workers that do not make them."""
        self.flush()

    @abstractmethod
    def _whole_weights(self, own: Own) -> dict[str, Any]: ...

    def optimizer_state(self, own: Own, optimizer: Optimizer) -> dict[str, Any]:
        session = self._session
        if session.failed and session.plan is not None and not session.assembly.is_alone:
            raise ConfigurationError(
                f"a checkpoint with the optimizer's state was asked for, but training ended "
                f"{self.when} by an error, and each rank has the state of its own stages alone; "
                "allowed: weights without it; use trainer.save_checkpoint(file, "
                "weights_only=True), or go on from the newest checkpoint"
            )
        if not self._has_stages:
            state: dict[str, Any] = own(optimizer)
            return state
        (self.flush_own if self._writes_parts else self.flush)()
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [p for p in self._session.with_state if id(p) in held]
        if self._writes_parts:
            return ckpt.owned_state(optimizer, mine, self._session.assembly)
        return ckpt.whole_state(optimizer, mine, self._session.assembly)

    @property
    def with_state(self) -> Sequence[nn.Parameter] | None:
        return self._session.with_state if self._has_stages else None

    def delayed_state(self) -> dict[str, Any] | None:
        """Return what else a checkpoint needs, if anything, to go on with the same bits.

        It is whole on worker 0, and this worker's part elsewhere; or that for each.
        """
        state = self._part_of_delayed_state()
        if state is None or self._writes_parts:
            return state
        return ckpt.merged(state, self._session.assembly)

    def _part_of_delayed_state(self) -> dict[str, Any] | None:
        session = self._session
        state = session.state()
        if state is None or session.plan is None:
            return None
        feedback = self._feedback.state(session.named())
        used = {
            "format": ckpt.FORMAT,
            "plan": ckpt.numbers(session.plan),
            "starts": list(session.starts or ()),
        }
        scales = {} if self._scaling is None else {"scales": self._scaling.state()}
        kept = compression.state_of(self._codes)
        kept |= compression.left_of(self._weights, session.named())
        return used | state | {"feedback": feedback} | kept | scales | self._positions()

    def _positions(self) -> dict[str, Any]:
        """Return which batches come next, in which order, and what hooks draw on this rank."""
        loaders, generators = dict[str, Any](), dict[str, Any]()
        if self._loaders is not None and self._input_rank == self._trainer.global_rank:
            loaders[str(self._replica)] = self._loaders.state()
        elif self._loaders is not None:  # which has those of its generators as well
            generators[str(self._trainer.global_rank)] = self._loaders.now()
        return {"loaders": loaders, "generators": generators}

    @property
    def _input_rank(self) -> int:
        """Return the rank whose loader gives the batches that this worker computes with."""
        return self._trainer.global_rank

    @property
    def _replica(self) -> int:
        """Return which of the ranks with loaders of their own gives this worker its batches."""
        return self._input_rank // self._workers_per_loader

    @property
    def _workers_per_loader(self) -> int:
        return 1

    def resume(self, saved: Mapping[str, Any] | None) -> bool:
        """Go on from weights that were loaded, and from the delayed state beside them.

        Returns:
            Whether training goes on with the same bits.
        """
        fits = saved is not None and ckpt.fits(saved, self._plan)
        if saved is not None and not fits:
            ckpt.warn_of_other_plan(saved, self._plan.weights)
        if self._loaders is not None:
            self._put_positions(self._loaders, saved or {})
        goes_on = self._session.resume(saved, fits=fits)
        state = saved if saved is not None and goes_on else {}
        self._feedback.put_state(
            state.get("feedback", {}), self._session.named() if goes_on else {}
        )
        compression.put_state(self._codes, saved or {}, self._options.encoders)
        compression.put_left(self._weights, state, self._session.named() if goes_on else {})
        if self._scaling is not None:  # else it goes on from what the scaler itself has loaded
            self._scaling.put_state(state.get("scales") or {})
        return goes_on

    def _put_positions(self, mine: LoaderPosition, saved: Mapping[str, Any]) -> None:
        loaders, generators = saved.get("loaders", {}), saved.get("generators", {})
        rank, num_ranks = self._trainer.global_rank, self._trainer.world_size
        num_loaders, num_then = num_ranks // self._workers_per_loader, len(loaders)
        if num_then != num_loaders:
            lacks = f"by {num_then} ranks with loaders of their own; this run has {num_loaders}"
            mine.put_state(None, lacks if loaders else "")
            return
        position = loaders[str(self._replica)]
        if num_then + len(generators) == num_ranks:
            position = position | {"now": generators.get(str(rank), position["now"])}
        else:
            then = num_then + len(generators)
            rank_zero_info(
                f"The checkpoint has the random states of {then} ranks, and this run has "
                f"{num_ranks}: what hooks draw is not what they would have drawn there"
            )
        mine.put_state(position)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        self._closed = True
        for name in ("clip_grad_by_norm", "post_backward"):
            self._trainer.precision_plugin.__dict__.pop(name, None)
        if self._signals is not None:
            self._signals.end()
        if self._loaders is not None:
            self._loaders.close()


def start_alike(module: nn.Module, assembly: Assembly) -> None:
    """Give all workers worker 0's weights; all must call it.

    Raises:
        ConfigurationError: on every worker, where modules differ in more than values.
    """
    require_same_module(module, assembly, TO_START)
    # of what is absent each makes what it needs, alike
    tensors = (x for x in (*module.parameters(), *module.buffers()) if not is_absent(x))
    assembly.copy_first(tensors, TO_START)


def agreed_seed(assembly: Assembly) -> int:
    return assembly.ask_first(lambda: torch.initial_seed() % 2**63, TO_START)


def epoch_ends(trainer: Trainer) -> bool:
    """Say whether no batch is to follow the one under way, in this epoch or at all."""
    loop = trainer.fit_loop.epoch_loop
    return bool(
        loop.batch_progress.is_last_batch
        or loop.batch_idx + 1 >= trainer.num_training_batches
        or trainer.global_step + 1 >= trainer.max_steps > 0
    )
