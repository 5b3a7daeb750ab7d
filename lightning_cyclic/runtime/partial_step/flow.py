"""A flow: steps that begin before those ahead of them have ended, where no flush is between.

With the batch of step t a worker carries out its block of the stream: forwards of step t, and
what has come back of earlier steps, their updates among it. A flush carries out what is left. It
changes no number: later forwards read the versions that they would have read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.runtime.partial_step.executor import Executor
from lightning_cyclic.runtime.partial_step.packets import Lesson
from lightning_cyclic.runtime.partial_step.parcels import Parcel, ParcelPost
from lightning_cyclic.runtime.partial_step.stage_step import Micro, Outcome
from lightning_cyclic.runtime.partial_step.stream import Stream, step_of
from lightning_cyclic.runtime.partial_step.versions import Versions


class Summary(NamedTuple):
    """Hold what is shared of a step, in terms that travel: tensors and JSON."""

    tensors: Sequence[Tensor]
    facts: Any


Summarise = Callable[[Sequence[Outcome]], Summary]  # called on the last stage's worker alone
Apply = Callable[[int, int], None]  # (step, stage): clip and optimize; gradients are in p.grad
Complete = Callable[[int, int], None]  # (step, stage): its gradients have been summed, in p.grad


@final
class Flow:
    """Run the steps of one worker.

    Args:
        plan: whose program is run.
        worker: this worker.
        executor: of its stages.
        post: how messages travel.
        versions: of its stages' parameters.
        apply: makes a new version from the gradients of a step.
        complete: looks at the gradients of a step when the last has come, if that matters.
        t: the first step.
    """

    def __init__(
        self,
        plan: Plan,
        worker: int,
        executor: Executor,
        post: ParcelPost,
        versions: Versions,
        apply: Apply,
        complete: Complete | None,
        t: int,
    ) -> None:
        self.arrived: list[tuple[int, Summary]] = []
        self._plan = plan
        self._executor = executor
        self._post = post
        self._versions = versions
        self._apply = apply
        self._complete = complete
        self._stream = Stream(plan, worker)
        self._stages = executor.holdings.stages
        replicas_update = plan.axes.placement.takes_turns or plan.width > 1
        self._is_told_of_updates = replicas_update  # of some stages, by others
        self._begun = self._ended = t - 1
        self._summarise: dict[int, Summarise] = {}
        self._put_off: dict[tuple[int, int], list[Action]] = {}  # forwards, by update
        self._grads: list[tuple[nn.Parameter, Tensor]] = []
        self._aside: dict[tuple[int, int], list[Tensor | None]] = {}  # of updates that are late
        self._told: dict[int, Parcel] = {}
        self._modes: list[tuple[nn.Module, bool]] = []  # of the last step that has begun

    @property
    def most_late(self) -> int:
        """Return how many steps later the last worker is told of a step than the first."""
        return max(Stream(self._plan, w).lag for w in range(self._plan.num_workers))

    @property
    def is_empty(self) -> bool:
        """Say whether every step that has begun has ended."""
        return self._begun == self._ended

    def step(
        self,
        t: int,
        micro: Mapping[int, Micro],
        call: Callable[[Any], Any],
        summarise: Summarise,
    ) -> None:
        """Carry out what a worker does with the batch of step ``t``.

        Args:
            t: step, the one behind the last.
            micro: its micro-batches.
            call: runs the user's step on one of them.
            summarise: what of its outcomes is shared with all workers.
        """
        assert t == self._begun + 1
        self._executor.prepare(t, micro, call, training=True)
        self._summarise[t] = summarise
        self._begun = t
        self._modes = [(m, m.training) for m in self._executor.site.module.modules()]
        if self._is_told_of_updates:
            self._tidy(t - self._plan.steps_under_way)
        self._run([a for a in self._stream.block(t) if step_of(a) > self._ended])

    def flush(self) -> bool:
        """Finish all steps that have begun; say whether any had not ended."""
        if self.is_empty:
            return False
        self._put_off = self._stream.put_off(self._begun)
        rest = [a for a in self._stream.rest(self._begun) if step_of(a) > self._ended]
        with self._as_in_training():
            self._run(rest)
        self._put_off = {}
        self._post.settle()
        self._ended = self._begun
        return True

    def take_arrived(self) -> list[tuple[int, Summary]]:
        """Return the steps whose outcomes have come since the last call, with these."""
        taken, self.arrived = self.arrived, []
        return taken

    # ------------------------------------------------------------------ actions

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

    def _run(self, actions: Sequence[Action]) -> None:
        for p, grad in self._grads:
            p.grad = grad
        self._executor.run(actions, self._other, self._done)
        # Lightning zeroes gradients between batches; these belong to steps under way
        own = self._executor.holdings.own
        self._grads = [(p, p.grad) for p in own if p.grad is not None]
        for p in own:
            p.grad = None

    def _other(self, a: Action) -> None:
        if a.kind is Kind.UPDATE:
            self._update(a)
        elif a.payload in (Payload.P, Payload.V):
            self._begin_update(a)
            self._executor.receive(a)
        elif a.kind is Kind.SEND:
            self._post.send(a, None, self._conclusion(a.t))
        else:
            parcel = self._post.receive(a, None)
            facts, learnt = parcel.facts
            self._executor.adopt({f: Lesson.from_data(data) for f, data in learnt.items()})
            self.arrived.append((a.t, Summary(parcel.tensors, facts)))

    def _done(self, a: Action) -> None:
        if a.kind is Kind.B and self._stream.tells(a):  # one worker alone tells nobody else
            self._conclusion(a.t)
        if self._complete is not None and self._stream.completes(a):
            self._complete(a.t, a.j)
            if self._plan.late_updates:
                stage = self._executor.holdings.owned(a.j)
                self._aside[a.t, a.j] = [p.grad for p in stage]
                for p in stage:
                    p.grad = None

    def _conclusion(self, t: int) -> Parcel:
        """Return what all workers are told of step ``t``."""
        if t not in self._told:
            summary = self._summarise[t](self._executor.take_outcomes(t))
            learnt = self._executor.learnt
            facts = [summary.facts, {f: lesson.to_data() for f, lesson in learnt.items()}]
            self._executor.adopt(learnt)
            self.arrived.append((t, summary))
            self._told[t] = Parcel(summary.tensors, facts)
        return self._told[t]

    def _update(self, a: Action) -> None:
        stage = self._executor.holdings.owned(a.j)
        aside = self._aside.pop((a.t, a.j), None)
        mine = set(map(id, stage)) if aside is None else set()
        under_way = [(p, p.grad) for p in self._executor.holdings.own if id(p) not in mine]
        for p, _ in under_way:
            p.grad = None  # of other stages, or of later steps
        for p, grad in zip(stage, aside or (), strict=aside is not None):
            p.grad = grad
        self._begin_update(a)
        self._apply(a.t, a.j)
        for p in stage:
            p.grad = None
        for p, grad in under_way:
            p.grad = grad
        if a.j == self._stages[0]:  # backwards go from the last stage to the first
            self._tidy(a.t)

    def _begin_update(self, a: Action) -> None:
        for forward in self._put_off.get((step_of(a), a.j), ()):
            self._versions.reserve(forward)
        self._versions.begin_update(a.j)

    def _tidy(self, t: int) -> None:
        """Forget what is over with step ``t``."""
        self._summarise = {k: f for k, f in self._summarise.items() if k > t}
        self._told = {k: parcel for k, parcel in self._told.items() if k > t}
        self._executor.forget(t)
        self._post.settle(lambda b: 0 <= b.t < received_before(self._plan, t))


def received_before(plan: Plan, t: int) -> int:
    """Return the step before which messages have been received when a stage is updated by step t.

    Waiting for later ones would stop the pipeline: a loss is received behind the backward of the
    first stage, up to S - 1 micro-batches after the last stage has sent it.
    """
    return t - (plan.num_stages - 1) // (plan.num_micro // plan.width)
