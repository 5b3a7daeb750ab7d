"""A session of stage-at-a-time training: one worker, from its first step to its last.

first step      survey the module, choose the stages, give up what other workers hold
every step      what the program has for its batch
between steps   updates, flushes, validation, whole weights for a checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import PlanError, StepError
from lightning_cyclic.plan import Plan, program_of
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.dataflow import Datum, Item
from lightning_cyclic.plan.passes.messages import step_of
from lightning_cyclic.plan.program import Program
from lightning_cyclic.runtime.absent import is_absent, make_present
from lightning_cyclic.runtime.cast_copies import CastCopies
from lightning_cyclic.runtime.failure_words import Waiter, words_of
from lightning_cyclic.runtime.flight_recorder import FlightRecorder
from lightning_cyclic.runtime.gradient_store import Gradients, GradientStore
from lightning_cyclic.runtime.late_values import LateValues
from lightning_cyclic.runtime.messages import Message, Messages
from lightning_cyclic.runtime.norms import Norms
from lightning_cyclic.runtime.partial_step.call_router import CallRouter
from lightning_cyclic.runtime.partial_step.collectives import Collectives, rank_of
from lightning_cyclic.runtime.partial_step.config import Plans, StagewiseConfig, Summarise
from lightning_cyclic.runtime.partial_step.exchange import Callbacks, Exchange, stages_of
from lightning_cyclic.runtime.partial_step.micro_batches import (
    BatchCutter,
    BatchReads,
    noted,
    refusing_time_major,
    shares_of,
    whole_share,
    words_for,
)
from lightning_cyclic.runtime.partial_step.module_state import ModuleState, packed
from lightning_cyclic.runtime.partial_step.ownership import ForeignWeights, Ownership
from lightning_cyclic.runtime.partial_step.packets import Lesson
from lightning_cyclic.runtime.partial_step.plain_step import PlainStep
from lightning_cyclic.runtime.partial_step.stage_step import Micro, StageStep
from lightning_cyclic.runtime.partial_step.verifier import Expect, Verifier
from lightning_cyclic.runtime.partial_step.versions import Versions
from lightning_cyclic.runtime.predict import Foresight
from lightning_cyclic.runtime.randomness import undisturbed
from lightning_cyclic.runtime.snapshot import generators_of
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.transport import AbstractTransport
from lightning_cyclic.runtime.transport.crew import naming_peers
from lightning_cyclic.runtime.values.split import (
    MicroBatch,
    family,
    refuse_iterators,
    signature,
)
from lightning_cyclic.runtime.values.trees import map_tensors, tensors
from lightning_cyclic.runtime.weight_watch import StillBuffers, WeightWatch, is_persistent
from lightning_cyclic.runtime.worker import Worker

_NEW_VERSIONS = frozenset({Kind.UPDATE, Payload.P, Payload.V})
_OF_UPDATES = _NEW_VERSIONS | {Payload.N}


@final
class StagewiseSession:
    """Run one worker's part of pipelined steps.

    Args:
        transport: how messages travel; None for one worker.
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
        self.arrived: list[tuple[int, Message]] = []  # steps, and what came out of them
        self.losses = LateValues()  # that somebody looks at
        self.cuts: Cuts | None = None
        self.flight: FlightRecorder | None = None  # of the worker, once there is one
        self.router: CallRouter | None = None
        self.versions: Versions | None = None
        self.ownership: Ownership
        self.foreign: ForeignWeights
        self.norms: Norms
        self._size = num_workers // config.replicas
        self._evaluations = 0
        self._evaluated = ""  # the kind of the step of evaluation under way
        self._ended = -1  # the last step that a flush has ended
        self.was_finite: bool | None = None  # gradients of all stages; None: nobody has asked
        self._rest: list[Action] = []  # of a step whose update is made outside
        self._summarise: dict[int, Summarise] = {}
        self._concluded: dict[int, Message] = {}  # what is told of steps
        self._watch = WeightWatch(self.rank)
        self._still = StillBuffers(module, (), self.rank, _not_told)
        self._weights: dict[str, Tensor] = {}  # that nothing changes while gradients are made
        self._put_off: dict[tuple[int, int], list[Action]] = {}  # forwards, by update
        self._held: dict[str, Any] = {}  # generators that the module keeps
        self._modes: list[tuple[nn.Module, bool]] = []  # of the last step that has begun
        self._cutter = BatchCutter(
            config.num_microbatches, config.split_batch, config.say, may_leave=config.is_one_stage
        )
        self._collectives = Collectives(module, config.replicas, self._size, group)

    # ------------------------------------------------------------------ beginning

    @property
    def plan(self) -> Plan | None:
        """Return the plan of a step whose batch has as many micro-batches as asked for."""
        return None if self.cuts is None else self._plans.usual

    @property
    def program(self) -> Program:
        return program_of(self._plans.usual)

    @property
    def stage_of(self) -> dict[str, int] | None:
        """Return parameter name -> stage; None before the stages are found."""
        if self.cuts is None:
            return None
        return {n: j for j, names in enumerate(self.cuts.parameters) for n in names}

    @property
    def starts(self) -> tuple[str, ...] | None:
        """Return the module paths that begin stages 1, 2, ...; None before they are found."""
        return None if self.cuts is None else self.cuts.starts

    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this worker's stages by name, once they are found."""
        return self.ownership.named()

    def find_stages(self, batch: Any, call: Callable[[Any], Any], kind: str = "") -> None:
        """Find the stages with one run of the whole step on worker 0's process.

        Args:
            batch: that this worker has been given.
            call: runs the user's step on one micro-batch.
            kind: of a step of evaluation, whose batch is not cut. [a step of training]

        Raises:
            PlanError: on every worker, if there are no such stages.
            StepError: for batches that cannot be shared.
        """
        refuse_iterators(batch)
        if self.cuts is None:
            # its code may change what it is given; made before the run, it is no activation
            copied = map_tensors(torch.clone, batch)
            parts = [MicroBatch(copied, 1)] if kind else self.cut(copied)
            where = "" if kind else f"{words_for(0, [p.size for p in parts])}, to find the stages"
            step = partial(noted, where, self._along_samples(parts[:1], call), parts[0].batch)

            find = partial(self.config.find_cuts, self.module, step)
            waiting = self.naming_peers("to agree on the stages")
            data = self._collectives.agree(lambda: find().as_data(), waiting)
            self.begin(Cuts.from_data(data))

    def resume(self, saved: Mapping[str, Any] | None, *, fits: bool) -> bool:
        """Go on with the stages and the step of what :meth:`state` returned.

        Args:
            saved: None for weights alone.
            fits: whether it is of the plan of this run.

        Returns:
            Whether training goes on with the same bits.
        """
        if self.versions is not None:  # in the middle of a run, whose steps count on
            self.versions.restart()
            return False
        if saved is None or "cuts" not in saved:
            return False
        # versions that the first forwards of a delayed rule would read were never made
        begins_anew = not fits and self.config.is_delayed
        self.t = 0 if begins_anew else saved["t"]
        self._ended = self.t - 1
        self.config = replace(self.config, seed=saved["seed"])
        if self.cuts is not None or not fits:
            return False
        self.begin(Cuts.from_data(saved["cuts"]))
        if self.versions is not None and saved["previous"]:
            self.versions.put_previous(saved["previous"])
        return True

    def begin(self, cuts: Cuts) -> None:
        """Take stages for found, and give up what other workers hold."""
        self._trained = self._had_versions = self._read_trained()
        frozen = {n for n, _ in self.module.named_parameters()} - self._trained
        self._plans = Plans(self.config, cuts, self.num_workers, frozen)
        self.cuts, plan = cuts, self._plans.usual
        if plan.axes.placement.takes_turns:
            cuts.refuse_early_metrics()
        self.ownership = ownership = Ownership(
            self.module, cuts, stages_of(plan, self.worker), self.config.forms
        )
        fits = not any(map(is_absent, self.module.parameters()))
        make_present(*ownership.here().values())
        self.router = CallRouter(self.module, cuts, self.device)
        if self.transport is not None:
            stages = {w: stages_of(plan, w) for w in range(self.num_workers)}
            self.transport.crew.names.know_stages(stages)
        if plan.weights != "sync" and (self.flows or not plan.flows):
            self.versions = self._make_versions(plan, ownership)
        self._messages = self._make_messages(plan)
        repeated = set(cuts.repeated) - set(ownership.stale)
        self._state = ModuleState(
            self.module, cuts, self.config.not_state, ownership.stages, self.config.say, repeated,
        )  # fmt: skip
        self._grads = GradientStore(self.trained_of, self.config.sums)
        self._step = self._make_step(cuts, plan)
        parameters = [self.trained_of(j) for j in range(plan.num_stages)]
        self.norms = Norms(plan, self.worker, parameters, self._fetch)
        self._exchange = Exchange(
            plan,
            self.worker,
            self._step,
            ownership,
            self._grads,
            self.norms,
            self._make_callbacks(plan),
            self.config.forms,
        )
        self._worker = Worker(
            self.program.flow(self.worker), self._messages, self._exchange, self._exchange, self
        )
        self.flight = self._worker.flight
        for j in range(plan.num_stages):
            layout = self.norms.layout(j, self._messages)
            self._messages.know(Payload.N, j, layout)  # received ahead, several at once
        self._modes = [(m, m.training) for m in self.module.modules()]
        self.foreign = ForeignWeights(
            self.module, cuts.changing, ownership, lambda j: rank_of(plan.owner(j), self._size),
            fits, self._gather,
        )  # fmt: skip
        self.verifier = Verifier(self, self._make_plain_step(cuts), self._held)
        if not fits:  # else the first step lets it go
            self.foreign.leave()
        self.config.forms.leave(self.with_state)

    def _make_step(self, cuts: Cuts, plan: Plan) -> StageStep:
        """Return what runs F and B; note which weights nothing else may change meanwhile."""
        assert self.router is not None
        config, versions, ownership = self.config, self.versions, self.ownership
        step = StageStep(
            self.router, plan, ownership, self._state,
            config.seed, config.remat, versions, config.is_one_stage,
        )  # fmt: skip
        step.say = config.say
        step.held = self._held = generators_of(self.module, config.not_state)
        if config.is_under_autocast and not (versions is not None and versions.overwrites):
            step.casts = CastCopies()  # else copies have no one value
        still = {n: b for n, b in self.router.still_buffers().items() if b.layout == torch.strided}
        own = self.router.still_buffers(of_units=True) if self.num_workers > 1 else {}
        kept = [n for n in own if is_persistent(self.module, n)]
        self._still = StillBuffers(self.module, kept, self.rank, _not_told)
        if versions is not None:
            step.watch = WeightWatch(self.rank, may_freeze=False)
            step.still = still
        elif not config.is_one_stage or config.remat != "never":  # else it is as one device
            here = ownership.here().items()
            self._weights = {**{n: p for n, p in here if n not in cuts.written}, **still}
        return step

    def _make_plain_step(self, cuts: Cuts) -> PlainStep:
        assert self.router is not None
        config = self.config
        named = (cuts.parameters, cuts.buffers)
        stage_of = {n: j for each in named for j, names in enumerate(each) for n in names}
        return PlainStep(
            self.module, self.router, stage_of, self.device, config.seed, self._held,
            config.not_state, config.forms, config.sums,
            frozenset(stage_of if config.is_one_stage else cuts.written),
        )  # fmt: skip

    def _make_messages(self, plan: Plan) -> Messages:
        if self.transport is None:
            return Messages(None, {}, _no_wait, self.device)
        wait = Waiter(plan, self.transport, self._when).wait
        self._line = self.transport.connect(self.program)
        return Messages(self._line, self.program.depths, wait, self.device)

    def _make_callbacks(self, plan: Plan) -> Callbacks:
        shares_state = _shares_state(plan)
        return Callbacks(
            begin_version=self._begin_version,
            conclude=self._conclude,
            complete=self._complete if plan.norms != "none" and self.flows else None,
            read_state=self.config.read_state if shares_state else None,
            write_state=self.config.write_state if shares_state else None,
        )

    def train_others(self) -> None:
        """Train other parameters from now on; behind a flush, and on all workers at once.

        What is frozen keeps its versions, which forwards still read, unless they are predicted.

        Raises:
            PlanError: on every worker, for a parameter that stages share.
        """
        if self.cuts is None or self.versions is None:
            return
        trained = self._read_trained()
        changed, self._trained = self._trained ^ trained, trained
        tied = next((n for n in self.cuts.tied if n in changed), None)
        if tied is not None:
            raise PlanError(
                f"parameter {tied!r}, which stages {list(self.cuts.tied[tied])} share, was frozen "
                f"or unfrozen between two steps, which preset {self._plans.usual.preset!r} does "
                "not support; allowed: parameters of one stage; let one stage have all modules "
                "that share it, stages=[...], or use strategy='1f1b'"
            )
        self._had_versions = self._had_versions | trained
        self.versions.train_others(self._versioned(self._plans.usual, self.ownership))

    def _read_trained(self) -> set[str]:
        return {n for n, p in self.module.named_parameters() if p.requires_grad}

    def _versioned(self, plan: Plan, ownership: Ownership) -> dict[int, dict[str, nn.Parameter]]:
        """Return stage -> name -> parameter of which this worker has versions."""
        besides = () if plan.axes.weights.looks_ahead else self._had_versions
        stages = {j: ownership.trained(j, besides) for j in ownership.stages}
        for k in ownership.stages:  # of stages of other workers, what is tied to own ones
            for j, tied in ownership.tied_to(k).items():
                if j not in ownership.stages:
                    stages.setdefault(j, {}).update(tied)
        return stages

    def _make_versions(self, plan: Plan, ownership: Ownership) -> Versions:
        stages = self._versioned(plan, ownership)
        readers = {
            j: [k for k in ownership.stages if (k == j or j in ownership.lenders(k))]
            for j in stages
        }
        foresight = None
        if plan.axes.weights.looks_ahead:
            ownership.refuse_ties(plan.weights)
            assert self.config.guess is not None
            foresight = Foresight(plan, stages, self.config.guess)
        forms = self.config.forms
        return Versions(self.module, plan, stages, self.t, readers, foresight, forms)

    # ------------------------------------------------------------------ what there is

    @property
    def replica(self) -> tuple[int, ...]:
        """Return the workers of this worker's replica, input side first."""
        first = self.worker // self._size * self._size
        return tuple(range(first, first + self._size))

    @property
    def stage_step(self) -> StageStep:
        return self._step

    def plan_of(self, num_microbatches: int) -> Plan:
        return self._plans.of(num_microbatches)

    def agree(self, find: Callable[[], Any]) -> Any:
        """Return on every worker what rank 0 finds; all must call it."""
        return self._collectives.agree(find, self.naming_peers("to compare a step"))

    @property
    def flows(self) -> bool:
        """Say whether steps begin before those ahead of them have ended, in training."""
        return self._plans.usual.flows and self.config.apply is not None

    @property
    def owns(self) -> bool:
        return bool(self._owned)

    @property
    def _owned(self) -> list[int]:
        plan = self._plans.usual
        return [j for j in range(plan.num_stages) if plan.owner(j) == self.worker]

    @property
    def with_state(self) -> list[nn.Parameter]:
        """Return the parameters that this worker has optimizer state for.

        It updates them; or it is told of their updates, and predicts them.
        """
        predicts = _shares_state(self._plans.usual)
        own = [j for j in self.ownership.stages if predicts or j in self._owned]
        return [p for j in own for p in self.trained_of(j)]

    def trained_of(self, j: int) -> list[nn.Parameter]:
        """Return what the optimizer has of a stage, in the order of its parameters."""
        return list(map(self.config.forms.trained, self.ownership.owned(j)))

    @property
    def rank(self) -> int:
        return rank_of(self.worker, self._size)

    def worker_of(self, stage: int) -> int:
        return self._plans.usual.worker_of(self.worker // self._size, stage)

    @property
    def most_late(self) -> int:
        """Return how many steps later the last worker is told of a step than the first."""
        return max(map(self.program.lag, range(self.num_workers)))

    # ------------------------------------------------------------------ a step

    def cut(self, batch: Any) -> list[MicroBatch]:
        """Cut a replica's batch into micro-batches; nobody minds one alone where nobody waits."""
        return self._cutter.cut(batch)

    def _along_samples(
        self, parts: Sequence[MicroBatch], call: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        """Let the user's step refuse to take the samples of these parts for time."""
        sizes = {part.size for part in parts}
        if (
            self.config.num_microbatches == 1
            or self.config.split_batch is not None
            or len(sizes) > 1
        ):
            return call
        return partial(refusing_time_major, self.module, sizes.pop(), call)

    def how_cut(self) -> str | None:
        """Return how batches have been cut; None before any has been."""
        return self._cutter.report()

    def train(
        self, batch: Any, call: Callable[[Any], Any], summarise: Callable[[list[int]], Summarise],
        *, accumulate: int = 1, is_last: bool = True, is_first: bool = True,
        expect: Expect | None = None,
    ) -> None:  # fmt: skip
        """Do what this worker does with the batch of a step, up to updates that others make.

        Where these are made outside, the sums of gradients are in ``p.grad`` behind it, and what
        is there before is added to.

        Args:
            batch: that this worker has been given.
            call: runs the user's step on one micro-batch.
            summarise: sizes of micro-batches -> what of the outcomes all workers are told.
            accumulate: batches per update.
            is_last: whether it is the last of these.
            is_first: whether it is the first.
            expect: what of the outcomes all workers are to be told; see :class:`Verifier`.
        """
        self.verifier.prepare(batch, is_first=is_first)
        self.was_finite = None
        usual = self.program.step(self.worker, self.t, ended=self._ended)
        parts = self.cut(self._share_batch(self.t, batch, usual))
        self._check_number(len(parts))
        shares = shares_of([p.size for p in parts], self.config.replicas * accumulate)
        if self.config.scaled is not None:
            shares = [self.config.scaled(self.t, share) for share in shares]
        if self.config.is_one_stage and self.t == 0:  # else it is looked at to find the stages
            call = self._along_samples(parts, call)
        self._summarise[self.t] = summarise([part.size for part in parts])
        if expect is not None:
            self.verifier.begin(parts, accumulate, call, expect)
        self._step.prepare(self.t, self._micro(parts, shares, "train"), call, training=True)
        self._modes = [(m, m.training) for m in self.module.modules()]
        program = program_of(self._plans.of(len(parts)))
        actions = _shared(program.step(self.worker, self.t, ended=self._ended))
        self._still.begin()
        if self.flows:
            self._forget(self.t - self._plans.usual.steps_under_way)
            self._run(actions)
            self._still.check(self.t)
            self.t += 1
        else:
            self._train_up_to_updates(actions, is_last=is_last)
            self._still.check(self.t)

    def _train_up_to_updates(self, actions: list[Action], *, is_last: bool) -> None:
        if not is_last:
            actions = [a for a in actions if (a.payload or a.kind) not in _OF_UPDATES]
        begun = list(takewhile(lambda a: not _updates(a), actions))
        self._rest = actions[len(begun) :]
        for j in self.ownership.stages:
            self._grads.hide(self.t, j)
        with self._watch.watching(self.t, [self._weights]):
            self._run(begun)
        if not is_last:
            self._worker.settle()
        for j in self._owned:
            self._worker.fetch((Datum.SUM, self.t, j, None))
        for j in self.ownership.stages:
            self._grads.show(self.t, j)
        for j in self._owned:
            self._note_gradients(j, [p.grad for p in self.trained_of(j)])
        self._forget(self.t)

    def _note_gradients(self, j: int, grads: Gradients) -> None:
        assert self.cuts is not None
        self.verifier.note_gradients(j, self.cuts.parameters[j], grads)

    def take_arrived(self) -> list[tuple[int, Message]]:
        """Return the steps whose outcomes have come since the last call, with these."""
        taken, self.arrived = self.arrived, []
        return taken

    def all_finite(self, *, overflowed: bool) -> bool:
        """Say whether the gradients that lie in ``p.grad`` are finite, on all workers.

        Args:
            overflowed: whether those of this worker were not, when hooks had not seen them yet.
        """
        self.was_finite = not overflowed
        if self.num_workers > 1:
            if any(a.payload is Payload.N for a in self._rest):
                self.tell_norms(overflowed=overflowed)
            self.was_finite = self.norms.is_finite(self.t)
        return self.was_finite

    def tell_norms(self, *, overflowed: bool = False) -> None:
        """Let owners know each other's norms of the gradients that lie in ``p.grad``.

        Args:
            overflowed: tell that they are infinite, whatever hooks have made of them.
        """
        for j in self._owned:
            if overflowed:
                self.norms.note_overflow(self.t, j)
            self.norms.note(self.t, j, [p.grad for p in self.trained_of(j)])
        told = list(takewhile(lambda a: (a.payload or a.kind) not in _NEW_VERSIONS, self._rest))
        self._rest = self._rest[len(told) :]
        self._run(told)

    def begin_update(self) -> None:
        """Make room for the next version of all stages, where older ones are still read."""
        if self.versions is not None:
            for j in self.ownership.stages:
                self.versions.begin_update(j)

    def end_step(self) -> None:
        """Send on what an update has changed, and count the step."""
        if any(a.payload is Payload.N for a in self._rest):  # nobody has clipped by them
            self.tell_norms()
        self._worker.flight.note(a for a in self._rest if a.kind is Kind.UPDATE)
        self._run([a for a in self._rest if a.kind is not Kind.UPDATE])
        self._worker.settle()
        self.norms.forget(self.t)
        self._rest = []
        self.t += 1

    def flush(self) -> None:
        """Finish all steps that have begun."""
        last = self.t - 1
        if self.cuts is None or self.failed:
            return
        self.losses.settle()
        if self._ended == last:
            return
        self._put_off = self.program.put_off(self.worker, last)
        actions = self.program.flush(self.worker, last, ended=self._ended)
        with self._as_in_training():
            self._run(actions)
        self._worker.settle()
        self._put_off = {}
        self._forget(last)
        self._ended = last

    def evaluate(
        self, kind: str, batch: Any, call: Callable[[Any], Any], summarise: Summarise
    ) -> Message | Callable[[], Any]:
        """Run the forward of one batch, which is not cut; nothing is kept for a backward.

        Returns:
            The step itself, to be run whole on the batch that all have; or, if the whole module
            fits on no worker, what came of it, stage by stage.
        """
        self._evaluations, self._evaluated = self._evaluations + 1, kind
        t = -self._evaluations
        actions = self._plans.evaluation(self.worker, t)
        if self.foreign.are_here:
            batch = self._share_batch(t, batch, actions, self._worker.run)
            self._evaluated = ""
            return partial(call, batch)
        batch = self._share_batch(t, batch, actions)
        micro = self._micro([MicroBatch(batch, 1)], [whole_share], kind)
        self._summarise[t] = summarise
        self._step.prepare(t, micro, call, training=False)
        self._run(_shared(actions))
        self._evaluated = ""
        self._forget(t)
        (_, summary), self.arrived = self.arrived[-1], self.arrived[:-1]
        return summary

    # ------------------------------------------------------------------ what the program asks

    def update(self, a: Action) -> None:
        """Make a new version of a stage, with the gradients of its step in ``p.grad``."""
        assert self.config.apply is not None
        self._begin_version(a)
        self._grads.show(a.t, a.j)
        if self.config.unscale is None:
            self._note_gradients(a.j, [p.grad for p in self.trained_of(a.j)])
        self.verifier.note_state()
        self.config.apply(a.t, a.j)
        for p in self.trained_of(a.j):
            p.grad = None
        if a.j == self.ownership.stages[0]:  # backwards go from the last stage to the first
            self._forget(a.t)

    def tell(self, a: Action) -> None:
        """Note what came out of a step, and what it taught."""
        message = self._exchange.conclusions.pop(a.t, None)
        if message is None:
            summary, learnt = self._conclude(a.t), self._step.learnt
        else:
            summary = message
            learnt = {f: Lesson.from_data(data) for f, data in message.facts[1].items()}
        self._step.adopt(learnt)
        facts, _, changes, num = summary.facts
        if message is not None:
            self._state.adopt(a.t, summary.tensors[num:], changes)
        self.arrived.append((a.t, Message(summary.tensors[:num], facts)))

    def _conclude(self, t: int) -> Message:
        if t not in self._concluded:
            outcomes = self._step.take_outcomes(t)
            summary = self._summarise[t](list(outcomes.values()))
            learnt = {f: lesson.to_data() for f, lesson in self._step.learnt.items()}
            tensors, changes = packed({i: x.changes for i, x in outcomes.items()})
            facts = [summary.facts, learnt, changes, len(summary.tensors)]
            self._concluded[t] = Message([*summary.tensors, *tensors], facts)
        return self._concluded[t]

    def _complete(self, t: int, j: int) -> None:
        """Note the norms of gradients that are whole, and that are scaled as the loss was."""
        grads = self._grads.of(t, j)
        if self.config.unscale is not None:
            self._note_gradients(j, grads)
            self.config.unscale(t, grads)
        self.norms.note(t, j, grads)

    def _fetch(self, item: Item) -> None:
        self._worker.fetch(item)

    def _begin_version(self, a: Action) -> None:
        if self.versions is not None:
            for forward in self._put_off.get((step_of(a), a.j), ()):
                self.versions.reserve(forward)
            self.versions.begin_update(a.j)

    def _run(self, actions: Sequence[Action]) -> None:
        assert self.router is not None
        undone = undisturbed(self.device, self._held)
        with undone, self.foreign.running(), self.router.open():
            self._worker.run(actions)

    def _share_batch(
        self,
        t: int,
        batch: Any,
        actions: Sequence[Action],
        run: Callable[[Sequence[Action]], None] | None = None,
    ) -> Any:
        sharing = actions[: len(actions) - len(_shared(actions))]
        if not sharing:
            return batch
        peer = sharing[-1].peer
        mine = tensors(batch)
        self._exchange.batches[t] = Message(mine, len(mine))
        (run or self._run)(sharing)
        self._worker.fetch((Datum.BATCH, t))
        shared = self._exchange.batches.pop(t)
        if shared.facts != len(mine):
            raise StepError(
                f"the batch of {self._name(self.worker)} has {len(mine)} tensors, that of "
                f"{self._name(peer)} has {shared.facts}; allowed: batches of one structure; "
                "check the dataset of each rank"
            )
        told = iter(shared.tensors)
        return map_tensors(lambda x: next(told), batch)

    @contextmanager
    def _as_in_training(self) -> Iterator[None]:
        """Run forwards as their step would have: validation flushes in eval mode, without grad."""
        changed = [(m, was, m.training) for m, was in self._modes if m.training != was]
        for m, was, _ in changed:
            m.training = was  # of this module alone, as train() would set those inside, too
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            for m, _, now in changed:
                m.training = now

    def _check_number(self, num_parts: int) -> None:
        if self.versions is not None and num_parts != self.config.num_microbatches:
            raise StepError(
                f"a batch gave {num_parts} micro-batches, but "
                f"num_microbatches={self.config.num_microbatches}; "
                "allowed with delayed weights: as many in every step, as they decide which "
                "version is read; use DataLoader(drop_last=True), or larger batches"
            )

    def _micro(
        self, parts: Sequence[MicroBatch], shares: Sequence[Callable[[Tensor], Tensor]], kind: str
    ) -> dict[int, Micro]:
        """Return the micro-batches of this worker's replica by their numbers among all."""
        replicas, q = self.config.replicas, self.worker // self._size
        waits = self.device.type != "cpu"  # who reads a value, for what computes it
        sizes = [part.size for part in parts] if kind == "train" else []
        return {
            i * replicas + q: Micro(
                part.batch,
                weight,
                f"{kind} {signature(part.batch)}",
                f"{kind} {family(part.batch)}",
                BatchReads() if waits else None,
                words_for(i, sizes) if sizes else "",
            )
            for i, (part, weight) in enumerate(zip(parts, shares, strict=True))
        }

    def _forget(self, t: int) -> None:
        """Forget what is over with step ``t``; evaluations count downward from -1."""
        self._step.forget(t)
        self._summarise = {k: f for k, f in self._summarise.items() if k > t}
        self._concluded = {k: told for k, told in self._concluded.items() if k > t}
        self.norms.forget(t - 2 * self._plans.usual.steps_under_way)

    # ------------------------------------------------------------------ beside the program

    def share(self, j: int, message: Message) -> Message:
        """Return what the worker of stage ``j`` has, on every worker of its replica.

        All must call it, behind a flush.
        """
        source = self.worker_of(j)
        a = Action(kind=Kind.SEND, payload=Payload.M, t=self.t, j=j, peer=source)
        if self.worker != source:
            a = replace(a, kind=Kind.RECV)
            return self._messages.take(self._messages.post(a, None))
        for other in self.replica:
            if other != source:
                self._messages.send(replace(a, peer=other), None, message)
        return message

    def own_names(self) -> set[str]:
        """Return the names of the parameters and buffers of stages that this worker updates."""
        assert self.cuts is not None
        return {n for j in self._owned for n in (*self.cuts.parameters[j], *self.cuts.buffers[j])}

    def state(self) -> dict[str, Any] | None:
        """Return this worker's part of what a checkpoint needs; None before any step."""
        if self.cuts is None:
            return None
        return {
            "cuts": self.cuts.as_data(),
            "t": self.t,
            "seed": self.config.seed,
            "previous": {} if self.versions is None else self.versions.previous(),
        }

    def bring(self) -> None:
        """Have the whole module on every worker until the next step; all must call it.

        Behind a flush, or where no step is under way; not where it does not fit.
        """
        if self.cuts is not None and self.group is not None and not self.failed:
            self.foreign.bring()

    def _gather(self) -> dict[str, Tensor]:
        assert self.cuts is not None
        with self.naming_peers("to put the weights together"):
            return self._collectives.gather(self.cuts, self._plans.usual)

    @contextmanager
    def writable(self) -> Iterator[None]:
        if self.cuts is None:
            yield
            return
        self.ownership.restore()
        yield
        if not self.foreign.fits:  # else the next step lets it go
            self.foreign.leave()

    def reduce(self, tensor: Tensor, how: str) -> Tensor:
        """Reduce over all workers, of which those of a replica have the same value."""
        return self._collectives.reduce(tensor, how)

    # ------------------------------------------------------------------ failures, the end

    def fail(self, error: BaseException, todo: str = "") -> None:
        """Tell the other ranks why this one fails, and what to do; communicate no more."""
        if not self.failed:
            self.failed = True
            if self.transport is not None:
                crew = self.transport.crew
                crew.tell(words_of(error, crew.names, self.when, todo))

    @property
    def when(self) -> str:
        """Say where this worker is, as "in step 12"."""
        return self._when(-self._evaluations if self._evaluated else self.t)

    def _when(self, t: int) -> str:
        return f"in step {t}" if t >= 0 else f"in {self._evaluated} number {-t}"

    def _name(self, worker: int | None) -> str:
        assert self.transport is not None
        assert worker is not None
        names = self.transport.crew.names
        return names.of(names.rank_of(worker))

    def close(self) -> None:
        if self.failed and self.cuts is not None:
            self.ownership.give_up()
        if self.transport is not None:
            if not self.failed:
                with self.naming_peers("to finish"):
                    if self.cuts is not None:
                        self._messages.settle()
                    self._collectives.meet()
            if self.cuts is not None:
                self._messages.close()
                self._line.close()
            self.transport.close()
            if not self.failed:
                self.transport.disconnect()

    def naming_peers(self, what: str) -> AbstractContextManager[None]:
        """Name the workers that do not come while the body waits for them."""
        if self.transport is None:
            return nullcontext()
        return naming_peers(self.transport.crew, self.when, what)


def _shares_state(plan: Plan) -> bool:
    """Say whether replicas that do not update need the optimizer's state to predict."""
    return plan.axes.weights.looks_ahead and plan.replicas > 1


def _updates(a: Action) -> bool:
    return a.kind is Kind.UPDATE or (a.kind is Kind.SEND and a.payload is Payload.N)


def _shared(actions: Sequence[Action]) -> list[Action]:
    """Return what follows the sharing of the batch; only earlier steps have anything before."""
    behind = [n + 1 for n, a in enumerate(actions) if a.payload is Payload.D]
    return list(actions[max(behind, default=0) :])


def _no_wait(pending: Any, action: Action) -> None:
    raise AssertionError("one worker waits for nobody")


def _not_told(name: str, rank: int, t: int) -> StepError:
    return StepError(
        f"buffer {name!r} changed in step {t} on rank {rank}, which runs its stage, but not in "
        "the first micro-batch, so that others are not told of it, and would validate with and "
        "save what it was; allowed: buffers that change from the first step on; change it in the "
        "first one, too (as BatchNorm in train mode does), or use strategy='cyclic_dp' with "
        "relay_buffers='all'"
    )
