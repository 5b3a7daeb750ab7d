"""The engine: run an unmodified training step as the F and B of all stages.

    forward            F0 F1 ...      hooks where stages begin: all that the program has up to F(j)
    backward           ... B1 B0      hooks of gradients: up to B(j), and what does not wait behind
    end_step           what is left of the step's block; t += 1
    flush              what is left of all steps

The engine knows no optimizer: an owner calls ``update(t, stages)`` with the total gradients of
step t in ``p.grad``, and the callee changes the parameters in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from lightning_cyclic.plan import Plan, program_of
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.dataflow import Datum, Item
from lightning_cyclic.plan.passes.updates import is_of_update, needs_older, needs_step, up_to_call
from lightning_cyclic.runtime.absent import is_absent
from lightning_cyclic.runtime.codecs.coded import Codes
from lightning_cyclic.runtime.codecs.weights import CodedWeights
from lightning_cyclic.runtime.failure_words import Waiter
from lightning_cyclic.runtime.flight_recorder import FlightRecorder
from lightning_cyclic.runtime.gradient_store import AS_MADE, GradientStore, Sum, SumDtypes
from lightning_cyclic.runtime.loss_scaling import Outcomes
from lightning_cyclic.runtime.messages import Messages
from lightning_cyclic.runtime.norms import Norms
from lightning_cyclic.runtime.stages.stage_map import StageMap
from lightning_cyclic.runtime.state_tier import ALL_STAYS, StateTiers
from lightning_cyclic.runtime.transport import AbstractTransport
from lightning_cyclic.runtime.weight_forms import ALL, WeightForms
from lightning_cyclic.runtime.weight_watch import WeightWatch
from lightning_cyclic.runtime.whole_step.engine_state import EngineState
from lightning_cyclic.runtime.whole_step.exchange import Exchange, Word, Words
from lightning_cyclic.runtime.whole_step.hooks import Entrances, GradientCollector, StepHooks
from lightning_cyclic.runtime.whole_step.local_weights import LocalWeights
from lightning_cyclic.runtime.whole_step.shards import (
    Replica,
    Shards,
    refuse_block,
    refuse_return,
)
from lightning_cyclic.runtime.whole_step.tiered_weights import replica_of
from lightning_cyclic.runtime.whole_step.versions import VersionStore
from lightning_cyclic.runtime.worker import Worker

Update = Callable[[int, Sequence[int]], Collection[int] | None]
"""(step, stages) -> those of them, if any, that stay as they were, since gradients overflowed."""


@final
class Engine:
    """Run the program of one worker that runs whole micro-batches.

    Args:
        module: the whole module; its parameters hold version ``state.t``.
        update: applies the total gradients of a step to the owned stages (step, stages).
        state: where to go on; None at the beginning.
        paced: whether workers that start together are brought into the timetable's stagger.
        aside: lets the body do, in the middle of the step, what is not of the step.
        forms: what of weights is trained, and travels. [all]
        sums: dtypes of sums of gradients.
        codes, weights: where a codec makes gradients, or new versions, smaller. [as they are]
        tiers: move what comes and goes by the plan.
    """

    _outcomes: Outcomes | None = None  # where updates may be skipped

    def __init__(  # noqa: PLR0913  (one worker: what it runs, what by, and what it may do)
        self,
        module: nn.Module,
        plan: Plan,
        stages: StageMap,
        transport: AbstractTransport,
        update: Update,
        state: EngineState | None = None,
        *,
        paced: bool = True,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
        forms: WeightForms = ALL,
        sums: SumDtypes = AS_MADE,
        codes: Codes | None = None,
        weights: CodedWeights | None = None,
        watch: WeightWatch | None = None,
        flight: FlightRecorder | None = None,
        tiers: StateTiers = ALL_STAYS,
    ) -> None:
        self.plan, self._tiers = plan, tiers
        self.stages, self.transport = stages, transport
        self.t, self._w = state.t if state else 0, transport.worker
        self._update = update
        self._paced, self._aside, self._watch = paced, aside, watch or WeightWatch(self._w)
        self._flight, self._words = flight or FlightRecorder(), Words()
        self._flushed_at = self._starts_at = self.t
        self._ended = self.t - 1  # the last step that a flush has ended
        # of the step under way: stage, round, and the next of its actions
        self._entered, self._round, self._at = -1, 0, 0
        self._actions: Sequence[Action] = ()
        self._older: dict[int, int] = {}  # own stage -> behind which of them its older one goes
        self._told: list[Action] = []  # norms that are to be told before an update is made
        named = dict(module.named_parameters())
        self._parameters = [[forms.trained(named[n]) for n in ns] for ns in stages.trained]
        self._waiter = Waiter(plan, transport)
        device = next((p.device for p in named.values()), torch.device("cpu"))
        self._line, waits = transport.connect(program_of(plan)), self._waiter
        depths = program_of(plan).depths
        self._messages = Messages(self._line, depths, waits.wait, device, waits.join)
        self.stores = self._make_stores(named)
        # at a flush: whether this worker has the parameters of all stages
        self._is_whole = all(store.versions for store in self.stores)
        if state is not None:
            self._restore_previous(state)
        self._grads = GradientStore(self.parameters, sums)
        self.norms = Norms(plan, self._w, self._parameters, self._fetch)
        self._exchange = Exchange(
            module, self._w, stages, self.stores, self._grads, self.norms, self._messages, forms,
            sums_travel=not plan.owners_add, codes=codes if plan.owners_add else None,
            weights=weights, owned=self.owned, tiers=tiers,
        )  # fmt: skip
        self.shards = self._exchange.shards = self._make_shards(module)
        self._worker = self._make_worker()
        self._local = self._exchange.local = self._make_local(state)
        self._shown: Replica = self.shards or replica_of(
            self.stores, tiers.of(Payload.P), self._bring, lambda: self._collector.is_collecting
        )
        again = self._enter_again if self._shown.comes_and_goes else None
        self._entrances = Entrances(module, stages, self.enter, self._w, again)
        self._collector = self._make_collector(forms)

    def _make_stores(self, named: Mapping[str, nn.Parameter]) -> list[VersionStore]:
        each, moves = enumerate(self.stages.stages), self._tiers.moves
        of_stages = ((j, map(named.__getitem__, stage.parameters)) for j, stage in each)
        return [self._store(j, [p for p in ps if not moves(p)]) for j, ps in of_stages]

    def _make_shards(self, module: nn.Module) -> Shards | None:
        if not self.plan.axes.sharding.gathers:
            return None
        owner_of = self.plan.owner
        return Shards(module, self.stages, self.stores, owner_of, self._w, self._bring)

    def _make_local(self, state: EngineState | None) -> LocalWeights | None:
        if self.plan.local is None:
            return None
        saved = None if state is None else state.local
        return LocalWeights(
            self.plan, self._w, self.stages, self.stores, self._grads, self._fetch, saved
        )

    def _make_collector(self, forms: WeightForms) -> GradientCollector:
        weights = [list(map(forms.weight, ps)) for ps in self._parameters]
        return GradientCollector(
            weights, self._parameters, self._hand_over, self._w, self._lasting(),
            self.stages.trained if self.plan.updates_early else (),
        )  # fmt: skip

    def _store(self, j: int, parameters: Sequence[nn.Parameter]) -> VersionStore:
        return VersionStore(
            parameters,
            self.t,
            self._messages,
            keeps=not self.plan.axes.sharding.gathers,
            is_here=not any(map(is_absent, parameters)),
            changing=partial(self._watch.changing, [j]),
        )

    def _make_worker(self) -> Worker:
        program, hooks, crew = program_of(self.plan), StepHooks(self._enter), self.transport.crew
        for j in range(self.plan.num_stages):
            for payload, layout in self._exchange.layouts(j).items():
                self._messages.know(payload, j, layout)
        # what the main thread waits for has less time, and says more
        return Worker(
            program.flow(self._w), self._messages, hooks, self._exchange, hooks, self._flight,
            program.waiting_lanes(self._w), lambda: crew.timeout_s * 1.1 + 1,
        )  # fmt: skip

    def note_outcomes(self, outcomes: Outcomes) -> None:
        """Note from now on how updates came out, of all versions that are made or read here."""
        self._outcomes = outcomes

    # ------------------------------------------------------------------ one training step

    @contextmanager
    def forward(self, *, first: bool = True, last: bool = True) -> Iterator[None]:
        """Run the body as the forward of this worker's micro-batch in step ``t``.

        A step has several batches while gradients accumulate, and all of them read the same
        versions. Each is a round of the plan; or the plan has one round for all of them, in which
        the first batch runs its forward, and the last its backward.
        """
        if first:
            self._begin(starts=self._paced and self.t == self._starts_at)
        elif self.plan.rounds > 1:
            self._round, self._entered = self._round + 1, -1
        if first or self.plan.rounds > 1:
            self._entrances.open()
            self.enter(0)
        with self._shown.packing():
            yield
        if first or self.plan.rounds > 1:
            self._entrances.close(self.t, self._entered)
            self.enter(self.plan.num_stages - 1)
        if last or self.plan.rounds > 1:
            self._run_on()
            self._exchange.check_handed_on()

    def enter(self, j: int) -> None:
        """Do what the program has up to F(.,j); stages before it that were skipped come first."""
        if self._entered >= j:
            if not (self._shown.is_read_away or self._shown.has(j)):
                refuse_return(self._w, j, self._shown.instead)
            return
        with self._aside():
            while self._entered < j:
                self._entered += 1
                self._run_to(Kind.F, self._entered)

    def adopt_forward(self) -> None:
        """Begin in the middle of step 0, whose forward (on version 0) found the stages.

        Module buffers have been handed on in it, but for those of the next step.
        """
        assert self.t == 0
        self._shown.stay()  # the graph knows no places
        self._begin(starts=False)
        is_over = [a.payload is Payload.R and a.t == 0 for a in self._actions]
        self._actions = [a for a, over in zip(self._actions, is_over, strict=True) if not over]
        for _ in range(self.plan.rounds - 1):  # whose gradients are in p.grad
            self._run_to(Kind.F, self.plan.num_stages - 1)
            self._run_to(Kind.B, 0)
        self._round = self.plan.rounds - 1
        self.enter(self.plan.num_stages - 1)
        self._run_on()
        self._exchange.check_handed_on()
        self._starts_at = 1

    @contextmanager
    def backward(self, *, last_of_window: bool) -> Iterator[None]:
        """Run the body as the backward of the step; collect gradients if it is the last one.

        Args:
            last_of_window: False while gradients only accumulate on this worker.
        """
        if last_of_window or self.plan.rounds > 1:
            with self._collector.collecting():
                yield
        else:
            yield

    def end_step(self) -> None:
        if self._local is not None:
            with self._watch.changing(range(self.plan.num_stages)):
                self._local.update_alone(self.t, self._update)
            self.norms.forget(self.t)
        self._run_to(None, 0)
        self.t += 1
        self._shown.stay_no_longer()
        is_alone = self.plan.has_one_version
        if self.plan.axes.weights.at_end_of_step or is_alone:
            if self.plan.local is None or not self.plan.local.delay:  # else lanes go on
                self._worker.settle()
            self._show_newest(range(self.plan.num_stages))
        # what others change between steps counts, where nobody refuses it
        may_change = is_alone or self.plan.weights != "freshest"
        self._tiers.end_step(self._fetch, leave=may_change)

    def follow(self, plan: Plan) -> None:
        """Go on by a plan that differs in its rounds; behind a flush, on all workers at once.

        Nothing is under way then, and the versions that are kept are those of any such plan.
        """
        assert self.is_flushed
        assert program_of(plan).channels == program_of(self.plan).channels
        self.plan = plan
        self._waiter.follow(plan)
        self._messages.follow(program_of(plan).depths)
        self._worker.follow(program_of(plan).flow(self._w))

    @property
    def ends(self) -> bool:
        """Say whether this worker's batch is its last of the epoch."""
        return self._words.ends

    @ends.setter
    def ends(self, ends: bool) -> None:
        self._words.ends = ends

    def request_stop(self) -> None:
        """Ask every worker to stop; the request travels with the sums and the parameters."""
        self._words.stop_wanted = True

    @property
    def stopping(self) -> bool:
        """Say whether training ends here; true on every worker from the same step on."""
        return self._words.stops(self.t)

    # ------------------------------------------------------------------ along the program

    def _begin(self, *, starts: bool) -> None:
        self._shown.free_all()  # what a flush has brought
        program = program_of(self.plan)
        self._actions = program.step(self._w, self.t, ended=self._ended, starts=starts)
        self._at, self._entered, self._round = 0, -1, 0
        self._older = self._find_older()

    def _find_older(self) -> dict[int, int]:
        """Return own stage -> after how many actions of the step it needs no older version.

        All that still read it, here and on other workers, do so in this step: whoever else does is
        sent it in this step. What a flush sends behind the step is the newest.
        """
        if self.shards is None:
            return {}
        ends = dict.fromkeys(self.owned, 0)
        for n, a in enumerate(self._actions, start=1):
            if a.j in ends and needs_older(a, self.t):
                ends[a.j] = n
        return ends

    def _drop_older(self) -> None:
        for j in [j for j, end in self._older.items() if end <= self._at]:
            del self._older[j]
            self.stores[j].leave_behind(self.t)

    def _run_to(self, kind: Kind | None, j: int, *, through: bool = True) -> None:
        """Go on up to the F or B of a stage, and through it, or to the end."""
        is_there = False
        while not is_there and self._at < len(self._actions):
            end = self._at
            for a in self._actions[end:]:
                if is_of_update(a):
                    break
                is_there = a.kind is kind and a.j == j
                end += through or not is_there
                if is_there:
                    break
            self._run_before(end)
            if not is_there and end < len(self._actions):
                self._make_versions()
                self._drop_older()

    def _run_on(self) -> None:
        """Do what follows and needs nothing of the step, nor of its hyper-parameters."""
        end = self._at
        for a in self._actions[end:]:
            if needs_step(a, adds_differences=self._local is not None):
                break
            end += 1
        self._run_before(end)

    def _run_before(self, end: int) -> None:
        begin, self._at = self._at, end
        if begin < end:
            self._worker.run(self._actions[begin:end])
        self._drop_older()

    def _hand_over(self, j: int, grads: list[Tensor | None]) -> None:
        is_last = self._round == self.plan.rounds - 1  # which speaks for the whole step
        self._grads.extend(self.t, j, Sum(grads, self._words.said() if is_last else 0))
        self._run_to(Kind.B, j)
        self._run_on()
        if self.plan.updates_early:
            self._run_to(Kind.B, j - 1, through=False)

    def _fetch(self, item: Item) -> None:
        self._worker.fetch(item)

    def _enter(self, a: Action) -> None:
        assert a.v is not None
        self._shown.enter(a.j, a.v)
        self._note_word(a.j, a.v)

    def _bring(self, j: int, v: int) -> None:
        """Have another worker's stage come again, whose backward begins.

        Raises:
            StepError: it is not the turn of its backward.
        """
        if not self._collector.is_collecting or self._collector.is_over(j):
            refuse_return(self._w, j, self._shown.instead)
        self._collector.begin_stage(j)
        with self._aside():
            self._run_to(Kind.B, j, through=False)
            self._fetch((Datum.WEIGHTS, j, v))
        self._shown.enter(j, v)

    def _enter_again(self, j: int) -> None:
        """Have the parameters of a stage whose modules a backward runs again."""
        if self._collector.is_collecting and not self._shown.has(j):
            if not self._collector.is_turn_of(j):
                refuse_block(self._w, j, self._shown.instead)
            self._bring(j, self.plan.reads(self.t, self._w, j))

    def _note_word(self, j: int, v: int) -> None:
        self._note_outcome(j, v)
        # one stage speaks for all, so that every worker counts from the same version
        if j == self.plan.num_stages - 1 and v > 0:
            self._words.hear(v, Word(self.stores[j].words[v]))

    def _note_outcome(self, j: int, v: int) -> None:
        if self._outcomes is not None and v > 0:
            self._outcomes.note(v - 1, j, not self.stores[j].words[v] & Word.OVERFLOW)

    # ------------------------------------------------------------------ making versions

    def _make_versions(self) -> None:
        """Make new versions, of all stages that are due at this place or of the first of them."""
        t = self._actions[self._at].t
        due = up_to_call(self._actions[self._at :], t, apart=self.plan.updates_apart)
        self._at += len(due)
        self._told = [a for a in due if a.kind is Kind.SEND]
        self._worker.run(a for a in due if a.kind is Kind.RECV)
        updates = [a for a in due if a.kind is Kind.UPDATE]
        stages = [a.j for a in updates]
        if self._local is not None:
            with self._watch.changing(stages):
                self._local.move_on(t, stages)
            self._flight.note(updates)
            return
        with self._watch.changing(stages):
            totals = {j: self._advance(t + 1, j) for j in stages}
            skipped = self._update(t, stages) or ()
            for j in stages:
                self.stores[j].end_update(t + 1)
                self._exchange.note_made(j, t + 1)
                self._tiers.check(j)
        self._tell_norms()
        self._flight.note(updates)
        for j, total in totals.items():
            for p in self._parameters[j]:
                p.grad = None
            self.stores[j].words[t + 1] = total.word | (Word.OVERFLOW if j in skipped else 0)
            self._note_outcome(j, t + 1)
            if total.buffer is not None:
                total.buffer.let_go()
        if not any(a.kind is Kind.UPDATE and a.t == t for a in self._actions[self._at :]):
            self.norms.forget(t)  # of all stages, which are clipped one by one

    def _advance(self, v: int, j: int) -> Sum:
        """Let the parameters be version ``v``, with its gradients, and the values before it."""
        self._fetch((Datum.SUM, v - 1, j, None))
        self._tiers.bring(j, v - 1, self._fetch)
        self.stores[j].begin_update(v, self._oldest(j, v))
        return self._grads.show(v - 1, j)

    def _oldest(self, j: int, v: int) -> int:
        """Return the oldest version of an own stage that is needed when version v is there."""
        if self.plan.axes.weights.at_end_of_step:
            return v  # whoever is behind has used the one before, as its gradients are there
        is_over = v == self.t and self._older.get(j, self._at + 1) <= self._at
        if is_over and self.stores[j].has_left(v - 1):
            return v
        read = self.plan.reads(self.t if j > self._entered else self.t + 1, self._w, j)
        return self._shown.oldest(v, read)

    def _tell_norms(self) -> None:
        told, self._told = self._told, []
        for a in told:
            self._note_norms(a.t, a.j)
        self._worker.run(told)

    def _note_norms(self, t: int, j: int) -> None:
        shown = [p.grad for p in self._parameters[j]]
        self.norms.note(t, j, self._grads.of(t, j) if shown.count(None) == len(shown) else shown)

    def total_norm(self, t: int, order: Sequence[nn.Parameter]) -> Tensor:
        """Return the 2-norm of step ``t``'s gradients over all stages, shape ().

        Args:
            t: the step whose totals lie in ``p.grad`` of the stages that are updated.
            order: all trained parameters, in the order in which the norms are reduced.
        """
        self._tell_all_norms(t)
        return self.norms.total(t, order)

    def all_finite(self, t: int, overflowed: Collection[int]) -> bool:
        """Say whether the gradients of all stages are finite; where owners know all norms.

        Args:
            t: the step whose totals lie in ``p.grad`` of the stages that are updated.
            overflowed: own stages whose gradients are not.
        """
        for j in overflowed:
            self.norms.note_overflow(t, j)
        self._tell_all_norms(t)
        return self.norms.is_finite(t)

    def _tell_all_norms(self, t: int) -> None:
        for j in self.optimized:
            self._note_norms(t, j)
        self._tell_norms()

    @property
    def owned(self) -> tuple[int, ...]:
        return tuple(j for j in range(self.plan.num_stages) if self.plan.owner(j) == self._w)

    @property
    def optimized(self) -> tuple[int, ...]:
        """List the stages that the optimizer is called for here, and has state of."""
        return tuple(j for j in range(self.plan.num_stages) if self.plan.optimizes(self._w, j))

    def _lasting(self) -> frozenset[int]:
        """Return the stages whose frozen parameters leave when their backward is over."""
        each = enumerate(zip(self.stores, self._parameters, strict=True))
        partly = frozenset(j for j, (store, ps) in each if len(ps) < len(store.parameters))
        partly = partly.difference(self.owned if self.shards is not None else ())
        return partly | self._shown.resting

    # ------------------------------------------------------------------ flush and state

    @property
    def is_flushed(self) -> bool:
        """Say whether no update is in flight."""
        return self._flushed_at == self.t

    def flush(self, *, whole: bool = True) -> None:
        """Finish every update in flight and show the newest version; all workers must call it.

        Args:
            whole: of every stage on every worker; else where parameters stay at their owners
                (sharding "full") these alone have them.
        """
        program, last = program_of(self.plan), self.t - 1
        if self.is_flushed and (self._is_whole or not whole):
            return
        if self.is_flushed:
            self._actions = program.bring(self._w, last)
        else:
            self._actions = program.flush(self._w, last, ended=self._ended, whole=whole)
        self._at, self._entered = 0, -1
        self._older.clear()
        self._run_to(None, 0)
        self._worker.settle()
        self._is_whole = whole or not self.plan.axes.sharding.gathers
        self._show_newest(range(self.plan.num_stages) if self._is_whole else self.owned)
        if not self._is_whole:
            self._shown.drop_copies()
        if self._local is not None:
            self._local.show_outer()
        self._ended = last
        self._flushed_at = self._starts_at = self.t

    def _show_newest(self, stages: Iterable[int]) -> None:
        for j in stages:
            self._shown.show_newest(j, self.t, self.plan.reads(self.t, self._w, j))
            self._note_word(j, self.t)

    def state(self) -> EngineState:
        previous: dict[str, Tensor] = {}
        for stage, store in zip(self.stages.stages, self.stores, strict=True):
            if self.t - 1 in store:
                before, now = store[self.t - 1].tensors, store[self.t].tensors
                each = zip(stage.parameters, before, now, strict=True)
                resting = self.stages.untrained  # but what was frozen just now has two versions
                previous |= {
                    n: x.clone() for n, x, y in each if n not in resting or not torch.equal(x, y)
                }
        local = None if self._local is None else self._local.state(self.t)
        return EngineState(t=self.t, previous=previous, local=local)

    def _restore_previous(self, state: EngineState) -> None:
        if state.t == 0:
            return
        gathers, owned = self.plan.axes.sharding.gathers, self.owned
        for j, (stage, store) in enumerate(zip(self.stages.stages, self.stores, strict=True)):
            if gathers and j not in owned:  # its owner serves it
                continue
            is_known = any(n in state.previous for n in stage.parameters)
            if is_known or self._oldest_read(state.t, j) < state.t:
                # what is not known was frozen, or replaced: it is what there is
                named = zip(stage.parameters, store.parameters, strict=True)
                store.write(state.t - 1, [state.previous.get(n, p.data) for n, p in named])

    def _oldest_read(self, t: int, j: int) -> int:
        """Return the oldest version of a stage that step t has of this worker."""
        gathers = self.plan.axes.sharding.gathers  # owners serve all others
        readers = range(self.plan.num_workers) if gathers else (self._w,)
        return min(self.plan.reads(t, w, j) for w in readers)

    def parameters(self, j: int) -> Sequence[nn.Parameter]:
        return self._parameters[j]

    def close(self) -> None:
        """Take the hooks off and end the lanes; parameters keep the version that is shown."""
        self._collector.remove()
        self._shown.release()
        for store in self.stores:
            store.release()
        self._entrances.remove()
        self._worker.close()
        self._messages.close()
        self._line.close()
