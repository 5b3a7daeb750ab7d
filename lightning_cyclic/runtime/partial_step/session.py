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

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan import Plan, program_of
from lightning_cyclic.plan.actions import Action, Kind, Lane, Payload
from lightning_cyclic.plan.dataflow import Datum, Item
from lightning_cyclic.runtime.absent import is_absent
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
from lightning_cyclic.runtime.partial_step.config import StagewiseConfig, Summarise
from lightning_cyclic.runtime.partial_step.exchange import Exchange
from lightning_cyclic.runtime.partial_step.graph_tier import GraphTier, words_of_moves
from lightning_cyclic.runtime.partial_step.micro_batches import noted, whole_share, words_for
from lightning_cyclic.runtime.partial_step.module_state import ModuleState
from lightning_cyclic.runtime.partial_step.own_stages import OwnStages
from lightning_cyclic.runtime.partial_step.plain_step import PlainStep
from lightning_cyclic.runtime.partial_step.stage_step import StageStep
from lightning_cyclic.runtime.partial_step.unit_schedules import UnitSchedules
from lightning_cyclic.runtime.partial_step.updates import Updates
from lightning_cyclic.runtime.partial_step.verifier import Expect, Verifier
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
        self._own: OwnStages | None = None  # as soon as the stages are found
        self.router: CallRouter | None = None
        self.updates: Updates
        self.verifier: Verifier
        self._evaluations = 0
        self._evaluated = ""  # the kind of the step of evaluation under way
        self._ended = -1  # the last step that a flush has ended
        self._weights: dict[str, Tensor] = {}  # that nothing changes while gradients are made
        self._held: dict[str, Any] = {}  # generators that the module keeps
        self._modes: list[tuple[nn.Module, bool]] = []  # of the last step that has begun
        self.batches = Batches(module, config, worker // self._size, device)
        self._collectives = Collectives(module, config.replicas, self._size, assembly)

    # ------------------------------------------------------------------ what there is

    @property
    def cuts(self) -> Cuts | None:
        return None if self._own is None else self._own.cuts

    @property
    @override
    def plan(self) -> Plan | None:
        return None if self._own is None else self._own.plan

    @property
    @override
    def stage_of(self) -> dict[str, int] | None:
        return None if self._own is None else self._own.cuts.stage_of

    @property
    @override
    def starts(self) -> tuple[str, ...] | None:
        return None if self._own is None else self._own.cuts.starts

    @override
    def named(self) -> dict[str, nn.Parameter]:
        return self.own.ownership.named()

    @property
    @override
    def with_state(self) -> list[nn.Parameter]:
        return self.own.with_state

    @override
    def own_names(self) -> set[str]:
        return self.own.own_names()

    @property
    def own(self) -> OwnStages:
        """Return what this worker has; the stages have been found."""
        assert self._own is not None
        return self._own

    @property
    def moves_state(self) -> bool:
        """Say whether optimizer state comes for the update of its stage, and goes behind it."""
        return self.config.tiers is not None

    @property
    def replica(self) -> tuple[int, ...]:
        """Return the workers of this worker's replica, input side first."""
        first = self.worker // self._size * self._size
        return tuple(range(first, first + self._size))

    @property
    def most_late(self) -> int:
        """Return how many steps later the last worker is told of a step than the first."""
        return max(map(self.own.program.lag, range(self.num_workers)))

    # ------------------------------------------------------------------ beginning

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
        if self._own is None:
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
        if self._own is not None and self._own.versions is not None:  # in the middle of a run
            self._own.versions.restart()  # whose steps count on
            return False
        if saved is None or "cuts" not in saved:
            return False
        # versions that the first forwards of a delayed rule would read were never made
        begins_anew = not fits and self.config.is_delayed
        self.t = 0 if begins_anew else saved["t"]
        self._ended = self.t - 1
        self.config = replace(self.config, seed=saved["seed"])
        if self._own is not None or not fits:
            return False
        self.begin(Cuts.from_data(saved["cuts"]))
        if self.own.versions is not None and saved["previous"]:
            self.own.versions.put_previous(saved["previous"])
        return True

    def begin(self, cuts: Cuts) -> None:
        """Take stages for found, and give up what other workers hold."""
        own = OwnStages(
            self.module, self.config, cuts, self.worker, self.num_workers, self.device,
            assembly=self.assembly, collectives=self._collectives,
        )  # fmt: skip
        plan = own.plan
        self.router = CallRouter(self.module, cuts, self.device)
        if self.transport is not None:
            stages = {w: own.stages_of(w) for w in range(self.num_workers)}
            self.transport.crew.names.know_stages(stages)
        own.make_versions(self.t)
        self._messages = self._make_messages(own)
        self._own = own  # now there is something to let go, should the rest fail
        state = ModuleState(
            self.module, cuts, self.config.not_state, own.ownership.stages, self.config.say,
            set(cuts.repeated) - set(own.ownership.stale),
        )  # fmt: skip
        grads = GradientStore(own.trained_of, self.config.sums)
        self._step = self._make_step(own, state)
        self._conclusions = Conclusions(self._step, state)
        parameters = [own.trained_of(j) for j in range(plan.num_stages)]
        norms = Norms(plan, self.worker, parameters, self._fetch)
        plain = self._make_plain_step(cuts)
        self.verifier = Verifier(own, self._step, plain, self._held, self.t)
        self.updates = Updates(
            own, grads, norms, conclusions=self._conclusions, verifier=self.verifier,
            flight=self.flight, run=self._run, is_over=self._forget,
        )  # fmt: skip
        self._exchange = Exchange(own, self._step, self.updates, self.batches)
        self._worker = Worker(
            own.program.flow(self.worker), self._messages, self._exchange, self._exchange,
            self.updates, self.flight,
            [Lane.TIERS] if self.moves_state or self._step.graphs is not None else [],
            lambda: self.config.timeout_s * 1.1 + 1,
        )  # fmt: skip
        self.updates.worker = self._worker
        for j in range(plan.num_stages):
            layout = norms.layout(j, self._messages)
            self._messages.know(Payload.N, j, layout)  # received ahead, several at once
        self._modes = [(m, m.training) for m in self.module.modules()]
        if not own.foreign.fits:  # else the first step lets it go
            own.foreign.leave()
        self.config.forms.leave(own.with_state)

    def _make_step(self, own: OwnStages, state: ModuleState) -> StageStep:
        """Return what runs F and B; note which weights nothing else may change meanwhile."""
        assert self.router is not None
        config, versions, ownership = self.config, own.versions, own.ownership
        step = StageStep(
            self.router, own.plan, ownership, state,
            config.seed, config.remat, versions, config.is_one_stage,
        )  # fmt: skip
        step.say = config.say
        if config.remat == "optimal":
            step.schedules = UnitSchedules(self.module, own.cuts, own.rooms(), config.say)
        if own.plan.offloads:
            step.graphs = self._make_graph_tier(own)
        step.held = self._held = generators_of(self.module, config.not_state)
        if config.is_under_autocast and not (versions is not None and versions.overwrites):
            step.casts = CastCopies()  # else copies have no one value
        still = {n: b for n, b in self.router.still_buffers().items() if b.layout == torch.strided}
        owned = self.router.still_buffers(of_units=True) if self.num_workers > 1 else {}
        kept = [n for n in owned if is_persistent(self.module, n)]
        self._still = self._still_buffers(kept)
        if versions is not None:
            step.watch = WeightWatch(self.rank, may_freeze=False)
            step.still = still
        elif not config.is_one_stage or config.remat != "never":  # else it is as one device
            here = ownership.here().items()
            self._weights = {**{n: p for n, p in here if n not in own.cuts.written}, **still}
        return step

    def _make_graph_tier(self, own: OwnStages) -> GraphTier:
        assert self.config.make_home is not None
        self.config.say(words_of_moves(own.program))

        def buffers() -> Iterator[Tensor]:
            return (b for b in self.module.buffers() if not is_absent(b))

        return GraphTier(self.config.make_home, self.device, buffers)

    def _make_plain_step(self, cuts: Cuts) -> PlainStep:
        assert self.router is not None
        config = self.config
        named = (cuts.parameters, cuts.buffers)
        stage_of = {n: j for each in named for j, names in enumerate(each) for n in names}
        return PlainStep(
            self.module, self.router, stage_of, self.device, config.seed, self._held,
            config.not_state, config.forms, config.sums, config.codes, config.activations,
            frozenset(stage_of if config.is_one_stage else cuts.written),
        )  # fmt: skip

    def _make_messages(self, own: OwnStages) -> Messages:
        if self.transport is None:
            return Messages(None, {}, _no_wait, self.device)
        waiter = Waiter(own.plan, self.transport, self._when)
        self._line = self.transport.connect(own.program)
        depths = own.program.depths
        return Messages(self._line, depths, waiter.wait, self.device, waiter.join)

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
        own = self.own
        self.verifier.prepare(self.t, batch, is_first=is_first)
        usual = own.program.step(self.worker, self.t, ended=self._ended)
        parts = self.batches.cut(self._share_batch(self.t, batch, usual, self._run))
        if own.versions is not None:
            self.batches.require_usual_number(parts)
        shares = self.batches.shares(self.t, [p.size for p in parts], accumulate)
        if self.config.is_one_stage and self.t == 0:  # else it is looked at to find the stages
            call = self.batches.along_samples(parts, call)
        self._conclusions.expect(self.t, summarise([part.size for part in parts]))
        if expect is not None:
            self.verifier.begin(self.t, parts, accumulate, call, expect)
        micro = self.batches.numbered(parts, shares, "train")
        self._step.prepare(self.t, micro, call, training=True)
        self._modes = [(m, m.training) for m in self.module.modules()]
        program = program_of(own.plan_of(len(parts)))
        _, actions = apart_from_sharing(program.step(self.worker, self.t, ended=self._ended))
        self._still.begin()
        if own.flows:
            self._forget(self.t - own.plan.steps_under_way)
            self._run(actions)
        else:
            self._train_up_to_updates(actions, is_last=is_last)
        self._still.check(self.t)
        if own.flows:  # else the step ends with its update
            self.t += 1

    def _train_up_to_updates(self, actions: list[Action], *, is_last: bool) -> None:
        begun = self.updates.up_to(actions, self.t, is_last=is_last)
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
        own, last = self._own, self.t - 1
        if own is None or self.failed:
            return
        self.losses.settle()
        if self._ended == last:
            return
        self.updates.put_off = own.program.put_off(self.worker, last)
        actions = own.program.flush(self.worker, last, ended=self._ended)
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
        actions = self.own.evaluation(t)
        if self.own.foreign.are_here:
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
        if self._step.graphs is not None:
            self._step.graphs.expect(actions)
        undone = undisturbed(self.device, self._held)
        with undone, self.own.foreign.running(), self.router.open():
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
        self.updates.norms.forget(t - 2 * self.own.plan.steps_under_way)

    # ------------------------------------------------------------------ beside the program

    def share(self, j: int, message: Message) -> Message:
        """Return what the worker of stage ``j`` has, on every worker of its replica.

        All must call it, behind a flush.
        """
        source = self.own.worker_of(j)
        a = Action(kind=Kind.SEND, payload=Payload.M, t=self.t, j=j, peer=source)
        if self.worker != source:
            a = replace(a, kind=Kind.RECV)
            return self._messages.take(self._messages.post(a, None))
        for other in self.replica:
            if other != source:
                self._messages.send(replace(a, peer=other), None, message)
        return message

    @override
    def state(self) -> dict[str, Any] | None:
        own = self._own
        if own is None:
            return None
        return {
            "cuts": own.cuts.as_data(),
            "t": self.t,
            "seed": self.config.seed,
            "previous": {} if own.versions is None else own.versions.previous(),
        }

    def bring(self) -> None:
        """Have the whole module on every worker until the next step; all must call it.

        Behind a flush, or where no step is under way; not where it does not fit.
        """
        if self._own is not None and not self.assembly.is_alone and not self.failed:
            self._own.foreign.bring()

    @contextmanager
    def writable(self) -> Iterator[None]:
        own = self._own
        if own is None:
            yield
            return
        own.ownership.restore()
        yield
        if not own.foreign.fits:  # else the next step lets it go
            own.foreign.leave()

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
        if self._own is not None:
            self._messages.settle()

    @override
    def _let_go(self) -> None:
        if self._own is None:
            return
        if self.failed:
            self._own.ownership.give_up()
        self._messages.close()
        if hasattr(self, "_worker"):
            self._worker.close()
        if self.transport is not None:
            self._line.close()


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
