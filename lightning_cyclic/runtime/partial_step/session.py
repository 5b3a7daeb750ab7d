"""A session of stage-at-a-time training: one worker, from its first step to its last.

first step      survey the module, choose the stages, give up what other workers hold
every step      share the batch (D), run the program, share what came out (L)
between steps   updates, validation, whole weights for a checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import PeerError, StepError, WaitTimeoutError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Payload
from lightning_cyclic.runtime.norms import NormExchange
from lightning_cyclic.runtime.partial_step.chance import undisturbed
from lightning_cyclic.runtime.partial_step.collectives import Collectives
from lightning_cyclic.runtime.partial_step.config import StagewiseConfig
from lightning_cyclic.runtime.partial_step.executor import Executor
from lightning_cyclic.runtime.partial_step.flow import Flow, Summarise, Summary
from lightning_cyclic.runtime.partial_step.holdings import Holdings
from lightning_cyclic.runtime.partial_step.mail import stages_of
from lightning_cyclic.runtime.partial_step.parcels import Parcel
from lightning_cyclic.runtime.partial_step.plans import Plans, flows
from lightning_cyclic.runtime.partial_step.replica import Replica
from lightning_cyclic.runtime.partial_step.side_effects import SideEffects
from lightning_cyclic.runtime.partial_step.site import Site
from lightning_cyclic.runtime.partial_step.stage_step import Micro
from lightning_cyclic.runtime.partial_step.versions import Versions
from lightning_cyclic.runtime.partial_step.weighting import shares_of, whole_share
from lightning_cyclic.runtime.prediction.foresight import Foresight
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.transport import AbstractTransport
from lightning_cyclic.runtime.values.split import MicroBatch, family, signature, split
from lightning_cyclic.runtime.waiting import naming_peers


@final
class StagewiseSession:
    """Run one worker's part of pipelined steps.

    Args:
        module: the whole module.
        config: what the user chose.
        transport: how messages travel; None for one worker.
        worker: this worker.
        num_workers: how many there are.
        device: where its tensors live.
        group: process group for what workers agree on; None for one worker.
    """

    def __init__(
        self,
        module: nn.Module,
        config: StagewiseConfig,
        transport: AbstractTransport | None,
        worker: int,
        num_workers: int,
        device: torch.device,
        group: Any = None,
    ) -> None:
        self.module = module
        self.config = config
        self.transport = transport
        self.worker = worker
        self.num_workers = num_workers
        self.device = device
        self.group = group
        self.t = 0
        self.failed = False
        self.cuts: Cuts | None = None
        self.norms: NormExchange | None = None
        self.executor: Executor | None = None
        self.versions: Versions | None = None
        self.flow: Flow | None = None
        self._evaluations = 0
        size = num_workers // config.width
        self._plans = Plans(config, worker, num_workers)
        self._replica = Replica(worker, size, transport, device, self._plans.provisional())
        self._collectives = Collectives(module, config.width, size, device, group)

    # ------------------------------------------------------------------ beginning

    @property
    def plan(self) -> Plan | None:
        """Return the plan of a step whose batch has as many micro-batches as asked for."""
        return self._plans.usual

    def find_stages(self, step: Callable[[], Any]) -> None:
        """Find the stages with one run of the whole step on worker 0's process.

        Raises:
            PlanError: on every worker, if there are no such stages.
        """
        if self.cuts is None:
            find = partial(self.config.find_cuts, self.module, step)
            waiting = self.naming_peers("all workers to agree on the stages")
            self.begin(self._collectives.agree_on_cuts(find, waiting))

    def begin(self, cuts: Cuts) -> None:
        """Take stages for found, and give up what other workers hold."""
        self.cuts = cuts
        plan = self._plans.begin(cuts)
        if plan.axes.placement.takes_turns:
            cuts.refuse_early_metrics()
        holdings = Holdings(self.module, cuts, stages_of(plan, self.worker))
        site = Site(self.module, cuts, self.device)
        self._replica.follow(plan)
        post, apply = self._replica.post, self.config.apply
        if plan.weights != "sync" and not (flows(plan) and apply is None):
            self.versions = self._make_versions(plan, holdings)
        self.executor = Executor(
            site, plan, post, holdings, SideEffects(self.module, cuts),
            self.config.seed, self.config.remat, self.versions,
        )  # fmt: skip
        if flows(plan) and apply is not None:  # else it is only evaluated
            assert self.versions is not None
            self.flow = Flow(
                plan, self.worker, self.executor, post, self.versions, apply,
                self.config.complete, self.t,
            )  # fmt: skip
        if _shares_state(plan):
            assert self.config.read_state is not None
            assert self.config.write_state is not None
            self.executor.exchange_state(self.config.read_state, self.config.write_state)
        holdings.free()
        if self.transport is not None or self.config.complete is not None:
            parameters = [holdings.owned(j) for j in range(plan.num_stages)]
            self.norms = NormExchange(
                plan, parameters, self.transport, self._replica.wait,
                for_all=self.config.scaled is not None,
            )  # fmt: skip

    def _make_versions(self, plan: Plan, holdings: Holdings) -> Versions:
        stages = {j: holdings.trained(j) for j in holdings.stages}
        readers = {
            j: [k for k in holdings.stages if k == j or j in holdings.lenders(k)] for j in stages
        }
        for k in holdings.stages:  # of stages of other workers, what is tied to own ones
            for j, tied in holdings.tied_to(k).items():
                if j not in holdings.stages:
                    stages.setdefault(j, {}).update(tied)
                    readers.setdefault(j, []).append(k)
        foresight = None
        if plan.axes.weights.looks_ahead:
            holdings.refuse_ties(plan.weights)
            assert self.config.guess is not None
            foresight = Foresight(plan, stages, self.config.guess, self.config.backward_weights)
        return Versions(self.module, plan, stages, self.t, readers, foresight)

    # ------------------------------------------------------------------ a step

    @property
    def replica(self) -> tuple[int, ...]:
        """Return the workers of this worker's replica, input side first."""
        return self._replica.workers

    @property
    def owns(self) -> bool:
        """Say whether this worker updates any stage."""
        plan = self.plan
        assert plan is not None
        return any(plan.owner(j) == self.worker for j in range(plan.num_stages))

    @property
    def with_state(self) -> list[nn.Parameter]:
        """Return the parameters that this worker has optimizer state for.

        It updates them; or it is told of their updates, and predicts them.
        """
        plan = self.plan
        assert plan is not None
        own = [
            j for j in self.holdings.stages if _shares_state(plan) or plan.owner(j) == self.worker
        ]
        return [p for j in own for p in self.holdings.owned(j)]

    @property
    def holdings(self) -> Holdings:
        """Return what this worker holds; known once the stages are."""
        assert self.executor is not None
        return self.executor.holdings

    def worker_of(self, stage: int) -> int:
        """Return the worker of a stage in this worker's replica."""
        assert self.executor is not None
        return self.executor.plan.worker_of(self._replica.number, stage)

    def share_batch(self, batch: Any) -> Any:
        """Return the batch that the worker of stage 0 has, on every worker of a replica."""
        plan = self.plan
        source = self.replica[0] if plan is None else plan.beginner(self.worker, self.t)
        return self._replica.share_batch(self.t, source, batch)

    def share(
        self, payload: Payload, source: int, tensors: Sequence[Tensor], facts: Any
    ) -> Parcel:
        """Return the source's tensors and facts on every worker of its replica."""
        return self._replica.share(payload, self.t, source, tensors, facts)

    def cut(self, batch: Any) -> list[MicroBatch]:
        """Cut a replica's batch into micro-batches."""
        return split(batch, self.config.num_micro)

    def train(
        self,
        parts: Sequence[MicroBatch],
        call: Callable[[Any], Any],
        summarise: Summarise,
        accumulate: int,
    ) -> Summary:
        """Run the forwards and backwards of a step; gradients are left in ``p.grad``.

        Args:
            parts: the replica's micro-batches.
            call: runs the user's step on one of them.
            summarise: what of the outcomes is shared with all workers.
            accumulate: batches per update.

        Returns:
            The summary, on every worker of the replica.
        """
        before = self._plans.before_update(len(parts), self.t)
        shares = shares_of([p.size for p in parts], self.config.width * accumulate)
        self._check_number(len(parts))
        self._run(before, self.t, parts, shares, call, "train", training=True)
        self._last_parts = len(parts)
        if self.config.width > 1:
            self._spread_buffers(self.t)
        return self._share_outcomes(self.t, summarise)

    def advance(
        self, parts: Sequence[MicroBatch], call: Callable[[Any], Any], summarise: Summarise
    ) -> list[tuple[int, Summary]]:
        """Do what this worker does with the batch of a step, where steps flow into each other.

        Args:
            parts: the micro-batches.
            call: runs the user's step on one of them.
            summarise: what of the outcomes is shared with all workers.

        Returns:
            The steps of which the outcomes have come meanwhile, with their summaries.
        """
        assert self.flow is not None
        self._check_number(len(parts))
        shares = shares_of([p.size for p in parts], self.config.width)
        if self.config.scaled is not None:
            shares = [self.config.scaled(self.t, share) for share in shares]
        with undisturbed(self.device):
            self.flow.step(self.t, self._micro(parts, shares, "train"), call, summarise)
        self.t += 1
        return self.flow.take_arrived()

    @property
    def most_late(self) -> int:
        """Return how many steps later the last worker is told of a step than the first."""
        assert self.flow is not None
        return self.flow.most_late

    def flush(self) -> list[tuple[int, Summary]]:
        """Finish all steps that have begun; return as :meth:`advance` does."""
        if self.flow is None or self.failed:
            return []
        with undisturbed(self.device):
            is_new = self.flow.flush()
        plan = self.plan
        assert plan is not None
        if is_new and (plan.axes.placement.takes_turns or plan.width > 1):
            self._spread_buffers(self.t - 1)
        return self.flow.take_arrived()

    def evaluate(
        self, kind: str, batch: Any, call: Callable[[Any], Any], summarise: Summarise
    ) -> Summary:
        """Run the forward of one batch, whole; nothing is kept for a backward."""
        self._evaluations += 1
        t = -self._evaluations
        part = MicroBatch(batch, 1)
        actions = self._plans.forward(t)
        try:
            self._run(actions, t, [part], [whole_share], call, kind, training=False)
            return self._share_outcomes(t, summarise)
        except (PeerError, WaitTimeoutError) as error:
            raise type(error)(
                f"in {kind} number {-t}, whose actions have step {t}: {error}"
            ) from None

    def _check_number(self, num_parts: int) -> None:
        if self.versions is not None and num_parts != self.config.num_micro:
            raise StepError(
                f"a batch gave {num_parts} micro-batches, but num_micro={self.config.num_micro}; "
                "allowed with delayed weights: as many in every step, as they decide which "
                "version is read; use DataLoader(drop_last=True), or larger batches"
            )

    def put_previous(self, previous: Mapping[str, Any]) -> None:
        """Take from a checkpoint what later forwards read beside the newest version."""
        if self.versions is not None and previous:
            self.versions.put_previous(previous)

    def previous(self) -> dict[str, Any]:
        """Return for a checkpoint what later forwards read beside the newest version."""
        return {} if self.versions is None else self.versions.previous()

    def begin_update(self) -> None:
        """Make room for the next version of all stages, where older ones are still read."""
        if self.versions is not None:
            for j in self.holdings.stages:
                self.versions.begin_update(j)

    def end_step(self) -> None:
        """Send on what an update has changed, and count the step."""
        assert self.executor is not None
        self.executor.run(self._plans.after_update(self._last_parts, self.t))
        self._replica.post.settle()
        self.t += 1

    def _run(
        self, actions: list[Action], t: int, parts: Sequence[MicroBatch],
        shares: Sequence[Callable[[Tensor], Tensor]], call: Callable[[Any], Any], kind: str,
        *, training: bool,
    ) -> None:  # fmt: skip
        executor = self.executor
        assert executor is not None
        with undisturbed(self.device):
            executor.prepare(t, self._micro(parts, shares, kind), call, training=training)
            executor.run(actions)

    def _micro(
        self, parts: Sequence[MicroBatch], shares: Sequence[Callable[[Tensor], Tensor]], kind: str
    ) -> dict[int, Micro]:
        """Return the micro-batches of this worker's replica by their numbers among all."""
        width, q = self.config.width, self._replica.number
        return {
            i * width + q: Micro(
                part.batch,
                weight,
                f"{kind} {signature(part.batch)}",
                f"{kind} {family(part.batch)}",
            )
            for i, (part, weight) in enumerate(zip(parts, shares, strict=True))
        }

    def _spread_buffers(self, t: int) -> None:
        """Bring the buffers that the last micro-batch of a step left to all that hold them."""
        assert self.executor is not None
        for actions in self._plans.relays(t):
            self.executor.run(actions)

    def _share_outcomes(self, t: int, summarise: Summarise) -> Summary:
        """Tell all workers of the replica what came out, and what was learnt."""
        executor = self.executor
        assert executor is not None
        summary = Summary([], None)
        if self.worker == self.replica[-1]:
            summary = summarise(executor.take_outcomes(t))
        summary, learnt = self._replica.share_summary(self.t, summary, executor.learnt)
        executor.adopt(learnt)
        executor.forget(t)
        return summary

    # ------------------------------------------------------------------ whole weights

    def gather(self) -> dict[str, Tensor]:
        """Return all parameters and buffers, whole, on every worker; all must call it."""
        plan = self.plan
        assert self.cuts is not None
        assert plan is not None
        return self._collectives.gather(self.cuts, plan)

    def whole(self) -> AbstractContextManager[None]:
        """Let the body write to every parameter; behind it, keep only this worker's."""
        return nullcontext() if self.executor is None else self.holdings.whole()

    def reduce(self, tensor: Tensor, how: str) -> Tensor:
        """Reduce over all workers, of which those of a replica have the same value."""
        return self._collectives.reduce(tensor, how)

    def restore_whole(self) -> None:
        """Give the module its whole weights again, on every worker."""
        if self.executor is None or self.group is None:
            return
        with self.naming_peers("all workers to put the weights together"):
            whole = self.gather()
        self.holdings.restore()
        self._collectives.load(whole)

    # ------------------------------------------------------------------ failures, the end

    def fail(self, text: str) -> None:
        """Tell the other workers why this one fails; communicate no more."""
        if not self.failed:
            self.failed = True
            if self.transport is not None:
                text = text.partition("\nLook at the log")[0]  # one timetable is enough for all
                self.transport.report_failure(f"worker {self.worker}: {text}")

    def close(self) -> None:
        """End what runs in the background."""
        if self.transport is not None:
            if not self.failed:
                with self.naming_peers("all workers to finish"):
                    self._replica.post.settle()
                    self._collectives.meet()
            self.transport.close()

    def naming_peers(self, what: str) -> AbstractContextManager[None]:
        """Name the workers that do not come while the body waits for them."""
        if self.transport is None:
            return nullcontext()
        return naming_peers(self.transport, self.t, what)


def _shares_state(plan: Plan) -> bool:
    """Say whether replicas that do not update need the optimizer's state to predict."""
    return plan.axes.weights.looks_ahead and plan.width > 1
