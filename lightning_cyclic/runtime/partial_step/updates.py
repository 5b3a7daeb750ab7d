"""Updates: from sums of gradients that are whole to new versions of a worker's stages.

one step after the other    sums lie in p.grad; somebody outside steps the optimizer; what
                            the program has behind UPDATE follows. Where optimizer state comes
                            and goes, UPDATE asks for the step of its stage
steps that flow             UPDATE itself calls ``apply``, stage by stage
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import final

from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.dataflow import Datum
from lightning_cyclic.plan.passes.messages import step_of
from lightning_cyclic.plan.passes.updates import is_of_update
from lightning_cyclic.runtime.flight_recorder import FlightRecorder
from lightning_cyclic.runtime.gradient_store import GradientStore
from lightning_cyclic.runtime.norms import Norms
from lightning_cyclic.runtime.partial_step.conclusions import Conclusions
from lightning_cyclic.runtime.partial_step.config import Apply
from lightning_cyclic.runtime.partial_step.own_stages import OwnStages
from lightning_cyclic.runtime.partial_step.verifier import Verifier
from lightning_cyclic.runtime.worker import Worker

_NEW_VERSIONS = frozenset({Kind.UPDATE, Payload.P, Payload.V})
_OF_UPDATES = _NEW_VERSIONS | {Payload.N, Payload.O}


@final
class Updates:
    """Make the updates of one worker.

    Args:
        verifier: is told of gradients that are whole, and no longer scaled.
        run: carries actions out.
        is_over: is told when all stages of a step have been updated.
    """

    worker: Worker  # that carries the program out; it asks for updates itself

    def __init__(
        self,
        own: OwnStages,
        grads: GradientStore,
        norms: Norms,
        *,
        conclusions: Conclusions,
        verifier: Verifier,
        flight: FlightRecorder,
        run: Callable[[Sequence[Action]], None],
        is_over: Callable[[int], None],
    ) -> None:
        self.put_off: Mapping[tuple[int, int], Sequence[Action]] = {}  # forwards, by update
        self.was_finite: bool | None = None  # gradients of all stages; None: nobody has asked
        self.norms = norms
        self._config = own.config
        self._stages = own.ownership.stages
        self._owned = own.updated
        self._trained_of = own.trained_of
        self.grads = grads
        self._versions = own.versions
        self.conclusions = conclusions
        self.tiers, self._moves_state = own.tiers, own.config.tiers is not None
        self._step: Callable[[int], None] | None = None  # of the optimizer, for a stage
        self._is_alone = own.num_workers == 1
        self._verifier = verifier
        self._flight = flight
        self._run = run
        self._is_over = is_over
        self._rest: list[Action] = []  # of a step whose update is made outside

    # ------------------------------------------------------------------ what the program asks

    def update(self, a: Action) -> None:
        """Make a new version of a stage, with its optimizer state in memory."""
        self.tiers.bring(a.j, a.t, self.worker.fetch)
        if self._config.apply is not None:
            self._apply(a, self._config.apply)
        elif self._step is not None:
            self._step(a.j)
        self.tiers.check(a.j)

    def _apply(self, a: Action, apply: Apply) -> None:
        """Update a stage with the gradients of its step in ``p.grad``."""
        self.begin_version(a)
        self.grads.show(a.t, a.j)
        if self._config.unscale is None:
            self._verifier.note_gradients(a.j, [p.grad for p in self._trained_of(a.j)])
        self._verifier.note_state()
        apply(a.t, a.j)
        for p in self._trained_of(a.j):
            p.grad = None
        if a.j == self._stages[0]:  # backwards go from the last stage to the first
            self._is_over(a.t)

    def tell(self, a: Action) -> None:
        self.conclusions.tell(a.t)

    def complete(self, t: int, j: int) -> None:
        """Note the norms of gradients that are whole, and that are scaled as the loss was."""
        grads = self.grads.of(t, j)
        if self._config.unscale is not None:
            self._verifier.note_gradients(j, grads)
            self._config.unscale(t, grads)
        self.norms.note(t, j, grads)

    def begin_version(self, a: Action) -> None:
        """Make room for a version that an action is about to write."""
        if self._versions is not None:
            for forward in self.put_off.get((step_of(a), a.j), ()):
                self._versions.reserve(forward)
            self._versions.begin_update(a.j)

    # ------------------------------------------------------------------ updates from outside

    def up_to(self, actions: Sequence[Action], t: int, *, is_last: bool) -> list[Action]:
        """Return what comes before the updates of a step, and keep the rest.

        Args:
            t: the step.
            is_last: whether an update follows this batch; else nothing of it is sent either.
        """
        self.was_finite = None
        if not is_last:  # but state of the step before leaves
            actions = [
                a for a in actions
                if (a.payload or a.kind) not in _OF_UPDATES or (a.payload is Payload.O and a.t < t)
            ]  # fmt: skip
        begun = list(takewhile(lambda a: not is_of_update(a), actions))
        self._rest = list(actions[len(begun) :])
        return begun

    def hide(self, t: int) -> None:
        """Take what lies in ``p.grad`` for the first terms of the sums of a step."""
        for j in self._stages:
            self.grads.hide(t, j)

    def show(self, t: int) -> None:
        """Put the sums of a step into ``p.grad``, the own ones when they are whole."""
        for j in self._owned:
            self.worker.fetch((Datum.SUM, t, j, None))
        for j in self._stages:
            self.grads.show(t, j)
        for j in self._owned:
            self._verifier.note_gradients(j, [p.grad for p in self._trained_of(j)])

    def all_finite(self, t: int, *, overflowed: bool) -> bool:
        """Say whether the gradients that lie in ``p.grad`` are finite, on all workers.

        Args:
            t: the step under way.
            overflowed: whether those of this worker were not, when hooks had not seen them yet.
        """
        self.was_finite = not overflowed
        if not self._is_alone:
            if any(a.payload is Payload.N for a in self._rest):
                self.tell_norms(t, overflowed=overflowed)
            self.was_finite = self.norms.is_finite(t)
        return self.was_finite

    def tell_norms(self, t: int, *, overflowed: bool = False) -> None:
        """Let owners know each other's norms of the gradients that lie in ``p.grad``.

        Args:
            t: the step under way.
            overflowed: tell that they are infinite, whatever hooks have made of them.
        """
        for j in self._owned:
            if overflowed:
                self.norms.note_overflow(t, j)
            self.norms.note(t, j, [p.grad for p in self._trained_of(j)])
        told = list(takewhile(lambda a: (a.payload or a.kind) not in _NEW_VERSIONS, self._rest))
        self._rest = self._rest[len(told) :]
        self._run(told)

    def begin(self) -> None:
        """Make room for the next version of all stages, where older ones are still read."""
        if self._versions is not None:
            for j in self._stages:
                self._versions.begin_update(j)

    def make(self, step: Callable[[int], None] | None) -> None:
        """Update one stage after the other, each while its optimizer state is in memory.

        Args:
            step: calls the optimizer for a stage. [none: it moves in vain]
        """
        mine = [a for a in self._rest if a.kind is Kind.UPDATE or a.payload is Payload.O]
        self._rest = [a for a in self._rest if a not in mine]
        self._step = step
        self._run(mine)
        self._step = None

    def end(self, t: int) -> None:
        """Send on what an update has changed."""
        if any(a.payload is Payload.N for a in self._rest):  # nobody has clipped by them
            self.tell_norms(t)
        if self._moves_state:  # an update that was skipped has made room, too
            self.make(None)
        self._flight.note(a for a in self._rest if a.kind is Kind.UPDATE)
        self._run([a for a in self._rest if a.kind is not Kind.UPDATE])
        self.worker.settle(joins=not self._moves_state)  # it leaves beside the next step
        self.norms.forget(t)
        self._rest = []
