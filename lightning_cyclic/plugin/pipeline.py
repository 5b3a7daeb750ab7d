"""What all trainings of pipelines have in common behind Lightning's hooks.

    SynchronousPipelineTraining   a flush between steps (synchronous_pipeline.py)
    AsynchronousPipelineTraining     none: steps flow into each other (asynchronous_pipeline.py)

validation, ...   the whole module on the whole batch, on every worker; stage by stage, with
                  outputs and logs everywhere, where it fits on none
state dicts       whole, put together from the workers' parts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_cyclic.compat import BasePredictionWriter, ClosureResult, Trainer, TrainerFn
from lightning_cyclic.errors import StepError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.clipping import decides_together
from lightning_cyclic.plugin.hooks import Own
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.pipeline_session import (
    CutFinder,
    join_workers,
    make_session,
    tiers_of,
)
from lightning_cyclic.plugin.planned_memory import state_per_param
from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.plugin.step_arguments import StepArguments
from lightning_cyclic.plugin.stop_signal import StopBoard
from lightning_cyclic.plugin.summaries import StepOutcome, Summaries
from lightning_cyclic.plugin.training import AbstractTraining
from lightning_cyclic.runtime.absent import is_absent
from lightning_cyclic.runtime.agreement import require_same_number
from lightning_cyclic.runtime.messages import Message
from lightning_cyclic.runtime.meta import lending
from lightning_cyclic.runtime.partial_step.collectives import rank_of
from lightning_cyclic.runtime.partial_step.config import Share, StagewiseConfig, Summarise
from lightning_cyclic.runtime.partial_step.module_state import state_of
from lightning_cyclic.runtime.partial_step.session import StagewiseSession
from lightning_cyclic.runtime.stages.evidence import is_metric
from lightning_cyclic.runtime.torch_functions import user_line
from lightning_cyclic.runtime.transport import CountingTransport
from lightning_cyclic.runtime.values.plain import decode, encode

Step: TypeAlias = Callable[[Any], Any]  # the user's, on a batch or a part of it

_SYNCING = ("sync_on_compute", "_to_sync", "dist_sync_on_step")
_STORES_METRICS = "_store_dataloader_outputs"  # of evaluation loops: computes, before any hook


@final
class SharedMetrics:
    """Share the states of a module's metrics.

    A metric is an attribute of the whole module, on every worker, but only one worker runs the
    code that updates it. The others are told its state before anybody computes it.
    """

    def __init__(self, trainer: Trainer, module: nn.Module, session: StagewiseSession) -> None:
        self._session = session
        self._loops: tuple[Any, ...] = (
            trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop,
        )  # fmt: skip
        for loop in self._loops:
            setattr(loop, _STORES_METRICS, self._sharing_before(getattr(loop, _STORES_METRICS)))
        self._metrics: dict[str, Any] = {p: m for p, m in module.named_modules() if is_metric(m)}
        self._before = {path: _syncing(metric) for path, metric in self._metrics.items()}
        if (
            session.config.replicas == 1
        ):  # else they would add up states of stages, which are alike
            for metric in self._metrics.values():
                metric.__dict__.update(dict.fromkeys(_SYNCING, False))

    def _sharing_before(self, compute: Callable[[], None]) -> Callable[[], None]:
        def share_and_compute() -> None:
            self.share()
            compute()

        return share_and_compute

    def share(self) -> None:
        session = self._session
        if session.cuts is None or len(session.replica) == 1:
            return
        for path, stage in sorted(session.cuts.metrics.items()):
            metric = self._metrics[path]
            shared = session.share(stage, Message(*encode(state_of(metric), path)))
            if session.worker != session.own.worker_of(stage):
                metric.__dict__.update(decode(shared.tensors, shared.facts))

    def release(self) -> None:
        for loop in self._loops:
            vars(loop).pop(_STORES_METRICS, None)
        for path, attributes in self._before.items():
            self._metrics[path].__dict__.update(attributes)


def _syncing(metric: nn.Module) -> dict[str, Any]:
    return {n: metric.__dict__[n] for n in _SYNCING if n in metric.__dict__}


class PipelineTraining(AbstractTraining):
    """Evaluate, save and load a module whose stages are apart."""

    def __init__(
        self, trainer: Trainer, options: Options, plan: Plan, reductions: HeldReductions
    ) -> None:
        super().__init__(trainer, options, plan, reductions)
        fitting = trainer.state.fn == TrainerFn.FITTING
        kept = 0.0 if fitting else None
        if fitting and options.memory_limit_bytes is not None:  # what nobody else asks for
            kept = state_per_param(trainer.optimizers, self._module.parameters())
        moves = tiers_of(trainer, options) is not None
        self._finder = CutFinder(options, kept, moves_state=moves)
        self._transport = join_workers(trainer, options)
        self._session: StagewiseSession = make_session(
            trainer, self._options, self._plan, self._finder, self._transport, self._configured
        )
        self._summaries = Summaries(self._module, self._session, reductions)
        self._summaries.refuses_overflow = self._scaling is None
        self._metrics = SharedMetrics(trainer, self._module, self._session)
        self._stop = None if self._transport is None else StopBoard(self._session.assembly)
        self._writers = self._quieted_writers()
        if fitting and self._stop is not None:
            stop = self._stop
            self._stop_as(stop, lambda: stop.agreed)

    def _quieted_writers(self) -> list[BasePredictionWriter]:
        """Let one worker of each replica write predictions, which all of its workers have."""
        trainer, num = self._trainer, self._trainer.world_size // self._options.replicas
        if trainer.state.fn != TrainerFn.PREDICTING or trainer.global_rank % num == 0:
            return []
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        writers = [c for c in callbacks if isinstance(c, BasePredictionWriter)]
        for writer in writers:
            vars(writer).update(dict.fromkeys(_WRITES, _write_nothing))
        return writers

    def _configured(self, config: StagewiseConfig) -> StagewiseConfig:
        return replace(
            config, forms=self._forms, codes=self._codes,
            scaled=self._scaling and self._scaled,
        )  # fmt: skip

    def _scaled(self, t: int, share: Share) -> Share:
        assert self._scaling is not None
        return self._scaling.scaled(self._the_plan, t, share)

    @property
    def _the_plan(self) -> Plan:
        assert self._session.plan is not None
        return self._session.plan

    @override
    def _telling_norms(self, options: Options, plan: Plan) -> tuple[Options, Plan]:
        told: dict[str, Any] = {
            "late_updates": decides_together(plan),
            "norms": "owners" if self._scaling is None else "all",
        }
        return replace(options, **told), replace(plan, **told)

    @override
    def parameters_of(self, j: int) -> Sequence[nn.Parameter]:
        return self._session.own.trained_of(j)

    # ------------------------------------------------------------------ what users ask

    @property
    @override
    def transport(self) -> CountingTransport | None:
        return self._transport

    @override
    def _kept_by_stages(self) -> list[tuple[int, int]] | None:
        found, plan = self._finder.loads(self._session.cuts), self._session.plan
        if found is None or plan is None:
            return None
        homes = [plan.worker_of(0, j) for j in range(plan.num_stages)]
        stay = not (self._options.runs_again or plan.offloads)  # else they count as received
        adopted = [  # by the stage behind it, from a stage on the same worker
            behind.adopted_bytes if stay and home == next_home else 0
            for behind, (home, next_home) in zip(found[1:], pairwise(homes), strict=True)
        ]
        return [
            (load.activation_bytes + more, load.crossing_bytes)
            for load, more in zip(found, [*adopted, 0], strict=True)
        ]

    @override
    def report(self) -> str | None:
        found, cut = self._finder.report(self._session.cuts), self._session.batches.how_cut()
        if found is None and not self._options.is_one_stage:
            return None
        return "\n\n".join(filter(None, (found, cut))) or None

    @property
    @override
    def own_stages(self) -> tuple[int, ...] | None:
        return self._session.own.ownership.stages if self._is_apart else None

    @property
    @override
    def steps_compared(self) -> int:
        return 0 if self._session.cuts is None else self._session.verifier.num_compared

    @property
    @override
    def not_compared(self) -> Sequence[str]:
        return () if self._session.cuts is None else self._session.verifier.not_compared

    @override
    def bring(self) -> None:
        super().bring()
        if self._is_apart:
            self._metrics.share()
            self._session.bring()

    @override
    @contextmanager
    def whole(self) -> Iterator[None]:
        if self._is_apart and self._session.own.foreign.is_running:
            raise StepError(
                f"{user_line()} asks for strategy.whole() in the middle of a step; allowed: "
                "between steps, as in on_train_batch_end, on all ranks; ask there"
            )
        with super().whole():
            yield

    @override
    def _train_others(self) -> None:
        if self._session.cuts is not None:
            self._session.own.train_others()

    # ------------------------------------------------------------------ a training step

    def _begin_step(self, given: StepArguments) -> Step:
        """Find the stages, if need be; return what runs the user's step on a micro-batch."""
        self._follow_freezing()
        self._is_under_way = True
        if self._stop is not None:
            self._stop.tell()
        step = self._caller("training_step", "train_step_context", given)
        if self._options.is_one_stage and self._lag is None:
            step = partial(_checked_by_lightning, step)
        with self._summaries.held():
            self._session.find_stages(given.batch, step)
        self._tell_stages()
        return step

    def _summarise(self, sizes: list[int]) -> Summarise:
        return lambda outcomes: self._summaries.of_step(outcomes, sizes, stops=self._stops_asked())

    def _asked(self) -> bool:
        return self._stop is not None and self._stop.look()

    def _stops_asked(self) -> int:
        """Return what all are told of stopping; see StepOutcome."""
        return self._asked()

    def _compare(self, told: StepOutcome) -> None:
        if self._session.verifier.is_comparing:
            self._session.verifier.finish(self._summaries.prints(told))

    # ------------------------------------------------------------------ evaluation

    def validation_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", "val_step_context", args, kwargs)

    def test_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", "test_step_context", args, kwargs)

    def predict_step(self, own: Own, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", "predict_step_context", args, kwargs)

    def _evaluate(
        self, step: str, context: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        session, given = self._session, StepArguments(args, kwargs)
        call, kind, batch = self._caller(step, context, given), given.kind(step), given.batch
        if session.assembly.is_alone or (session.cuts is None and not self._needs_stages):
            with lending(self._module):
                return self._summaries.tell_whole(lambda: call(batch))
        with self._summaries.held():
            session.find_stages(batch, call, kind)
            done = session.evaluate(kind, batch, call, self._summaries.of_output)
        return (
            self._summaries.tell_whole(done)
            if callable(done)
            else self._summaries.tell_output(done)
        )

    @property
    def _needs_stages(self) -> bool:
        is_fitting = self._trainer.state.fn == TrainerFn.FITTING  # a step of it finds the stages
        return not is_fitting and any(map(is_absent, self._module.parameters()))

    def _caller(self, kind: str, context: str, given: StepArguments) -> Callable[[Any], Any]:
        step = getattr(self._module, kind)
        make_context = getattr(self._trainer.precision_plugin, context)

        def call(batch: Any) -> Any:
            apart = self._reductions.holding  # else each worker runs it whole, all at once
            with make_context(), self._reductions.running(together=not apart):
                return step(*given.around(batch))

        return call

    # ------------------------------------------------------------------ all replicas together

    def reduce(self, own: Own, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        self._reductions.check_meeting("a reduction")
        return self._over_replicas(tensor, reduce_op)

    def reduce_boolean_decision(self, own: Own, decision: bool, all: bool = True) -> bool:
        device = self._trainer.strategy.root_device
        agreed = self._over_replicas(torch.tensor(int(decision), device=device), "sum")
        return bool(agreed == self._options.replicas) if all else bool(agreed > 0)

    def _over_replicas(self, tensor: Any, reduce_op: Any) -> Any:
        if self._options.replicas == 1 or not isinstance(tensor, Tensor):
            return tensor
        return self._session.reduce(tensor, str(reduce_op or "mean").lower())

    @override
    def begin_evaluation(self, what: str, numbers: Sequence[float]) -> None:
        session, trainer = self._session, self._trainer
        size = trainer.world_size // self._options.replicas
        first = trainer.global_rank // size * size
        require_same_number(
            f"numbers of {what} batches",
            [float(n) for n in numbers],
            session.assembly,
            f"to begin {what}",
            range(first, first + size),
        )

    @override
    def end_epoch(self) -> None:
        super().end_epoch()
        self._metrics.share()

    # ------------------------------------------------------------------ checkpoints

    @override
    def _whole_weights(self, own: Own) -> dict[str, Any]:
        self.bring()
        state: dict[str, Any] = own()
        return state

    @override
    def writable(self) -> AbstractContextManager[None]:
        return self._session.writable()

    @property
    @override
    def _input_rank(self) -> int:
        return rank_of(self._session.replica[0], self._workers_per_loader)

    @property
    @override
    def _workers_per_loader(self) -> int:
        return self._trainer.world_size // self._options.replicas

    # ------------------------------------------------------------------ the end

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._session.bring()
            self._session.close()
            self._metrics.release()
            for writer in self._writers:
                for name in _WRITES:
                    vars(writer).pop(name, None)
        super().close()


def with_loss(loss: Tensor, told: StepOutcome) -> Any:
    """Return what Lightning is given of a step: a loss, and what else was returned."""
    return {"loss": loss, **told.returned} if told.returned else loss


def _checked_by_lightning(step: Step, batch: Any) -> Any:
    """Run a step whose output nobody waits for: what it may return is for Lightning to say."""
    output = step(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        ClosureResult.from_training_step_output(output)
    return output


_WRITES = ("write_on_batch_end", "write_on_epoch_end")  # of a BasePredictionWriter


def _write_nothing(*args: Any, **kwargs: Any) -> None: ...
