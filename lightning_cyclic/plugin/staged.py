"""What all trainings of pipelines have in common behind Lightning's hooks.

    PipelinedTraining   a flush between steps (pipelines.py)
    FlowingTraining     none: steps flow into each other (flowing.py)

validation, ...   the forward of the whole batch, stage by stage; outputs and logs everywhere
state dicts       whole, put together from the workers' parts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin import checkpoint as ckpt
from lightning_cyclic.plugin.checks import check_optimizers, check_pipeline
from lightning_cyclic.plugin.late_gradients import Compensation
from lightning_cyclic.plugin.metrics import SharedMetrics
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.pipeline_session import (
    CutFinder,
    join_workers,
    make_session,
    state_per_param,
)
from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.plugin.stop_signal import (
    StopBoard,
    replace_stop_broadcast,
    restore_stop_broadcast,
)
from lightning_cyclic.plugin.summaries import Summaries
from lightning_cyclic.plugin.training import AbstractTraining, Own
from lightning_cyclic.runtime.partial_step.config import StagewiseConfig
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.transport import CountingTransport


class StagedTraining(AbstractTraining):
    """Evaluate, save and load a module whose stages are apart.

    Args:
        trainer: whose loops call, set up but for this.
        options: what the user chose.
        plan: with as many stages as are expected.
        reductions: refuses meetings inside steps.
    """

    def __init__(
        self, trainer: Trainer, options: Options, plan: Plan, reductions: HeldReductions
    ) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            check_optimizers(trainer.optimizers)
        self._trainer = trainer
        self._options = options
        self._plan = plan
        self._reductions = reductions
        self._closed = False
        self._compensation = Compensation(options)
        kept = state_per_param(trainer.optimizers) if fitting else None
        self._finder = CutFinder(options, kept)
        self._transport, group = join_workers(trainer, options)
        self._session = session = make_session(
            trainer, options, plan, self._finder, self._transport, group, self._configured
        )
        self._summaries = Summaries(self._module, session, reductions)
        self._metrics = SharedMetrics(trainer, self._module, session)
        self._stop = None if group is None else StopBoard(f"cyclic/stop/{group.group_name}")
        if fitting and self._stop is not None:
            stop = self._stop
            replace_stop_broadcast(trainer, stop, lambda: stop.agreed)
        # on the instance: the module's own configure_gradient_clipping still leads here
        vars(trainer.precision_plugin)["clip_grad_by_norm"] = self._clip

    def _configured(self, config: StagewiseConfig) -> StagewiseConfig:
        """Return a session's configuration with what this training adds."""
        return config

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        """Stand in for the precision plugin's method."""
        raise NotImplementedError

    @override
    @staticmethod
    def check(trainer: Trainer, *, sync_batchnorm: bool) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        check_pipeline(
            trainer, trainer.lightning_module, fitting=fitting, sync_batchnorm=sync_batchnorm
        )

    @property
    def _module(self) -> LightningModule:
        return self._trainer.lightning_module

    # ------------------------------------------------------------------ what users ask

    @property
    @override
    def plan(self) -> Plan | None:
        return self._session.plan

    @property
    @override
    def stage_of(self) -> dict[str, int] | None:
        cuts = self._session.cuts
        if cuts is None:
            return None
        return {n: j for j, names in enumerate(cuts.parameters) for n in names}

    @property
    @override
    def transport(self) -> CountingTransport | None:
        return self._transport

    @override
    def report(self) -> str:
        return self._finder.report(self._session.cuts) or super().report()

    def _asked(self) -> bool:
        return self._stop is not None and self._stop.look()

    # ------------------------------------------------------------------ evaluation

    @override
    def validation_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step, stage by stage once the stages are apart."""
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        if fitting and self._session.cuts is None:  # no step yet: the module is whole everywhere
            return self._summaries.tell_whole(lambda: own(*args, **kwargs))
        return self._evaluate("validation_step", "val_step_context", *positional(args, kwargs))

    @override
    def test_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", "test_step_context", *positional(args, kwargs))

    @override
    def predict_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", "predict_step_context", *positional(args, kwargs))

    def _evaluate(self, kind: str, context: str, batch: Any, *rest: Any) -> Any:
        """Run a step of evaluation on the whole batch; the output everywhere."""
        session = self._session
        call = self._caller(kind, context, rest)
        with self._summaries.held():
            session.find_stages(batch, call, whole=True)
            summary = session.evaluate(kind, batch, call, self._summaries.of_output)
        return self._summaries.tell_output(summary)

    def _caller(self, kind: str, context: str, rest: Sequence[Any]) -> Callable[[Any], Any]:
        """Return what runs the user's step on a batch, in the precision plugin's context."""
        step = getattr(self._module, kind)
        make_context = getattr(self._trainer.precision_plugin, context)

        def call(batch: Any) -> Any:
            with make_context():
                return step(batch, *rest)

        return call

    # ------------------------------------------------------------------ all replicas together

    @override
    def reduce(self, own: Own, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce over replicas; the workers of one have the same value."""
        self._reductions.check_meeting("a reduction")
        return self._over_replicas(tensor, reduce_op)

    @override
    def reduce_boolean_decision(self, own: Own, decision: bool, all: bool) -> bool:
        """Decide by all (or any) replicas' decisions."""
        device = self._trainer.strategy.root_device
        agreed = self._over_replicas(torch.tensor(int(decision), device=device), "sum")
        return bool(agreed == self._options.width) if all else bool(agreed > 0)

    def _over_replicas(self, tensor: Any, reduce_op: Any) -> Any:
        if self._options.width == 1 or not isinstance(tensor, Tensor):
            return tensor
        return self._session.reduce(tensor, str(reduce_op or "mean").lower())

    @override
    def end_epoch(self) -> None:
        self._metrics.share()

    @override
    def fail(self, text: str) -> None:
        self._session.fail(text)

    # ------------------------------------------------------------------ checkpoints

    @property
    def _has_stages(self) -> bool:
        """Say whether the stages are known, and each worker has optimized its own."""
        return self._session.cuts is not None and not self._session.failed

    @property
    def _is_apart(self) -> bool:
        """Say whether the stages are known, and each worker has its own alone."""
        return self._has_stages and not self._closed

    @override
    def lightning_module_state_dict(self, own: Own) -> dict[str, Any]:
        """Return the whole weights under the names of ``module.state_dict()``."""
        if not self._is_apart or self._session.group is None:
            return super().lightning_module_state_dict(own)
        return ckpt.whole_state(self._module, self._session.gather())

    @override
    def optimizer_state(self, own: Own, optimizer: Optimizer) -> dict[str, Any]:
        if not self._has_stages:
            return super().optimizer_state(own, optimizer)
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [p for p in self._session.with_state if id(p) in held]
        return ckpt.gather_optimizer_state(optimizer, mine, self._session.group)

    @override
    def delayed_state(self) -> dict[str, Any] | None:
        plan = self.plan
        if plan is None:
            return None
        mine = self._compensation.state(self._session.holdings.named())
        state = ckpt.stagewise_state(plan, self._session)
        return state | {"feedback": ckpt.merged(mine, self._session.group)}

    @override
    def load_model_state_dict(
        self, own: Own, checkpoint: Mapping[str, Any], *, strict: bool
    ) -> None:
        """Load whole weights; each worker keeps those of its stages."""
        with self._session.whole():
            own(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, own: Own, checkpoint: Mapping[str, Any]) -> None:
        """Load the whole optimizer state; each worker keeps the part that it owns."""
        own(checkpoint)
        if self._is_apart:
            ckpt.keep_owned_state(self._trainer.optimizers[0], self._session.with_state)

    @override
    def resume(self, saved: Mapping[str, Any] | None) -> bool:
        """Go on with the stages and the step of a checkpoint that this plan has written."""
        session = self._session
        if saved is not None and "cuts" in saved:
            fits = ckpt.fits(saved, self._plan)
            begins_anew = not fits and self._plan.weights != "sync"
            if begins_anew:  # versions that its first forwards would read were never made
                rank_zero_warn(
                    f"The checkpoint was written under {saved['plan']}; this run has another plan "
                    "and goes on from its newest weights: its weight rule begins as at step 0."
                )
            session.resume_at(0 if begins_anew else saved["t"])
            session.config = replace(session.config, seed=saved["seed"])
            if session.cuts is None and fits:
                session.begin(Cuts.from_data(saved["cuts"]))
                session.put_previous(saved["previous"])
                named = session.holdings.named()
                self._compensation.put_state(saved.get("feedback", {}), named)
        return True

    # ------------------------------------------------------------------ the end

    @override
    def close(self) -> None:
        """Give every worker the whole weights again."""
        if not self._closed:
            self._closed = True
            if not self._session.failed:
                self._session.restore_whole()
            self._session.close()
            self._metrics.release()
        self._trainer.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        restore_stop_broadcast(self._trainer)


def positional(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a step's arguments as Lightning gives them: the batch first."""
    return (*args, *kwargs.values())
