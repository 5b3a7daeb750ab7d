"""A session of stage-at-a-time training: one worker, from its first step to its last.

first step      survey the module, choose the stages, give up what other workers hold
every step      what the program has for its batch
between steps   updates, flushes, validation, whole weights for a checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_cyclic.errors import PlanError, StepError
from lightning_cyclic.plan import Plan, program_of
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.dataflow import Datum, Item
from lightning_cyclic.plan.program import Program
from lightning_cyclic.runtime.absent import is_absent, make_present
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.cast_copies import CastCopies
from lightning_cyclic.runtime.failure_words import Waiter
from lightning_cyclic.runtime.gradient_store import GradientStore
from lightning_cyclic.runtime.messages import Message, Messages
from lightning_cyclic.runtime.norms import Norms
from lightning_cyclic.runtime.partial_step.batches import Batches, apart_from_sharing
from lightning_cyclic.runtime.partial_step.call_router import CallRouter
from lightning_cyclic.runtime.partial_step.collectives import Collectives, rank_of
from lightning_cyclic.runtime.partial_step.conclusions import Conclusions
from lightning_cyclic.runtime.partial_step.config import Plans, StagewiseConfig, Summarise
from lightning_cyclic.runtime.partial_step.exchange import Exchange, stages_of
from lightning_cyclic.runtime.partial_step.micro_batches import noted, whole_share, words_for
from lightning_cyclic.runtime.partial_step.module_state import ModuleState
from lightning_cyclic.runtime.partial_step.ownership import ForeignWeights, Ownership
from lightning_cyclic.runtime.partial_step.plain_step import PlainStep
from lightning_cyclic.runtime.partial_step.stage_step import StageStep
from lightning_cyclic.runtime.partial_step.updates import Updates
from lightning_cyclic.runtime.partial_step.verifier import Expect, Verifier
from lightning_cyclic.runtime.partial_step.versions import Versions
from lightning_cyclic.runtime.predict import Foresight
from lightning_cyclic.runtime.randomness import undisturbed
from lightning_cyclic.runtime.session import AbstractSession
from lightning_cyclic.runtime.snapshot import generators_of
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.transport import CountingTransport
from lightning_cyclic.runtime.values.split import (
    MicroBatch,
    refuse_iterators,
)
from lightning_cyclic.runtime.values.trees import map_tensors
from lightning_cyclic.runtime.weight_watch import WeightWatch, is_persistent
from lightning_cyclic.runtime.worker import Worker


@final
class StagewiseSession(AbstractSession):
    """Run one worker's part of pipelined steps.

    Args:
        transport: how messages travel; None for one worker.
        assembly: all ranks. [there is but one]
    """

    def __init__(
        self,
        module: nn.Module,
        config: StagewiseConfig,
        transport: CountingTransport | None,
        worker: int,
        num_workers: int,
        device: torch.device,
        assembly: Assembly | None = None,
    ) -> None:
        self._size = num_workers // config.replicas
        assembly, rank = assembly or Assembly(), rank_of(worker, self._size)
        super().__init__(module, assembly, worker, rank, device, _not_told)
        self.config = config
        self.transport = transport
        self.num_workers = num_workers
        self.t = 0
        self.cuts: Cuts | None = None
        self.router: CallRouter | None = None
        self.versions: Versions | None = None
        self.ownership: Ownership
        self.foreign: ForeignWeights
        self.updates: Updates
        self._evaluations = 0
        self._evaluated = ""  # the kind of the step of evaluation under way
        self._ended = -1  # the last step that a flush has ended
        self._weights: dict[str, Tensor] = {}  # that nothing changes while gradients are made
        self._held: dict[str, Any] = {}  # generators that the module keeps
        self._modes: list[tuple[nn.Module, bool]] = []  # of the last step that has begun
        self.batches = Batches(module, config, worker // self._size, device)
        self._collectives = Collectives(module, config.replicas, self._size, assembly)

    # ------------------------------------------------------------------ beginning

    @property
    @override
    def plan(self) -> Plan | None:
        # of a step whose batch has as many micro-batches as asked for
        return None if self.cuts is None else self._plans.usual

    @property
    def program(self) -> Program:
        return program_of(self._plans.usual)

    @property
    @override
    def stage_of(self) -> dict[str, int] | None:
        return None if self.cuts is None else self.cuts.stage_of

    @property
    @override
    def starts(self) -> tuple[str, ...] | None:
        return None if self.cuts is None else self.cuts.starts

    @override
    def named(self) -> dict[str, nn.Parameter]:
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
            parts = [MicroBatch(copied, 1)] if kind else self.batches.cut(copied)
            where = "" if kind else f"{words_for(0, [p.size for p in parts])}, to find the stages"
            call = self.batches.along_samples(parts[:1], call)
            step = partial(noted, where, call, parts[0].batch)
            find = partial(self.config.find_cuts, self.module, step)
            what = "to agree on the stages"
            data = self.assembly.ask_first(lambda: find().as_data(), what)
            self.begin(Cuts.from_data(data))

    @override
    def resume(self, saved: Mapping[str, Any] | None, *, fits: bool) -> bool:
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
        state = ModuleState(
            self.module, cuts, self.config.not_state, ownership.stages, plan.num_stages,
            self.config.say, repeated,
        )  # fmt: skip
        self.foreign = ForeignWeights(
            self.module, cuts.changing, ownership, lambda j: rank_of(plan.owner(j), self._size),
            fits, self._gather,
        )  # fmt: skip
        grads = GradientStore(self.trained_of, self.config.sums)
        self._step = self._make_step(cuts, plan, state)
        self._conclusions = Conclusions(self._step, state)
        parameters = [self.trained_of(j) for j in range(plan.num_stages)]
        norms = Norms(plan, self.worker, parameters, self._fetch)
        self.verifier = Verifier(self, self._make_plain_step(cuts), self._held)
        self.updates = Updates(
            self.config, ownership, self._owned, grads, norms, self.versions,
            conclusions=self._conclusions, verifier=self.verifier,
            flight=self.flight, run=self._run, is_over=self._forget,
        )  # fmt: skip
        self._exchange = Exchange(
            plan, self.worker, self._step, ownership, self.updates, self.batches
        )
        self._worker = Worker(
            self.program.flow(self.worker), self._messages, self._exchange, self._exchange,
            self.updates, self.flight,
        )  # fmt: skip
        self.updates.worker = self._worker
        for j in range(plan.num_stages):
            layout = norms.layout(j, self._messages)
            self._messages.know(Payload.N, j, layout)  # received ahead, several at once
        self._modes = [(m, m.training) for m in self.module.modules()]
        if not fits:  # else the first step lets it go
            self.foreign.leave()
        self.config.forms.leave(self.with_state)

    def _make_step(self, cuts: Cuts, plan: Plan, state: ModuleState) -> StageStep:
        """Return what runs F and B; note which weights nothing else may change meanwhile."""
        assert self.router is not None
        config, versions, ownership = self.config, self.versions, self.ownership
        step = StageStep(
            self.router, plan, ownership, state,
            config.seed, config.remat, versions, config.is_one_stage,
        )  # fmt: skip
        step.say = config.say
        step.held = self._held = generators_of(self.module, config.not_state)
        if config.is_under_autocast and not (versions is not None and versions.overwrites):
            step.casts = CastCopies()  # else copies have no one value
        still = {n: b for n, b in self.router.still_buffers().items() if b.layout == torch.strided}
        own = self.router.still_buffers(of_units=True) if self.num_workers > 1 else {}
        kept = [n for n in own if is_persistent(self.module, n)]
        self._still = self._still_buffers(kept)
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

    def _make_versions(self, plan: Plan, ownership: Ownership) -> Versions:
        stages = self._versioned(plan, ownership)
        foresight = None
        if plan.axes.weights.looks_ahead:
            ownership.refuse_ties(plan.weights)
            assert self.config.guess is not None
            foresight = Foresight(plan, stages, self.config.guess)
        forms = self.config.forms
        readers = ownership.readers(stages)
        return Versions(self.module, plan, stages, self.t, readers, foresight, forms)

    def _versioned(self, plan: Plan, ownership: Ownership) -> dict[int, dict[str, nn.Parameter]]:
        """Return stage -> name -> parameter of which this worker has versions."""
        return ownership.versioned(() if plan.axes.weights.looks_ahead else self._had_versions)

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
    @override
    def with_state(self) -> list[nn.Parameter]:
        # of what it updates, or is told of and predicts
        predicts = _shares_state(self._plans.usual)
        own = [j for j in self.ownership.stages if predicts or j in self._owned]
        return [p for j in own for p in self.trained_of(j)]

    def trained_of(self, j: int) -> list[nn.Parameter]:
        """Return what the optimizer has of a stage, in the order of its parameters."""
        return list(map(self.config.forms.trained, self.ownership.owned(j)))

    def worker_of(self, stage: int) -> int:
        return self._plans.usual.worker_of(self.worker // self._size, stage)

    @property
    def most_late(self) -> int:
        """Return how many steps later the last worker is told of a step than the first."""
        return max(map(self.program.lag, range(self.num_workers)))

    # ------------------------------------------------------------------ a step

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
        usual = self.program.step(self.worker, self.t, ended=self._ended)
        parts = self.batches.cut(self._share_batch(self.t, batch, usual, self._run))
        if self.versions is not None:
            self.batches.require_usual_number(parts)
        shares = self.batches.shares(self.t, [p.size for p in parts], accumulate)
        if self.config.is_one_stage and self.t == 0:  # else it is looked at to find the stages
            call = self.batches.along_samples(parts, call)
        self._conclusions.expect(self.t, summarise([part.size for part in parts]))
        if expect is not None:
            self.verifier.begin(parts, accumulate, call, expect)
        micro = self.batches.numbered(parts, shares, "train")
        self._step.prepare(self.t, micro, call, training=True)
        self._modes = [(m, m.training) for m in self.module.modules()]
        program = program_of(self._plans.of(len(parts)))
        _, actions = apart_from_sharing(program.step(self.worker, self.t, ended=self._ended))
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
        begun = self.updates.up_to(actions, is_last=is_last)
        self.updates.hide(self.t)
        with self._watch.watching(self.t, [self._weights]):
            self._run(begun)
        if not is_last:
            self._worker.settle()
        self.updates.show(self.t)
        self._forget(self.t)

    def take_arrived(self) -> list[tuple[int, Message]]:
        """Return the steps whose outcomes have come since the last call, with these."""
        return self._conclusions.take()

    def end_step(self) -> None:
        """Send on what an update has changed, and count the step."""
        self.updates.end(self.t)
        self.t += 1

    @override
    def flush(self) -> None:
        last = self.t - 1
        if self.cuts is None or self.failed:
            return
        self.losses.settle()
        if self._ended == last:
            return
        self.updates.put_off = self.program.put_off(self.worker, last)
        actions = self.program.flush(self.worker, last, ended=self._ended)
        with self._as_in_training():
            self._run(actions)
        self._worker.settle()
        self.updates.put_off = {}
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
        batch = self._share_batch(t, batch, actions, self._run)
        micro = self.batches.numbered([MicroBatch(batch, 1)], [whole_share], kind)
        self._conclusions.expect(t, summarise)
        self._step.prepare(t, micro, call, training=False)
        self._run(apart_from_sharing(actions)[1])
        self._evaluated = ""
        self._forget(t)
        return self._conclusions.take_last()

    def _fetch(self, item: Item) -> None:
        self._worker.fetch(item)

    def _run(self, actions: Sequence[Action]) -> None:
        assert self.router is not None
        undone = undisturbed(self.device, self._held)
        with undone, self.foreign.running(), self.router.open():
            self._worker.run(actions)

    def _share_batch(
        self, t: int, batch: Any, actions: Sequence[Action],
        run: Callable[[Sequence[Action]], None],
    ) -> Any:  # fmt: skip
        sharing, _ = apart_from_sharing(actions)

        def take() -> None:
            run(sharing)
            self._worker.fetch((Datum.BATCH, t))

        return self.batches.share(t, batch, sharing, take, self._name)

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

    def _forget(self, t: int) -> None:
        """Forget what is over with step ``t``; evaluations count downward from -1."""
        self._step.forget(t)
        self._conclusions.forget(t)
        self.updates.norms.forget(t - 2 * self._plans.usual.steps_under_way)

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

    @override
    def own_names(self) -> set[str]:
        assert self.cuts is not None
        return {n for j in self._owned for n in (*self.cuts.parameters[j], *self.cuts.buffers[j])}

    @override
    def state(self) -> dict[str, Any] | None:
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
        if self.cuts is not None and not self.assembly.is_alone and not self.failed:
            self.foreign.bring()

    def _gather(self) -> dict[str, Tensor]:
        assert self.cuts is not None
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

    @property
    @override
    def when(self) -> str:
        return self._when(-self._evaluations if self._evaluated else self.t)

    def _when(self, t: int) -> str:
        return f"in step {t}" if t >= 0 else f"in {self._evaluated} number {-t}"

    def _name(self, worker: int | None) -> str:
        assert self.transport is not None
        names = self.transport.crew.names
        return names.of(names.rank_of(self.worker if worker is None else worker))

    @override
    def _settle(self) -> None:
        if self.cuts is not None:
            self._messages.settle()

    @override
    def _let_go(self) -> None:
        if self.cuts is None:
            return
        if self.failed:
            self.ownership.give_up()
        self._messages.close()
        if self.transport is not None:
            self._line.close()
            if not self.failed:
                self._collectives.close()


def _shares_state(plan: Plan) -> bool:
    """Say whether replicas that do not update need the optimizer's state to predict."""
    return plan.axes.weights.looks_ahead and plan.replicas > 1


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
