"""Replicated training behind Lightning's hooks: each worker runs whole micro-batches.

training_step     session.forward        (the session finds the stages in the first one)
pre_backward      session.backward, up to post_backward
optimizer_step    closure; remember lr & co.; session.end_step -- the update comes later
state dicts       flush first
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.errors import ConfigurationError, StepError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin import checkpoint as ckpt
from lightning_cyclic.plugin.checks import (
    check_no_scaler,
    check_optimizers,
    check_trainer,
    trained_parameters,
)
from lightning_cyclic.plugin.clipping import clip_mode, may_clip_by_norm
from lightning_cyclic.plugin.deferred_update import DeferredUpdates
from lightning_cyclic.plugin.late_gradients import Compensation
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.plugin.stop_signal import replace_stop_broadcast, restore_stop_broadcast
from lightning_cyclic.plugin.training import (
    AbstractTraining,
    Closure,
    Own,
    agreed_seed,
    epoch_ends,
)
from lightning_cyclic.runtime.agreement import require_same_number
from lightning_cyclic.runtime.transport import CountingTransport
from lightning_cyclic.runtime.whole_step.session import Session, SessionConfig


@final
class ReplicatedTraining(AbstractTraining):
    """Train a replica of the module on each worker.

    Args:
        trainer: whose loops call, set up but for this.
        options: what the user chose.
        plan: with as many stages as are expected.
        reductions: are held back inside steps.
    """

    def __init__(
        self, trainer: Trainer, options: Options, plan: Plan, reductions: HeldReductions
    ) -> None:
        self._trainer = trainer
        self._plan = plan
        self._reductions = reductions
        self._accumulating = False
        self._backward = ExitStack()  # open while a backward runs
        self._pruned = False
        check_optimizers(trainer.optimizers)
        parameters = trained_parameters(self._module, trainer.optimizers[0])
        self._parameter_ids = frozenset(map(id, parameters.values()))
        self._seed = agreed_seed()
        clip = clip_mode(trainer, plan, options.clip)
        self._updates = DeferredUpdates(
            trainer, clip, reductions, self._parameters_of, self._total_norm
        )
        self._compensation = Compensation(options)
        if clip == "global" and may_clip_by_norm(trainer) and plan.num_workers > 1:
            options = replace(options, norms="owners")
        config = SessionConfig(
            make_plan=options.plan,
            stages=options.stages,
            seed=self._seed,
            timeout_s=options.timeout_s,
            route=options.transport,
            relay_buffers=options.relay_buffers,
            paced=clip != "global" or plan.weights != "freshest",
            accumulates=_may_accumulate(trainer),
        )
        self._session = session = Session(
            self._module,
            parameters,
            config,
            trainer.global_rank,
            trainer.strategy.root_device,
            self._apply,
        )
        # on the instance: the module's own configure_gradient_clipping still leads here
        vars(trainer.precision_plugin)["clip_grad_by_norm"] = self._updates.clip_grad_by_norm
        replace_stop_broadcast(
            trainer, session, lambda: session.engine is not None and session.engine.stopping
        )

    @override
    @staticmethod
    def check(trainer: Trainer, *, sync_batchnorm: bool) -> None:
        check_trainer(trainer, trainer.lightning_module, sync_batchnorm=sync_batchnorm)
        check_no_scaler(trainer)

    @property
    def _module(self) -> LightningModule:
        return self._trainer.lightning_module

    def _parameters_of(self, j: int) -> Sequence[nn.Parameter]:
        assert self._session.engine is not None
        return self._session.engine.parameters(j)

    def _total_norm(self, t: int, parameters: Sequence[nn.Parameter]) -> Tensor:
        assert self._session.engine is not None
        return self._session.engine.total_norm(t, parameters)

    # ------------------------------------------------------------------ what users ask

    @property
    @override
    def plan(self) -> Plan | None:
        return self._session.engine.plan if self._session.engine is not None else None

    @property
    @override
    def stage_of(self) -> dict[str, int] | None:
        return self._session.stages.stage_of if self._session.stages is not None else None

    @property
    @override
    def transport(self) -> CountingTransport:
        return self._session.transport

    # ------------------------------------------------------------------ one step

    @override
    def training_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step as the forward of this worker's micro-batch."""
        if self._skips_backward():
            return own(*args, **kwargs)
        session = self._session
        batch, last = args[0] if args else kwargs, not self._accumulating
        ends = epoch_ends(self._trainer)
        with session.forward(batch, last=last, ends=ends), self._reductions.held():
            output = own(*args, **kwargs)
            if output is None:
                raise StepError(
                    f"training_step of worker {self._trainer.global_rank} returned None (step "
                    f"{session.t}); allowed: a loss in every step, since other workers wait "
                    "for its gradients; return 0 * loss to skip a batch"
                )
        if last:  # the worker behind begins its window when this one's is over
            self._reductions.run(self._trainer.strategy.reduce)
        return output

    @override
    def reduce(self, own: Own, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce over all workers; what training_step asks for, when its forward is over."""
        if (self._reductions.holding or self._reductions.updating) and isinstance(tensor, Tensor):
            return self._reductions.hold(tensor, group, reduce_op)
        return own(tensor, group, reduce_op)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Begin a backward, in which gradients leave for the sum as their stages complete."""
        last = not self._accumulating
        self._backward = ExitStack()  # an earlier one that failed stays as it was
        self._backward.enter_context(self._session.backward(closure_loss, last=last))

    @override
    def post_backward(self) -> None:
        """Hand over the gradients of stages that the backward did not complete."""
        self._backward.close()

    @override
    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate on this worker: gradients stay in ``p.grad`` until the window closes."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @override
    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Closure, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the closure and leave the update to the program."""
        output = closure()
        self._keep_owned_state()
        self._updates.remember(self._session.t, self._trainer.optimizers[0], kwargs)
        self._session.end_step()
        return output

    def _apply(self, t: int, stages: Sequence[int]) -> None:
        each = {j: self._parameters_of(j) for j in stages}
        plan = self.plan
        assert plan is not None
        with self._compensation.corrected(plan, t, each):
            self._updates.apply(t, stages)

    def _skips_backward(self) -> bool:
        # stochastic weight averaging runs an epoch of forwards alone, for BatchNorm statistics
        return bool(self._trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward)

    # ------------------------------------------------------------------ between steps

    @override
    def flush(self) -> None:
        self._session.flush()

    @override
    def fail(self, text: str) -> None:
        self._session.fail(text)

    @override
    def begin_epoch(self) -> None:
        """Check that every worker has the same number of batches and the same parameters."""
        trainer, session = self._trainer, self._session
        with session.naming_peers("all workers to begin an epoch"):
            require_same_number(
                "numbers of training batches", trainer.num_training_batches, session.group
            )
        now = trained_parameters(self._module, trainer.optimizers[0])
        if frozenset(map(id, now.values())) != self._parameter_ids:
            raise ConfigurationError(
                "the set of trained parameters changed between epochs (a callback froze, unfroze "
                "or replaced some); allowed: the same parameters throughout one fit; unfreeze "
                "before fit, or call fit once per phase"
            )

    # ------------------------------------------------------------------ checkpoints

    @override
    def lightning_module_state_dict(self, own: Own) -> dict[str, Any]:
        state: dict[str, Any] = own()
        if self._trainer.is_global_zero:
            # parameters are views of flat buffers, which torch.save would write whole
            state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        return state

    @override
    def optimizer_state(self, own: Own, optimizer: Optimizer) -> dict[str, Any]:
        if self._session.engine is None or self._session.failed:
            return super().optimizer_state(own, optimizer)
        self.flush()
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        return ckpt.gather_optimizer_state(optimizer, self._owned(), self._session.group)

    @override
    def delayed_state(self) -> dict[str, Any] | None:
        state, stages, plan = self._session.state(), self._session.stages, self.plan
        if state is None or stages is None or plan is None:
            return None
        mine = self._compensation.state(dict(self._module.named_parameters()))
        delayed = ckpt.delayed_state(plan, stages, state, self._seed)
        return delayed | {"feedback": ckpt.merged(mine, self._session.group)}

    @override
    def load_optimizer_state_dict(self, own: Own, checkpoint: Mapping[str, Any]) -> None:
        """Load the whole optimizer state; this worker keeps the part that it owns."""
        own(checkpoint)
        self._pruned = False

    @override
    def resume(self, saved: Mapping[str, Any] | None) -> bool:
        """Go on from a checkpoint; versions in flight give way to what was loaded."""
        if saved is not None and ckpt.fits(saved, self._plan):
            self._session.resume(*ckpt.restored(saved), seed=saved["seed"])
            self._seed = saved["seed"]
            named = dict(self._module.named_parameters())
            self._compensation.put_state(saved.get("feedback", {}), named)
            return True
        if saved is not None:
            rank_zero_warn(
                f"The checkpoint was written under {saved['plan']}; this run has another plan and "
                "goes on from its newest weights, as any strategy would, not with the same bits."
            )
        self._session.restart()
        self._compensation.put_state({}, {})
        return True

    def _keep_owned_state(self) -> None:
        if self._session.engine is not None and not self._pruned:
            ckpt.keep_owned_state(self._trainer.optimizers[0], self._owned())
            self._pruned = True

    def _owned(self) -> list[nn.Parameter]:
        engine = self._session.engine
        assert engine is not None
        return [p for j in engine.owned for p in engine.parameters(j)]

    # ------------------------------------------------------------------ the end

    @override
    def close(self) -> None:
        self._session.close()
        self._trainer.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        restore_stop_broadcast(self._trainer)


def _may_accumulate(trainer: Trainer) -> bool:
    scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks)  # type: ignore[attr-defined]
    return scheduled or trainer.accumulate_grad_batches != 1
