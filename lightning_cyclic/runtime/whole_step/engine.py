"""The engine: execute one worker's script around an unmodified training step.

    forward            enter(0) F0 enter(1) F1 ...      enter(j): receive or make the version that
                                                        the program reads, show it, relay buffers
    backward           ... B1 hand_over(1) B0 hand_over(0)
                                                        hand_over(j): gradients to the sum lane
    end_step           whatever autograd did not reach; t += 1
    flush              updates in flight are finished; no version that a later F reads changes

The engine knows no optimizer: an owner calls ``update(t, stages)`` with the total gradients of
step t in ``p.grad``, and the callee changes the parameters in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.norms import NormExchange
from lightning_cyclic.runtime.stages.stage_map import StageMap
from lightning_cyclic.runtime.transport import AbstractTransport
from lightning_cyclic.runtime.waiting import Waiter
from lightning_cyclic.runtime.whole_step.arrivals import Arrivals
from lightning_cyclic.runtime.whole_step.entrances import Entrances
from lightning_cyclic.runtime.whole_step.flat import FlatBuffer, FlatLayout, Word
from lightning_cyclic.runtime.whole_step.gradients import GradientCollector
from lightning_cyclic.runtime.whole_step.lanes import Ledger, RelayLane, SumLane
from lightning_cyclic.runtime.whole_step.pace import Pace
from lightning_cyclic.runtime.whole_step.relay import BufferRelay
from lightning_cyclic.runtime.whole_step.script import make_script
from lightning_cyclic.runtime.whole_step.totals import Totals
from lightning_cyclic.runtime.whole_step.versions import VersionStore
from lightning_cyclic.runtime.whole_step.words import Words

Update = Callable[[int, Sequence[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Hold what a worker needs, beside weights and optimizer state, to go on with the same bits.

    Args:
        t: steps done; every update up to version t has been applied.
        previous: name -> value in version t-1, for the stages that step t still reads so.
    """

    t: int
    previous: dict[str, Tensor]


@final
class Engine:
    """Run the replicated program of one worker.

    Args:
        module: the whole module; its parameters hold version ``state.t``.
        plan: a plan with replicated placement.
        stages: which parameters and buffers belong to which stage.
        transport: how messages travel.
        update: applies the total gradients of a step to the owned stages (step, stages).
        state: where to go on; None at the beginning.
        paced: whether workers that start together are brought into the timetable's stagger.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        stages: StageMap,
        transport: AbstractTransport,
        update: Update,
        state: EngineState | None = None,
        *,
        paced: bool = True,
    ) -> None:
        self.plan = plan
        self.stages = stages
        self.transport = transport
        self.script = make_script(plan, transport.worker)
        self.t = state.t if state else 0
        self._words = Words()
        self._flushing = False
        self._flushed_at = self.t
        self._last = True
        self._update = update
        # the last worker holds the totals when its step ends; under a delayed rule nobody reads
        # the new version before the step after next, so it is made and sent as early as possible
        self._updates_at_once = plan.sharding == "none" and bool(self.script.owned)
        self._entered = -1
        named = dict(module.named_parameters())
        self._parameters = [[named[n] for n in s.parameters] for s in stages.stages]
        self.stores = [VersionStore(ps, self.t) for ps in self._parameters]
        if state is not None:
            self._restore_previous(state)
        waiter = Waiter(plan, self.script, transport)
        self._wait = waiter.wait
        self._ledger = Ledger(transport.timeout_s)
        layouts = [FlatLayout(ps) for ps in self._parameters]
        self._sums = SumLane(self.script, layouts, transport, self._ledger, self._wait)
        self._relay = RelayLane(self.script, transport, self._ledger, self._wait)
        self._buffers = BufferRelay(
            module, stages, self.script, transport, self._wait, ready=transport.worker == 0
        )
        self._pace = Pace(plan, self.script, transport, self._wait, wanted=paced)
        self._arrivals = Arrivals(
            self.script, self.stores, transport, self._relay, self._ledger, waiter
        )
        self._totals = Totals(self.script, transport, self._sums, self._ledger, waiter)
        for j, stage in enumerate(self.script.stages):
            self._arrivals.post(j)
            if stage.owned and self._totals.comes_from_afar(j):
                self._totals.post(j, layouts[j].new())
        self._entrances = Entrances(module, stages, self.enter, transport.worker)
        self._gradients = GradientCollector(self._parameters, self._hand_over, transport.worker)
        self._arrivals.expect_step(self.t)

    # ------------------------------------------------------------------ one training step

    @contextmanager
    def forward(self, *, first: bool = True, last: bool = True) -> Iterator[None]:
        """Run the body as the forward of this worker's micro-batch in step ``t``.

        Args:
            first: whether it is the first batch of the step; a step has several batches while
                gradients accumulate, and all of them read the same versions.
            last: whether it is the last batch of the step.
        """
        self._ledger.check()
        self._last = last
        if first:
            self._entered = -1
            self._pace.begin(self.t)
            self._entrances.open()
            self.enter(0)
        yield
        if first:
            self._entrances.close(self.t, self._entered)
            self.enter(self.plan.num_stages - 1)
            self._pace.reached(self.t, self.plan.num_stages)
        if last:
            self._finish_last(first=first)

    def enter(self, j: int) -> None:
        """Do what the program has before F(.,j); stages before it that were skipped come first."""
        while self._entered < j:
            if self._entered >= 0 and self._last:
                self._buffers.hand_on(self.t, self._entered)
            k = self._entered + 1
            self._pace.reached(self.t, k)
            self._buffers.receive(self.t, k)
            self._read(k)
            self._entered = k

    def adopt_forward(self) -> None:
        """Begin in the middle of step 0, whose forward (on version 0) found the stages."""
        assert self.t == 0
        self._entered = self.plan.num_stages - 1
        if self.transport.worker == self.transport.num_workers - 1:
            for j in range(self.plan.num_stages):
                self._buffers.hand_on(0, j)
        self._buffers.step_done()

    @contextmanager
    def backward(self, *, last_of_window: bool) -> Iterator[None]:
        """Run the body as the backward of the step; collect gradients if it is the last one.

        Args:
            last_of_window: False while gradients only accumulate on this worker.
        """
        if last_of_window:
            with self._gradients.collecting():
                yield
        else:
            yield

    def end_step(self) -> None:
        """Count the step; what is due before the next one is expected from now on."""
        self.t += 1
        self._arrivals.expect_step(self.t)
        if self._updates_at_once:
            self._make(self.t)
        if self.plan.weights == "sync":
            self._finish_updates()

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

    def _hand_over(self, j: int, grads: list[Tensor | None]) -> None:
        self._sums.put((self.t, j, grads, self._words.said()))

    def _finish_last(self, *, first: bool) -> None:
        last = self.plan.num_stages - 1
        for j in [last] if first else range(last + 1):
            self._buffers.hand_on(self.t, j)
        self._buffers.step_done()

    # ------------------------------------------------------------------ reading versions

    def _read(self, j: int) -> None:
        v = max(self.t - self.script.stages[j].lag, 0)
        store = self.stores[j]
        if v not in store:
            if self.script.stages[j].owned:
                self._make(v)
            else:
                self._arrivals.arrive(self.t, j, v)
        buffer = store.show(v)
        store.drop_below(v)
        self._note_word(j, v, buffer)
        self._arrivals.post(j)

    def _note_word(self, j: int, v: int, buffer: FlatBuffer) -> None:
        # one stage speaks for all, so that every worker counts from the same version
        if j == self.plan.num_stages - 1 and v > 0:
            self._words.hear(v, Word(int(buffer.word)))

    # ------------------------------------------------------------------ making versions

    def _make(self, v: int) -> None:
        """Apply the update that makes version ``v`` to every owned stage that is due."""
        due = [j for j in self.script.owned if self.stores[j].newest == v - 1 and self._due(j, v)]
        totals = {j: self._totals.take(v - 1, j) for j in due}
        for j in due:
            self._advance(j, v)
            for p, grad in zip(self._parameters[j], totals[j].tensors(), strict=True):
                p.grad = grad
        self._update(v - 1, due)
        for j in due:
            for p in self._parameters[j]:
                p.grad = None
            buffer = self.stores[j][v]
            buffer.word.copy_(totals[j].word)
            self._relay.send(v, j, buffer)
            self._totals.give_back(j, totals[j])

    def _due(self, j: int, v: int) -> bool:
        # stages that this step still reads at v-1 wait for the next step (unless all must be new)
        return self._flushing or self._updates_at_once or v <= self._next_read(j)

    def _next_read(self, j: int) -> int:
        return self.t - self.script.stages[j].lag

    def _advance(self, j: int, v: int) -> None:
        """Let the parameters be version ``v``, still with the values of ``v - 1``."""
        if v - 1 >= self._next_read(j):
            self.stores[j].drop_below(self._next_read(j))
            self._relay.reclaim(j, v - 2)  # a buffer that is free of readers may still be sent
            self.stores[j].advance_to_copy()
        else:
            self._relay.reclaim(j, v - 1)
            self.stores[j].advance_in_place()

    # ------------------------------------------------------------------ flush and state

    def flush(self) -> None:
        """Finish every update in flight and show the newest version on every worker."""
        if self._flushed_at == self.t:
            return
        self._finish_updates()
        self._relay.finish()
        self._buffers.flush(self.t)
        self._flushed_at = self.t
        self._pace.restart()

    def _finish_updates(self) -> None:
        self._ledger.check()
        self._flushing = True
        try:
            for v in range(min(s.newest for s in self.stores) + 1, self.t + 1):
                self._flush_version(v)
        finally:
            self._flushing = False
        for j, store in enumerate(self.stores):
            self._note_word(j, self.t, store.show(self.t))

    def _flush_version(self, v: int) -> None:
        if any(self.stores[j].newest < v for j in self.script.owned):
            self._make(v)
        others = [j for j in range(self.plan.num_stages) if not self.script.stages[j].owned]
        behind = [j for j in others if self.stores[j].newest < v]
        for j in behind:
            self._arrivals.post(j, needed=True)
            self._arrivals.expect(j, v)
        for j in behind:
            self._arrivals.arrive(self.t, j, v)
            self.stores[j].drop_below(self.t - self.script.stages[j].lag)

    def state(self) -> EngineState:
        """Return what a checkpoint needs; only behind a flush."""
        previous: dict[str, Tensor] = {}
        for stage, store in zip(self.stages.stages, self.stores, strict=True):
            if self.t - 1 in store:
                values = store[self.t - 1].views
                previous |= {n: x.clone() for n, x in zip(stage.parameters, values, strict=True)}
        return EngineState(t=self.t, previous=previous)

    def _restore_previous(self, state: EngineState) -> None:
        if state.t == 0:
            return
        stages = zip(self.stages.stages, self.stores, self.script.stages, strict=True)
        for stage, store, script in stages:
            if all(n in state.previous for n in stage.parameters):
                values = [state.previous[n].to(store.layout.device) for n in stage.parameters]
                store.write(state.t - 1, values)
            elif script.lag > 0:  # the weights were replaced: what is read is what there is
                store.write(state.t - 1, [p.data for p in store.parameters])

    def norm_exchange(self) -> NormExchange:
        """Return what computes the exact gradient norm over stages of several owners."""
        return NormExchange(self.plan, self._parameters, self.transport, self._wait)

    def parameters(self, j: int) -> Sequence[nn.Parameter]:
        """Return the parameters of a stage."""
        return self._parameters[j]

    def close(self) -> None:
        """Take the hooks off and end the lanes; parameters keep the version that is shown."""
        for store in self.stores:
            store.release()
        self._entrances.remove()
        self._gradients.remove()
        self._sums.close()
        self._relay.close()
        self.transport.close()
