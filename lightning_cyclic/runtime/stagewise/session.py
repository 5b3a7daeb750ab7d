"""A session of stage-at-a-time training: one worker, from its first step to its last.

first step      survey the module, choose the stages, give up what other workers hold
every step      share the batch (D), run the program, share what came out (L)
between steps   updates, validation, whole weights for a checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cyclic.actions import Action, Kind, Payload
from lightning_cyclic.errors import CyclicError, PeerError, PlanError, StepError, WaitTimeoutError
from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.agreement import gather_texts
from lightning_cyclic.runtime.norms import NormExchange
from lightning_cyclic.runtime.script import Script
from lightning_cyclic.runtime.stagewise.chance import undisturbed
from lightning_cyclic.runtime.stagewise.cuts import Cuts
from lightning_cyclic.runtime.stagewise.executor import Executor, Micro
from lightning_cyclic.runtime.stagewise.flow import Apply, Flow, Summarise, Summary
from lightning_cyclic.runtime.stagewise.foresight import BackwardWeights, Foresight, Guess
from lightning_cyclic.runtime.stagewise.holdings import Holdings
from lightning_cyclic.runtime.stagewise.mail import stages_of
from lightning_cyclic.runtime.stagewise.packets import Lesson
from lightning_cyclic.runtime.stagewise.parcels import Parcel, ParcelPost
from lightning_cyclic.runtime.stagewise.ranks import rank_of
from lightning_cyclic.runtime.stagewise.sideeffects import SideEffects
from lightning_cyclic.runtime.stagewise.site import Site
from lightning_cyclic.runtime.stagewise.split import MicroBatch, signature, split
from lightning_cyclic.runtime.stagewise.trees import flatten, unflatten
from lightning_cyclic.runtime.stagewise.versions import Versions
from lightning_cyclic.runtime.stagewise.weighting import shares_of, whole_share
from lightning_cyclic.runtime.transport import AbstractTransport
from lightning_cyclic.runtime.waiting import Waiter, naming_peers

_AFTER_UPDATE = frozenset({Payload.P, Payload.V})
_SHARED = frozenset({Payload.D, Payload.L})
_FORWARD = frozenset({Payload.A})


@dataclass(frozen=True, slots=True, kw_only=True)
class StagewiseConfig:
    """Hold what the user chose.

    Args:
        make_plan: (number of stages, micro-batches of all replicas, ties, stages whose buffers
            change) -> plan.
        find_cuts: (module, step) -> where the stages begin; run on worker 0 alone.
        num_micro: into how many micro-batches each replica cuts its batch.
        width: number of replicas.
        remat: "never", "always" or "except_last".
        seed: of the randomness inside steps.
        apply: makes a new version of a stage, where steps flow into each other.
        guess: predicts the weights of a stage, for plans that read predicted ones.
        backward_weights: what backwards read there.
        expected_stages: how many stages there will be. [0: one per worker of a replica]
    """

    make_plan: Callable[..., Plan]
    find_cuts: Callable[[nn.Module, Callable[[], Any]], Cuts]
    num_micro: int
    width: int
    remat: str
    seed: int
    apply: Apply | None = None
    guess: Guess | None = None
    backward_weights: BackwardWeights = "current"
    expected_stages: int = 0


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
        self._evaluations = 0
        self._plans: dict[int, Plan] = {}
        self._phases: dict[int, tuple[list[Action], list[Action]]] = {}
        num_stages = config.expected_stages or max(1, num_workers // config.width)
        base = config.make_plan(num_stages, config.num_micro * config.width, (), ())
        self._post = self._make_post(base)
        self.executor: Executor | None = None
        self.versions: Versions | None = None
        self.flow: Flow | None = None

    # ------------------------------------------------------------------ beginning

    @property
    def plan(self) -> Plan | None:
        """Return the plan of a step whose batch has as many micro-batches as asked for."""
        return self._plan(self.config.num_micro) if self.cuts is not None else None

    def find_stages(self, step: Callable[[], Any]) -> None:
        """Find the stages with one run of the whole step on worker 0's process.

        Raises:
            PlanError: on every worker, if there are no such stages.
        """
        if self.cuts is not None:
            return
        text = ""
        if self.group is None or dist.get_rank() == 0:
            try:
                text = json.dumps(["cuts", self.config.find_cuts(self.module, step).as_data()])
            except CyclicError as error:
                if self.group is None:
                    raise
                text = json.dumps([type(error).__name__, str(error)])
        if self.group is not None:
            with self.naming_peers("all workers to agree on the stages"):
                text = gather_texts(text, self.device, self.group)[0]
        kind, data = json.loads(text)
        if kind != "cuts":
            raise (StepError if kind == "StepError" else PlanError)(data)
        self.begin(Cuts.from_data(data))

    def begin(self, cuts: Cuts) -> None:
        """Take stages for found, and give up what other workers hold."""
        self.cuts = cuts
        plan = self._plan(self.config.num_micro)
        if plan.axes.placement.takes_turns:
            _refuse_metrics(cuts)
        holdings = Holdings(self.module, cuts, stages_of(plan, self.worker))
        site = Site(self.module, cuts, self.device)
        self._post = self._make_post(plan)
        if plan.weights != "sync" and not (flows(plan) and self.config.apply is None):
            stages = {j: holdings.trained(j) for j in holdings.stages}
            readers = {
                j: [k for k in holdings.stages if k == j or j in holdings.lenders(k)]
                for j in stages
            }
            foresight = None
            if plan.axes.weights.looks_ahead:
                assert self.config.guess is not None
                foresight = Foresight(
                    plan, stages, self.config.guess, self.config.backward_weights
                )
            self.versions = Versions(self.module, plan, stages, self.t, readers, foresight)
        self.executor = Executor(
            site, plan, self._post, holdings, SideEffects(self.module, cuts),
            self.config.seed, self.config.remat, self.versions,
        )  # fmt: skip
        if flows(plan) and self.config.apply is not None:  # else it is only evaluated
            assert self.versions is not None
            self.flow = Flow(
                plan, self.worker, self.executor, self._post, self.versions, self.config.apply,
                self.t,
            )  # fmt: skip
        holdings.free()
        if self.transport is not None:
            parameters = [holdings.owned(j) for j in range(plan.num_stages)]
            self.norms = NormExchange(plan, parameters, self.transport, self._waiter.wait)

    def _make_post(self, plan: Plan) -> ParcelPost:
        period = plan.axes.schedule.period // plan.axes.schedule.unit
        script = Script(worker=self.worker, stages=(), slots_per_step=period)
        self._slots_per_step = period
        if self.transport is None:
            return ParcelPost(_NoTransport(), _no_wait, self.device)  # type: ignore[arg-type]
        self._waiter = Waiter(plan, script, self.transport)
        return ParcelPost(self.transport, self._waiter.wait, self.device)

    def _plan(self, num_micro: int) -> Plan:
        """Return the plan of a step whose replicas have ``num_micro`` micro-batches each."""
        assert self.cuts is not None
        whole = self._plans.get(self.config.num_micro)
        if num_micro not in self._plans and whole is not None and flows(whole):
            # a batch of evaluation has a flush behind it, and reads the newest weights
            self._plans[num_micro] = replace(
                whole, num_micro=num_micro, schedule="gpipe", weights="sync"
            )
        elif num_micro not in self._plans:
            cuts = self.cuts
            ties = tuple(sorted(set(cuts.tied.values()))) if self.num_workers > 1 else ()
            relayed = tuple(j for j, names in enumerate(cuts.buffers) if cuts.changed & set(names))
            plan = self.config.make_plan(
                cuts.num_stages, num_micro * self.config.width, ties, relayed
            )
            self._plans[num_micro] = replace(plan, num_steps=1)
        return self._plans[num_micro]

    def _actions(self, num_micro: int, t: int) -> tuple[list[Action], list[Action]]:
        """Return what step ``t`` does before and after its update."""
        if num_micro not in self._phases:
            program = [
                a for a in self._plan(num_micro).programs[self.worker] if a.payload not in _SHARED
            ]
            after = [a for a in program if a.payload in _AFTER_UPDATE]
            before = [a for a in program if a.payload not in _AFTER_UPDATE]
            self._phases[num_micro] = (before, after)
        before, after = self._phases[num_micro]
        slots = max(t, 0) * self._slots_per_step  # evaluations have steps before 0
        return _at(before, t, slots), _at(after, t, slots)

    # ------------------------------------------------------------------ a step

    @property
    def replica(self) -> tuple[int, ...]:
        """Return the workers of this worker's replica, input side first."""
        size = self.num_workers // self.config.width
        first = self.worker // size * size
        return tuple(range(first, first + size))

    @property
    def owns(self) -> bool:
        """Say whether this worker updates any stage."""
        plan = self.plan
        assert plan is not None
        return any(plan.owner(j) == self.worker for j in range(plan.num_stages))

    @property
    def updated(self) -> list[nn.Parameter]:
        """Return the parameters that this worker updates, and has optimizer state for."""
        plan = self.plan
        assert plan is not None
        stages = [j for j in self.holdings.stages if plan.owner(j) == self.worker]
        return [p for j in stages for p in self.holdings.owned(j)]

    @property
    def holdings(self) -> Holdings:
        """Return what this worker holds; known once the stages are."""
        assert self.executor is not None
        return self.executor.holdings

    def worker_of(self, stage: int) -> int:
        """Return the worker of a stage in this worker's replica."""
        assert self.executor is not None
        q = self.worker // len(self.replica)
        return self.executor.plan.worker_of(q, stage)

    def share_batch(self, batch: Any) -> Any:
        """Return the batch that the worker of stage 0 has, on every worker of a replica."""
        if isinstance(batch, Iterator):
            raise StepError(
                "a step takes dataloader_iter, from which it would draw a batch on every stage; "
                "allowed: steps that are given their batch; use training_step(self, batch, "
                "batch_idx)"
            )
        leaves, structure = flatten(batch)
        at = [k for k, x in enumerate(leaves) if isinstance(x, Tensor)]
        source = self._source()
        shared = self.share(Payload.D, source, [leaves[k] for k in at], len(at))
        if shared.facts != len(at):
            raise StepError(
                f"the batch of worker {self.worker} has {len(at)} tensors, that of worker "
                f"{source} has {shared.facts}; allowed: batches of one structure; "
                "check the dataset of each worker"
            )
        for k, x in zip(at, shared.tensors, strict=True):
            leaves[k] = x
        return unflatten(structure, leaves)

    def _source(self) -> int:
        """Return the worker whose batch counts: the one that begins the step."""
        return self.replica[0] if self.plan is None else self.plan.beginner(self.worker, self.t)

    def share(
        self, payload: Payload, source: int, tensors: Sequence[Tensor], facts: Any
    ) -> Parcel:
        """Return the source's tensors and facts on every worker of its replica."""
        if len(self.replica) == 1:
            return Parcel(tensors, facts)
        slot = (self.t + (payload is Payload.L)) * self._slots_per_step  # first or last thing
        place = Action(kind=Kind.SEND, payload=payload, t=self.t, j=0, s=slot)
        if self.worker != source:
            return self._post.receive(replace(place, kind=Kind.RECV, peer=source), None)
        for other in self.replica:
            if other != source:
                self._post.send(replace(place, peer=other), None, Parcel(tensors, facts))
        return Parcel(tensors, facts)

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
        before, _ = self._actions(len(parts), self.t)
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
        shares = shares_of([p.size for p in parts], 1)
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
        if is_new and self.executor is not None and self.executor.plan.axes.placement.takes_turns:
            self._spread_buffers(self.t - 1)
        return self.flow.take_arrived()

    def evaluate(
        self, kind: str, batch: Any, call: Callable[[Any], Any], summarise: Summarise
    ) -> Summary:
        """Run the forward of one batch, whole; nothing is kept for a backward."""
        self._evaluations += 1
        t = -self._evaluations
        part = MicroBatch(batch, 1)
        actions = [a for a in self._actions(1, t)[0] if a.kind is Kind.F or a.payload in _FORWARD]
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
        _, after = self._actions(self._last_parts, self.t)
        self.executor.run(after)
        self._post.settle()
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
        width, q = self.config.width, self.worker // len(self.replica)
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
        executor, plan = self.executor, self.plan
        assert executor is not None
        assert plan is not None
        for j in plan.relayed:
            holders = plan.axes.placement.workers_of(j)
            source = plan.worker_of(plan.num_micro - 1, j, t)
            a = Action(kind=Kind.SEND, payload=Payload.R, t=t, j=j, peer=source)
            if self.worker == source:
                executor.run([replace(a, peer=w) for w in holders if w != source])
            elif self.worker in holders:
                executor.run([replace(a, kind=Kind.RECV)])

    def _share_outcomes(self, t: int, summarise: Summarise) -> Summary:
        """Tell all workers of the replica what came out, and what was learnt."""
        executor = self.executor
        assert executor is not None
        source, learnt = self.replica[-1], executor.learnt
        summary = Summary([], None)
        if self.worker == source:
            summary = summarise(executor.take_outcomes(t))
        if len(self.replica) > 1:
            self._post.settle()
            facts = [summary.facts, {f: lesson.to_data() for f, lesson in learnt.items()}]
            shared = self.share(Payload.L, source, summary.tensors, facts)
            learnt = {f: Lesson.from_data(d) for f, d in shared.facts[1].items()}
            summary = Summary(shared.tensors, shared.facts[0])
        executor.adopt(learnt)
        executor.forget(t)
        return summary

    # ------------------------------------------------------------------ whole weights

    def gather(self) -> dict[str, Tensor]:
        """Return all parameters and buffers, whole, on every worker; all must call it."""
        assert self.executor is not None
        assert self.cuts is not None
        whole: dict[str, Tensor] = {}
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        for j in range(self.cuts.num_stages):
            names = [*self.cuts.parameters[j], *self.cuts.buffers[j]]
            source = self._owner_rank(j)
            for name in names:
                x = named[name].detach()
                if self.group is not None:
                    x = x.contiguous().clone()
                    dist.broadcast(x, source, group=self.group)
                whole[name] = x
        return whole

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let the body write to every parameter; behind it, keep only this worker's."""
        holdings = self.executor.holdings if self.executor else None
        if holdings is None or not holdings.is_freed:
            yield
            return
        holdings.restore()
        try:
            yield
        finally:
            holdings.free()

    def reduce(self, tensor: Tensor, how: str) -> Tensor:
        """Reduce over all workers, of which those of a replica have the same value."""
        if how in ("max", "min", "product"):
            op = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(how)
            if op is None:
                raise StepError(
                    f"a reduction by {how!r} over replicas; allowed: mean, sum, max, min; "
                    "use one of these"
                )
            dist.all_reduce(tensor, op, group=self.group)
            return tensor
        parts = len(self.replica) * (self.config.width if how in ("mean", "avg") else 1)
        dist.all_reduce(tensor, group=self.group)
        if tensor.is_floating_point():
            return tensor.div_(parts)
        return tensor.div_(parts, rounding_mode="floor")

    def restore_whole(self) -> None:
        """Give the module its whole weights again, on every worker."""
        if self.executor is None or self.group is None:
            return
        with self.naming_peers("all workers to put the weights together"):
            whole = self.gather()
        self.executor.holdings.restore()
        self.load(whole)

    def load(self, whole: Mapping[str, Tensor]) -> None:
        """Copy whole weights into the module."""
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        with torch.no_grad():
            for name, x in whole.items():
                named[name].copy_(x)

    def _owner_rank(self, j: int) -> int:
        plan = self.plan
        assert plan is not None
        return rank_of(plan.owner(j), self.num_workers // self.config.width)

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
                    self._post.settle()
                    dist.barrier(group=self.group)
            self.transport.close()

    def naming_peers(self, what: str) -> AbstractContextManager[None]:
        """Name the workers that do not come while the body waits for them."""
        if self.transport is None:
            return nullcontext()
        return naming_peers(self.transport, self.t, what)


def _refuse_metrics(cuts: Cuts) -> None:
    """Refuse metrics of stages with which workers take turns: each would see a part."""
    early = [path for path, j in cuts.metrics.items() if j < cuts.num_stages - 1]
    if early:
        raise PlanError(
            f"the metric {early[0]!r} is updated before the last stage, with which several "
            "workers take turns under placement 'shared'; allowed: metrics of the last stage; "
            "update it behind the last module of the step, or use another placement"
        )


def flows(plan: Plan) -> bool:
    """Say whether steps begin before those ahead of them have ended."""
    return plan.placement == "shared" or (plan.placement == "pipelined" and plan.weights != "sync")


def family(batch: Any) -> str:
    """Describe a batch without its sizes."""
    leaves, structure = flatten(batch)
    kinds = [f"{x.dtype}{x.dim()}" if isinstance(x, Tensor) else type(x).__name__ for x in leaves]
    return f"{structure.kind} {len(leaves)} {' '.join(kinds)}"


def _at(actions: Sequence[Action], t: int, slots: int) -> list[Action]:
    return [replace(a, t=a.t + t, s=a.s + slots) for a in actions]


class _NoTransport:
    """Stand where one worker has nobody to send to."""


def _no_wait(pending: Any, action: Action) -> None:
    raise AssertionError("one worker waits for nobody")
