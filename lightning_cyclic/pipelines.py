"""Pipelined training behind Lightning's hooks: what CyclicStrategy does where stages are apart.

training_step     share the batch, cut it, run the program; log once; return a surrogate of the
                  loss, whose backward puts the gradients of the whole batch into ``p.grad``
optimizer_step    Lightning's own; then send on what it changed
validation, ...   the forward of the whole batch, stage by stage; outputs and logs everywhere
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_cyclic.actions import Payload
from lightning_cyclic.errors import StepError
from lightning_cyclic.outputs import decode, encode, further_outputs, weighted_mean
from lightning_cyclic.records import Log, Recorder, from_summary, to_summary
from lightning_cyclic.reductions import HeldReductions
from lightning_cyclic.runtime.stagewise.executor import Outcome
from lightning_cyclic.runtime.stagewise.losses import loss_of
from lightning_cyclic.runtime.stagewise.session import StagewiseSession, Summary
from lightning_cyclic.runtime.stagewise.sideeffects import state_of
from lightning_cyclic.runtime.stagewise.site import is_metric
from lightning_cyclic.stopping import StopBoard

PIPELINE_PAYLOADS = (
    Payload.D, Payload.A, Payload.G, Payload.W, Payload.S, Payload.T, Payload.P, Payload.V,
    Payload.L, Payload.R,
)  # fmt: skip


@final
class PipelinedTraining:
    """Train and evaluate a module whose stages are apart.

    Args:
        trainer: whose loops call.
        module: the user's.
        session: runs the stages.
        reductions: refuses meetings inside steps.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        session: StagewiseSession,
        reductions: HeldReductions,
    ) -> None:
        self.session = session
        self._trainer = trainer
        self._module = module
        self._reductions = reductions
        self._recorder = Recorder(module)
        self._totals: list[tuple[nn.Parameter, Tensor | None, Tensor | None]] = []
        self._metrics = {p: m for p, m in module.named_modules() if is_metric(m)}
        self._closed = False
        group = session.group
        self.stop = None if group is None else StopBoard(f"cyclic/stop/{group.group_name}")
        self._before = _alone(self._metrics.values(), session.config.width)

    # ------------------------------------------------------------------ training

    def training_step(self, context: Callable[[], Any], batch: Any, *rest: Any) -> Any:
        """Run a step, and return the surrogate of its loss.

        Args:
            context: makes the precision plugin's context for one micro-batch.
            batch: the whole batch; further arguments go to the user's step as they are.
            *rest: as Lightning gives them.
        """
        session = self.session
        if self.stop is not None:
            self.stop.tell()
        batch = session.share_batch(batch)
        parts = session.cut(batch)
        call = self._caller("training_step", context, rest)
        with self._held():
            session.find_stages(lambda: call(parts[0].batch))
        starts = self._trainer.fit_loop.epoch_loop.batch_idx % self._accumulate == 0
        own = session.holdings.own
        before = [p.grad for p in own]
        if starts:  # Lightning zeroes gradients only behind this
            for p in own:
                p.grad = None
        sizes = [part.size for part in parts]
        with self._held():
            summary = session.train(
                parts, call, lambda o: self._summarise(o, sizes), self._accumulate
            )
        self._totals = [(p, p.grad, b) for p, b in zip(own, before, strict=True)]
        if starts:
            for p, b in zip(own, before, strict=True):
                p.grad = b
        num, further, logs, stops = summary.facts
        loss, *others = summary.tensors
        loss = self._agree(loss, stops=stops)
        self._recorder.replay(from_summary(others[num:], logs))
        anchor = torch.zeros((), requires_grad=True, device=loss.device)
        surrogate: Tensor = _Deposit.apply(anchor, loss, self._deposit)  # type: ignore[no-untyped-call]
        returned = decode(others[:num], further)
        return {"loss": surrogate, **returned} if returned else surrogate

    @property
    def _accumulate(self) -> int:
        return int(self._trainer.accumulate_grad_batches)

    def _deposit(self, grad: Tensor) -> None:
        """Put the gradients of the window so far into ``p.grad``.

        They are those of the loss divided by ``accumulate_grad_batches``, as Lightning divides;
        code that scales it further (an overridden ``backward``) scales this batch's part.
        """
        factor = float(grad) * self._accumulate
        starts = self._trainer.fit_loop.epoch_loop.batch_idx % self._accumulate == 0
        for p, total, before in self._totals:
            if factor == 1.0 or total is None:
                p.grad = total
            elif starts or before is None:
                p.grad = total * factor
            else:
                p.grad = before + (total - before) * factor
        self._totals = []

    def _summarise(self, outcomes: Sequence[Outcome], sizes: Sequence[int]) -> Summary:
        loss = weighted_mean([loss_of(x.output).detach().reshape(()) for x in outcomes], sizes)
        self._check_finite(loss)
        further, structure = encode(
            further_outputs([x.output for x in outcomes], sizes), "what training_step returned"
        )
        logged, logs = to_summary(self._recorder.combine([x.logs for x in outcomes], sizes))
        stops = self.stop is not None and self.stop.look()
        return Summary([loss, *further, *logged], [len(further), structure, logs, stops])

    def _agree(self, loss: Tensor, *, stops: bool) -> Tensor:
        """Return the mean loss of all replicas, and let all stop if one of them does."""
        if self.stop is not None and self.session.config.width > 1:
            loss, share = self.reduce(torch.stack([loss, loss.new_tensor(stops)]), "mean")
            stops = bool(share > 0)
        if self.stop is not None:
            self.stop.agreed = stops
        return loss

    def _check_finite(self, loss: Tensor) -> None:
        """Look at the value where it is, once a step: the other workers wait for nothing new."""
        value = float(loss)
        if not math.isfinite(value):
            raise StepError(
                f"the loss of worker {self.session.worker} is {value} in step {self.session.t}; "
                "allowed: a finite loss, since every worker would train on the result; lower the "
                "learning rate, clip gradients, or look for the batch with "
                "Trainer(detect_anomaly=True)"
            )

    def end_step(self) -> None:
        """Send on what an update has changed."""
        if self.session.executor is not None:  # else the update came without a step
            self.session.end_step()

    # ------------------------------------------------------------------ all stages together

    @property
    def is_apart(self) -> bool:
        """Say whether the stages are known, and each worker has its own alone."""
        return self.has_stages and not self._closed

    @property
    def has_stages(self) -> bool:
        """Say whether the stages are known, and each worker has optimized its own."""
        return self.session.executor is not None and not self.session.failed

    @property
    def stage_of(self) -> dict[str, int] | None:
        """Return parameter name -> stage, once the stages are known."""
        cuts = self.session.cuts
        if cuts is None:
            return None
        return {n: j for j, names in enumerate(cuts.parameters) for n in names}

    def before_update(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure behind which the next version may be made in place."""

        def closed() -> Any:
            output = closure()
            self.session.begin_update()
            return output

        return closed

    def clip(self, parameters: Sequence[nn.Parameter], clip_val: float, *, by_stage: bool) -> None:
        """Clip gradients by the norm over all stages, as one process that has them all would.

        Args:
            parameters: of the optimizer.
            clip_val: largest norm.
            by_stage: clip each stage by its own norm, as freshest weights do.
        """
        if by_stage:
            for j in range(self.session.holdings.num_stages):
                torch.nn.utils.clip_grad_norm_(self.session.holdings.owned(j), clip_val)
            return
        if self.session.norms is None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)
            return
        if not self.session.owns:  # a replica whose gradients have gone to another
            return
        total = self.session.norms.total_norm(self.session.t, parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, total)

    def reduce(self, tensor: Any, reduce_op: Any) -> Any:
        """Reduce over replicas; the workers of one have the same value."""
        session = self.session
        if session.config.width == 1 or not isinstance(tensor, Tensor):
            return tensor
        return session.reduce(tensor, str(reduce_op or "mean").lower())

    def state_dict(self) -> dict[str, Any]:
        """Return the whole weights under the names of ``module.state_dict()``."""
        state: dict[str, Any] = self._module.state_dict()
        if not self.is_apart or self.session.group is None:
            return state
        whole = self.session.gather()
        by_id = {id(x): n for n, x in _named(self._module)}
        return {
            key: whole[by_id[id(x)]] if id(x) in by_id else x
            for key, x in self._module.state_dict(keep_vars=True).items()
        }

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, kind: str, context: Callable[[], Any], batch: Any, *rest: Any) -> Any:
        """Run ``validation_step``, ``test_step`` or ``predict_step``; the output everywhere."""
        session = self.session
        batch = session.share_batch(batch)
        call = self._caller(kind, context, rest)
        with self._held():
            session.find_stages(lambda: call(batch))
            summary = session.evaluate(kind, batch, call, self._summarise_output)
        num, structure, logs = summary.facts
        self._recorder.replay(from_summary(summary.tensors[num:], logs))
        return decode(summary.tensors[:num], structure)

    def evaluate_whole(self, step: Callable[[], Any]) -> Any:
        """Run a step on the whole module, as before training; log as :meth:`evaluate` does."""
        logs: list[Log] = []
        with self._recorder.holding(lambda *log: logs.append(log)):
            output = step()
        self._recorder.replay(self._recorder.combine([logs], [1]))
        return output

    def _summarise_output(self, outcomes: Sequence[Outcome]) -> Summary:
        (outcome,) = outcomes
        tensors, structure = encode(outcome.output, "the output of a step")
        logged, logs = to_summary(self._recorder.combine([outcome.logs], [1]))
        return Summary([*tensors, *logged], [len(tensors), structure, logs])

    # ------------------------------------------------------------------ the user's step

    def _caller(
        self, kind: str, context: Callable[[], Any], rest: Sequence[Any]
    ) -> Callable[[Any], Any]:
        step = getattr(self._module, kind)

        def call(batch: Any) -> Any:
            with context():
                return step(batch, *rest)

        return call

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._recorder.holding(self._note), self._reductions.held():
            yield

    def _note(self, name: str, value: Any, arguments: dict[str, Any]) -> None:
        executor = self.session.executor
        run = executor.site.run if executor else None
        if run is None:  # the survey, or a metric's own code
            return
        if run.depth and run.target < run.site.num_stages - 1:
            raise StepError(
                f"self.log({name!r}, ...) is called inside a module of stage {run.target}, where "
                "the other workers do not look; allowed: logging in training_step and in the "
                "LightningModule's own forward; return the value and log it there"
            )
        run.logs.append((name, value, arguments))

    # ------------------------------------------------------------------ metrics

    def share_metrics(self) -> None:
        """Bring the states of metrics from the workers that update them to all of a replica."""
        session = self.session
        if session.cuts is None or len(session.replica) == 1:
            return
        for path, stage in sorted(session.cuts.metrics.items()):
            metric = self._metrics[path]
            source = session.worker_of(stage)
            shared = session.share(Payload.L, source, *encode(state_of(metric), path))
            if session.worker != source:
                metric.__dict__.update(decode(shared.tensors, shared.facts))

    def close(self) -> None:
        """Give every worker the whole weights again."""
        if self._closed:
            return
        self._closed = True
        if not self.session.failed:
            self.session.restore_whole()
        self.session.close()
        for metric, attributes in self._before:
            metric.__dict__.update(attributes)


class _Deposit(torch.autograd.Function):
    """Stand for the loss of a batch whose backward has been run."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, deposit: Callable[[Tensor], None]) -> Any:
        ctx.deposit = deposit
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.deposit(grad)
        return None, None, None


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _alone(metrics: Any, width: int) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Keep metrics from adding up the states of stages, which hold the same; return the before."""
    before = []
    for metric in metrics:
        names = ("sync_on_compute", "_to_sync", "dist_sync_on_step")
        before.append((metric, {n: metric.__dict__[n] for n in names if n in metric.__dict__}))
        if width == 1:
            metric.__dict__.update(dict.fromkeys(names, False))
    return before
