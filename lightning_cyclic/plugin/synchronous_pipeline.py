"""Training of pipelines with a flush behind Lightning's hooks: all of a step runs inside it.

training_step     share the batch, cut it, run the program; log once; return a surrogate of the
                  loss, whose backward puts the gradients of the whole batch into ``p.grad``
optimizer_step    the closure and the update, within the optimizer's step; then send on what it
                  changed. Where optimizer state comes and goes, a step for each stage, when the
                  program has its update
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.compat import Trainer
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.hooks import Closure, Own
from lightning_cyclic.plugin.optimizers import closure_called
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.pipeline import PipelineTraining, with_loss
from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.plugin.step_arguments import StepArguments
from lightning_cyclic.plugin.surrogate_loss import Surrogates
from lightning_cyclic.plugin.updates import Stages
from lightning_cyclic.runtime.late_values import LateValues


@final
class SynchronousPipelineTraining(PipelineTraining):
    """Train a module whose stages are apart, one step after the other."""

    _lag = None

    def __init__(
        self, trainer: Trainer, options: Options, plan: Plan, reductions: HeldReductions
    ) -> None:
        super().__init__(trainer, options, plan, reductions)
        self._surrogates = Surrogates(trainer, self._scaling and self._scale)
        self._stops = LateValues()
        self._has_loss = False

    def _scale(self) -> float:
        assert self._scaling is not None
        return self._scaling.scale_of(self._the_plan, self._session.t)

    @property
    @override
    def _stays_whole(self) -> bool:
        return self._session.num_workers == 1

    @property
    @override
    def updated_parameters(self) -> Sequence[nn.Parameter]:
        return list(self._session.named().values())

    @override
    def training_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        session, given = self._session, StepArguments(args, kwargs)
        step = self._begin_step(given)
        trained = list(map(self._forms.trained, session.own.ownership.own))
        with self._surrogates.collecting(trained), self._summaries.held():
            session.train(
                given.batch,
                step,
                self._summarise,
                accumulate=self._surrogates.batches_per_update,
                is_last=not self._accumulating,
                is_first=self._surrogates.starts,
                expect=self._summaries.expect,
            )
        ((_, summary),) = session.take_arrived()
        told = self._summaries.read_step(summary)
        self._compare(told)
        self._has_loss = told.loss is not None
        loss = None if told.loss is None else self._agree(told.loss, stops=bool(told.stops))
        self._summaries.log(told.records)
        return None if loss is None else with_loss(self._surrogates.stand_for(loss), told)

    @override
    def pre_backward(self, own: Own, closure_loss: Tensor) -> None:
        self._updates.expect_groups()
        own(closure_loss)

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
        session, made = self._session, list[Stages]()
        with ExitStack() as update:

            def closed() -> Any:
                if made and self._plan.weights != "sync":
                    raise closure_called(self._trainer.optimizers[0], self._plan.preset)
                output = closure()
                if session.cuts is not None:
                    session.updates.begin()  # the next version may be made in place behind it
                owned = self._owned
                updated = update.enter_context(self._updates.making(session.t, owned))
                if len(updated) == len(owned):  # else gradients overflowed
                    made.append(updated)
                return output

            if session.moves_state:
                output = closed()
                self._step_apart(output, made, kwargs)
            elif self._scaling is None:
                output = optimizer.step(closure=closed, **kwargs)
            elif (output := closed()) is not None and made:  # as Lightning does
                optimizer.step(**kwargs)
        if session.cuts is not None:  # else the update came without a step
            session.end_step()
            if self._scaling is not None:
                self._scaling.catch_up(session.t)
        return output

    def _step_apart(self, output: Any, made: Sequence[Stages], kwargs: dict[str, Any]) -> None:
        """Call the optimizer for each stage, while its state is in memory."""
        is_left_out = self._scaling is not None and output is None  # as by Lightning
        for updated in () if is_left_out or self._session.cuts is None else made:
            self._session.updates.make(self._updates.stepping(updated, kwargs))

    @property
    def _owned(self) -> Sequence[int]:
        """Return the stages whose sums of gradients are here: those of other replicas are not."""
        session = self._session
        if session.cuts is None:
            return ()
        self._keep_owned_state()
        return [
            j for j in session.own.ownership.stages if self._the_plan.owner(j) == session.worker
        ]

    # ------------------------------------------------------------------ gradients

    @override
    def total_norm(self, t: int, order: Sequence[nn.Parameter]) -> Tensor:
        session = self._session
        if not session.own.updated:  # a replica whose gradients have gone to another
            return torch.zeros(())
        session.updates.tell_norms(session.t, overflowed=self._has_overflowed)
        return session.updates.norms.total(session.t, order)

    @override
    def overflowed(self, t: int, stages: Stages) -> Collection[int]:
        own = super().overflowed(t, stages) if self._has_loss else ()
        self._has_overflowed = bool(own)
        return own

    @override
    def skipped(self, t: int, stages: Sequence[int], own: Collection[int]) -> Collection[int]:
        if self._scaling is None or not self._has_loss:
            return ()
        session = self._session
        is_finite = session.updates.all_finite(session.t, overflowed=bool(own))
        return () if is_finite else stages

    @override
    def _was_finite(self, t: int) -> bool | None:
        return self._session.updates.was_finite
