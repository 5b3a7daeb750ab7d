"""Training of pipelines with a flush behind Lightning's hooks: all of a step runs inside it.

training_step     share the batch, cut it, run the program; log once; return a surrogate of the
                  loss, whose backward puts the gradients of the whole batch into ``p.grad``
optimizer_step    Lightning's own; then send on what it changed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.compat import ClosureResult, Trainer
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.checks import scaler_of
from lightning_cyclic.plugin.clipping import clip_mode, clip_stages, may_clip_by_norm
from lightning_cyclic.plugin.hooks import Closure, Own
from lightning_cyclic.plugin.optimizers import Written, check_parted, closure_called
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.pipeline import PipelineTraining
from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.plugin.step_arguments import StepArguments
from lightning_cyclic.plugin.surrogate_loss import Surrogates
from lightning_cyclic.runtime.late_values import LateValues
from lightning_cyclic.runtime.loss_scaling import State, put_state, state_behind, state_of
from lightning_cyclic.runtime.partial_step.config import Share, StagewiseConfig, Summarise
from lightning_cyclic.runtime.partial_step.session import StagewiseSession


@final
class SharedScaler:
    """Scale losses on all ranks alike.

    Lightning takes the scale out of a rank's gradients, runs hooks, clips, and has the scaler
    step, which looks at what the rank has found. Before it does, ranks tell each other the norms
    of their gradients, as they do for clipping; a rank whose gradients overflowed tells infinite
    ones.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._state: State = (1.0, 0)  # of the step under way
        self._put: tuple[int, int] | None = None  # what the scaler held then

    def get_scale(self) -> float:
        return self._state[0]

    def scaled(self, t: int, share: Share) -> Share:
        """Return the share of a micro-batch in the loss of step ``t``, times its scale."""
        if self._put is None or self._put != self._holding():  # it is the first, or was loaded
            self._state = state_of(self._scaler)
            self._put = self._holding()
        scale = self.get_scale()
        return lambda ones: share(ones) * scale

    def _holding(self) -> tuple[int, int]:
        scale = self._scaler._scale  # None before it has scaled anything
        return (id(scale), -1 if scale is None else scale._version)

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """Say whether the scaler has found gradients of this rank that are not finite."""
        found = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(bool(x) for x in found.values())

    @contextmanager
    def deciding(self, session: StagewiseSession) -> Iterator[None]:
        """Let the scaler step as all ranks decide, while the body runs an update."""
        step = self._scaler.step

        def stepped(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            states = self._scaler._per_optimizer_states[id(optimizer)]
            if states["stage"].name == "READY":  # else Lightning has, as hooks are to see them so
                self._scaler.unscale_(optimizer)
            overflowed = self.has_overflowed(optimizer)
            finite = session.updates.all_finite(
                session.t, overflowed=overflowed, alone=session.num_workers == 1
            )
            found = torch.full((), float(not finite), device=session.device)
            states["found_inf_per_device"] = {session.device: found}
            return step(optimizer, *args, **kwargs)

        vars(self._scaler)["step"] = stepped
        try:
            yield
        finally:
            del vars(self._scaler)["step"]

    def end_step(self, session: StagewiseSession) -> None:
        if session.updates.was_finite is not None:  # else there was no loss, and no update
            self._state = state_behind(self._scaler, self._state, session.updates.was_finite)
            put_state(self._scaler, self._state)
            self._put = self._holding()


@final
class SynchronousPipelineTraining(PipelineTraining):
    """Train a module whose stages are apart, one step after the other."""

    def __init__(
        self, trainer: Trainer, options: Options, plan: Plan, reductions: HeldReductions
    ) -> None:
        scaler = scaler_of(trainer)
        self._scaler = SharedScaler(scaler) if scaler else None
        clips = clip_mode(trainer, plan, options.clip_norm) == "global" and may_clip_by_norm(
            trainer
        )
        if scaler or clips:
            norms = "all" if scaler else "owners"
            options, plan = replace(options, norms=norms), replace(plan, norms=norms)
        super().__init__(trainer, options, plan, reductions)
        self._surrogates = Surrogates(trainer, self._scaler and self._scaler.get_scale)
        self._summaries.refuses_overflow = self._scaler is None
        self._stops = LateValues()

    @override
    def _configured(self, config: StagewiseConfig) -> StagewiseConfig:
        config = super()._configured(config)
        return replace(config, scaled=self._scaler and self._scaler.scaled)

    @override
    def training_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        self._follow_freezing()
        session, given = self._session, StepArguments(args, kwargs)
        if self._stop is not None:
            self._stop.tell()
        call = self._caller("training_step", "train_step_context", given)
        if self._options.is_one_stage:
            call = partial(_checked_by_lightning, call)

        def summarise(sizes: list[int]) -> Summarise:
            return lambda outcomes: self._summaries.of_step(outcomes, sizes, stops=self._asked())

        with self._summaries.held():
            session.find_stages(given.batch, call)
        self._tell_stages()
        trained = list(map(self._forms.trained, session.ownership.own))
        with self._surrogates.collecting(trained), self._summaries.held():
            session.train(
                given.batch,
                call,
                summarise,
                accumulate=self._surrogates.batches_per_update,
                is_last=not self._accumulating,
                is_first=self._surrogates.starts,
                expect=self._summaries.expect,
            )
        ((_, summary),) = session.take_arrived()
        told = self._summaries.read_step(summary)
        if session.verifier.is_comparing:
            session.verifier.finish(self._summaries.prints(told))
        if told.loss is None:
            self._summaries.log(told.records)
            return None
        loss = self._agree(told.loss, stops=bool(told.stops))
        self._summaries.log(told.records)
        surrogate = self._surrogates.stand_for(loss)
        return {"loss": surrogate, **told.returned} if told.returned else surrogate

    def _agree(self, loss: Tensor, *, stops: bool) -> Tensor:
        """Return the mean loss of all replicas, and let all stop if one of them does."""
        if self._stop is not None and self._options.replicas > 1:
            said = torch.stack([loss, loss.new_full((), float(stops))])
            loss, share = self._over_replicas(said, "mean")
            self._stops.put(share, self._note_stops)  # all workers see that of the same step
        elif self._stop is not None:
            self._stop.agreed = stops
        return loss

    def _note_stops(self, share: float) -> None:
        assert self._stop is not None
        self._stop.agreed = share > 0

    @override
    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Closure, model: Any = None, **kwargs: Any
    ) -> Any:
        late = ExitStack()
        written: list[Written] = []

        def closed() -> Any:
            if written and self._plan.weights != "sync":
                raise closure_called(self._trainer.optimizers[0], self._plan.preset)
            output = closure()
            self._session.updates.begin()  # behind it the next version may be made in place
            late.enter_context(self._corrected())
            if self._session.cuts is not None:
                trained = self._trainer.optimizers[0]
                check_parted(trained, self._session.with_state, self._plan.preset)
                written.append(Written(trained))
            return output

        with late:
            if self._scaler is not None:
                late.enter_context(self._scaler.deciding(self._session))
            output = own(optimizer, closed, model, **kwargs)
        if self._session.cuts is not None:  # else the update came without a step
            for w in written:
                w.find()
            self._session.end_step()
            if self._scaler is not None:
                self._scaler.end_step(self._session)
        return output

    def _corrected(self) -> AbstractContextManager[None]:
        plan, ownership = self.plan, self._session.ownership
        assert plan is not None
        stages = {j: self._session.trained_of(j) for j in ownership.stages}
        return self._feedback.corrected(plan, stages)

    @override
    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        by_stage = clip_mode(self._trainer, self._plan, self._options.clip_norm) == "stage"
        overflowed = self._scaler is not None and self._scaler.has_overflowed(optimizer)
        clip_stages(self._session, optimizer, clip_val, by_stage=by_stage, overflowed=overflowed)


def _checked_by_lightning(call: Callable[[Any], Any], batch: Any) -> Any:
    """Run a step whose output nobody waits for: what it may return is for Lightning to say."""
    output = call(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        ClosureResult.from_training_step_output(output)
    return output
