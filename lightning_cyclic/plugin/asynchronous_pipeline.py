"""Training of pipelines without a flush: the update of a step may come with a later batch.

training_step     share the batch, cut it, do what the program has before the next batch
optimizer_step    remember lr & co., then the closure; the program updates when it is due
validation, ...   flush first

Workers ahead of the last stage are told of a step later, with the next ones. Rank 0 has the last
stage, and so, where that is all it has, every value at once; with more stages it begins the next
step before it ends one. At the end of an epoch all have been told everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.compat import EarlyStopping, ModelCheckpoint, Trainer, rank_zero_warn
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.checks import check_no_exchange
from lightning_cyclic.plugin.hooks import Closure, Own
from lightning_cyclic.plugin.optimizers import Values
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.pipeline import PipelineTraining, with_loss
from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.plugin.step_arguments import StepArguments
from lightning_cyclic.plugin.summaries import StepOutcome
from lightning_cyclic.plugin.surrogate_loss import stand_in
from lightning_cyclic.plugin.training import epoch_ends
from lightning_cyclic.plugin.updates import Stages
from lightning_cyclic.plugin.weight_guard import WeightGuard
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.gradient_store import Gradients
from lightning_cyclic.runtime.partial_step.config import StagewiseConfig
from lightning_cyclic.runtime.predict import Predictor


def check_monitors(trainer: Trainer, preset: str, *, validates: bool) -> None:
    """Refuse what decides within an epoch by metrics of its steps.

    A rank learns what a step has logged when the pipeline tells it, which may be in a later step.
    What decides by such a metric decides otherwise on each rank, and they would wait for each
    other.

    Args:
        trainer: whose training has logged something.
        preset: name of the plan, for errors.
        validates: whether validation is to begin within the epoch, behind which more decide.

    Raises:
        ConfigurationError: with the callback or scheduler, and its metric.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    of_steps = [r for r in results.values() if r.meta.on_step]
    names = {x for r in of_steps for x in results._forked_name(r, on_step=True)}
    found: dict[str, Any] = {
        type(callback).__name__: callback.monitor
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if _decides(callback, trainer, validates=validates)
    }
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == "step":
            found[type(config.scheduler).__name__] = config.monitor
    for what, monitor in found.items():
        if monitor in names:
            raise ConfigurationError(
                f"{what} decides within an epoch by {monitor!r}, a metric of the steps of "
                f"training, but under preset {preset!r} ranks learn it at different times, and "
                "would decide otherwise; allowed: metrics that validation logs, and metrics of "
                "training at the end of an epoch; monitor one of validation, decide at the end "
                "of epochs (ModelCheckpoint(save_on_train_epoch_end=True), "
                "EarlyStopping(check_on_train_epoch_end=True), 'interval': 'epoch' of a "
                "scheduler), or use strategy='1f1b'"
            )


def _decides(callback: Any, trainer: Trainer, *, validates: bool) -> bool:
    if isinstance(callback, EarlyStopping):
        return validates and not callback._check_on_train_epoch_end
    if not isinstance(callback, ModelCheckpoint):
        return False
    if callback._every_n_train_steps >= 1 or callback._train_time_interval is not None:
        return True
    return validates and not callback._should_save_on_train_epoch_end(trainer)


def require_same_stop(trainer: Trainer, assembly: Assembly, what: str) -> None:
    """Refuse that some ranks end training where others go on; all must call it.

    Args:
        assembly: all ranks.
        what: they come together for.

    Raises:
        ConfigurationError: on every rank, with those that stop.
    """
    told = assembly.share(trainer.should_stop, what)
    stops = [r for r, stop in enumerate(told) if stop]
    if stops and len(stops) < len(told):
        others = [r for r in range(len(told)) if r not in stops]
        raise ConfigurationError(
            f"trainer.should_stop is set on {_ranks(stops)}, and not on {_ranks(others)}; "
            "allowed: the same on every rank; set it by what all ranks know alike: metrics of "
            "validation, or of training at the end of an epoch"
        )


def stopping(trainer: Trainer) -> str:
    """Say what all ranks come together for where this one ends training within an epoch."""
    return (
        f"to stop training as rank {trainer.global_rank} does, whose trainer.should_stop is set "
        "(metrics of a step, which ranks learn at different times, may not decide it)"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@final
class AsynchronousPipelineTraining(PipelineTraining):
    """Train a module whose stages are apart, steps flowing into each other."""

    def __init__(
        self, trainer: Trainer, options: Options, plan: Plan, reductions: HeldReductions
    ) -> None:
        check_no_exchange(trainer.optimizers[0], plan.preset)
        self._lag = plan.steps_under_way
        self._predictor = Predictor(lambda: trainer.optimizers[0], self._groups_of, rank_zero_warn)
        self._latest: StepOutcome | None = None
        self._stops_at: int | None = None  # step before which all workers stop
        self._guard = WeightGuard(self._of_stages, plan.preset, lambda: trainer.optimizers[0])
        super().__init__(trainer, options, plan, reductions)

    @override
    def _configured(self, config: StagewiseConfig) -> StagewiseConfig:
        return replace(
            super()._configured(config),
            apply=self._apply,
            unscale=self._scaling and self._unscale,
            guess=self._predictor.guess,
            read_state=self._predictor.read_state,
            write_state=self._predictor.write_state,
        )

    def _of_stages(self) -> dict[str, nn.Parameter]:
        if self._session.cuts is None:
            return {}
        known = self._session.named()
        return {n: p for n, p in self._module.named_parameters() if n in known}

    def _unscale(self, t: int, grads: Gradients) -> None:
        assert self._scaling is not None
        self._scaling.unscale(self._the_plan, t, grads)

    @override
    def total_norm(self, t: int, order: Sequence[nn.Parameter]) -> Tensor:
        return self._session.updates.norms.total(t, order)

    @override
    def overflowed(self, t: int, stages: Stages) -> Collection[int]:
        return ()  # the scale is out of them as soon as they are whole, and their norms tell

    @override
    def skipped(self, t: int, stages: Sequence[int], own: Collection[int]) -> Collection[int]:
        if self._scaling is None:
            return ()
        asked = None if self._options.late_updates else set(stages)  # as all are, or by its own
        return () if self._session.updates.norms.is_finite(t, asked) else stages

    @override
    def _was_finite(self, t: int) -> bool | None:
        return self._session.updates.norms.is_finite(t)

    @override
    @contextmanager
    def changing(self, t: int, stages: Stages) -> Iterator[None]:
        noting: AbstractContextManager[None] = nullcontext()
        if self._options.predicts:  # a prediction repeats the optimizer's own update
            parameters = [p for ps in stages.values() for p in ps]
            noting = self._predictor.noting(parameters, self._groups_of(t))
        with super().changing(t, stages), noting:
            yield

    # ------------------------------------------------------------------ one step

    @override
    def training_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Do what the program has for this batch; return a stand-in of the newest known loss."""
        self._guard.check()
        self._updates.require(self._session.t)
        session, given = self._session, StepArguments(args, kwargs)
        step = self._begin_step(given)
        with self._summaries.held():
            session.train(given.batch, step, self._summarise, expect=self._summaries.expect)
            is_compared = session.verifier.is_comparing
            if self._latest is None or epoch_ends(self._trainer) or is_compared:
                self._finish()  # so that every worker knows a loss
        self._read()
        assert self._latest is not None
        self._compare(self._latest)
        self._guard.note()
        assert self._latest.loss is not None  # a step without one is refused where steps flow
        return with_loss(stand_in(self._latest.loss), self._latest)

    @override
    def _train_others(self) -> None:
        super()._train_others()
        self._guard.forget()

    @override
    def _stops_asked(self) -> int:
        if self._stop is None or not self._asked():
            return 0
        # replicas run ahead of each other by two steps at most, as they read common versions
        apart = 4 if self._options.replicas > 1 else 0
        return self._stop.agree(self._session.t + 1 + self._session.most_late + apart)

    def _read(self) -> None:
        for _, summary in self._session.take_arrived():
            told = self._latest = self._summaries.read_step(summary)
            self._summaries.log(told.records)
            self._stops_at = told.stops or self._stops_at
        if self._stop is not None:
            self._stop.agreed = self._stops_at is not None and self._session.t >= self._stops_at

    @override
    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Closure, model: Any = None, **kwargs: Any
    ) -> Any:
        self._updates.remember(self._session.t, self._trainer.optimizers[0], kwargs)
        with self._updates.unchanged():
            return closure()

    def _groups_of(self, t: int) -> Values:
        return self._updates.groups_of(t)

    def _apply(self, t: int, j: int) -> None:
        self._keep_owned_state()
        self._updates.apply(t, [j])

    # ------------------------------------------------------------------ between steps

    @override
    def end_batch(self) -> None:
        if not self._session.assembly.is_alone:
            check_monitors(self._trainer, self._the_plan.preset, validates=False)

    @override
    def agree_to_stop(self) -> None:
        session, trainer = self._session, self._trainer
        if session.assembly.is_alone or session.failed:
            return
        what = "to go on or to stop together"
        if not epoch_ends(trainer):
            if trainer.validating and session.plan is not None:
                check_monitors(trainer, session.plan.preset, validates=True)
            if trainer.should_stop:  # others may go on, and never come
                what = stopping(trainer)
        require_same_stop(trainer, session.assembly, what)

    @override
    def flush(self) -> None:
        """Finish the steps under way; what they log is logged in the next one."""
        with self._guard.ending() if self._is_apart else nullcontext(), self._summaries.held():
            self._finish()

    def _finish(self) -> None:
        session = self._session
        session.flush()
        if self._scaling is not None and session.cuts is not None and not session.failed:
            self._scaling.catch_up(session.t)

    @override
    def _part_of_delayed_state(self) -> dict[str, Any] | None:
        state = super()._part_of_delayed_state()
        t = self._session.t
        if state is not None and t > 0:
            named = self._session.named()
            state["groups"] = self._updates.groups_of(t - 1)
            state["displacements"] = self._predictor.state(named)
        return state

    @override
    def resume(self, saved: Mapping[str, Any] | None) -> bool:
        goes_on = super().resume(saved)
        self._guard.forget()
        state = saved if saved is not None and "groups" in saved else {}
        if state and goes_on:
            self._updates.put_groups(state["t"] - 1, state["groups"])
        if state and self._session.cuts is not None:  # of the last update, under whichever plan
            self._predictor.put_state(state["displacements"], self._session.named())
        return goes_on

    @override
    def close(self) -> None:
        if not self._closed and not self._session.failed:
            self.flush()
        self._guard.forget()
        super().close()
