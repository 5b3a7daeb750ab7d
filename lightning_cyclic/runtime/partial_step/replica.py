"""The workers of one replica, and what they tell each other beside their programs.

batch (D)      from the worker that begins a step to all others
summary (L)    of what came out, from the last stage's worker to all others
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.runtime.partial_step.flow import Summary
from lightning_cyclic.runtime.partial_step.packets import Lesson
from lightning_cyclic.runtime.partial_step.parcels import Parcel, ParcelPost
from lightning_cyclic.runtime.partial_step.plans import slots_per_step
from lightning_cyclic.runtime.transport import AbstractTransport
from lightning_cyclic.runtime.values.trees import flatten, unflatten
from lightning_cyclic.runtime.waiting import Wait, Waiter
from lightning_cyclic.runtime.whole_step.script import Script


@final
class Replica:
    """Share what one worker of a replica has with all of them.

    Args:
        worker: this worker.
        size: workers per replica.
        transport: how messages travel; None for one worker.
        device: where received tensors live.
        plan: of which an error draws the timetable.
    """

    def __init__(
        self,
        worker: int,
        size: int,
        transport: AbstractTransport | None,
        device: torch.device,
        plan: Plan,
    ) -> None:
        self.number = worker // size
        first = self.number * size
        self.workers = tuple(range(first, first + size))  # input side first
        self.wait: Wait
        self.post: ParcelPost
        self._worker = worker
        self._transport = transport
        self._device = device
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Begin to send by the slots of a plan."""
        self._schedule = plan.axes.schedule
        if self._transport is None:
            self.wait = _no_wait
            self.post = ParcelPost(_NoTransport(), self.wait, self._device)  # type: ignore[arg-type]
            return
        script = Script(worker=self._worker, stages=(), slots_per_step=slots_per_step(plan))
        self.wait = Waiter(plan, script, self._transport).wait
        self.post = ParcelPost(self._transport, self.wait, self._device)

    def share(
        self, payload: Payload, t: int, source: int, tensors: Sequence[Tensor], facts: Any
    ) -> Parcel:
        """Return the source's tensors and facts on every worker of the replica.

        Args:
            payload: D, the first thing of a step, or L, the last.
            t: step.
            source: the worker that has them.
            tensors: on the source; ignored elsewhere.
            facts: as ``tensors``.
        """
        if len(self.workers) == 1:
            return Parcel(tensors, facts)
        slot = self._schedule.slot(t + (payload is Payload.L), 0)
        place = Action(kind=Kind.SEND, payload=payload, t=t, j=0, s=slot)
        if self._worker != source:
            return self.post.receive(replace(place, kind=Kind.RECV, peer=source), None)
        for other in self.workers:
            if other != source:
                self.post.send(replace(place, peer=other), None, Parcel(tensors, facts))
        return Parcel(tensors, facts)

    def share_batch(self, t: int, source: int, batch: Any) -> Any:
        """Return the source's batch of step ``t`` on every worker of the replica.

        Raises:
            StepError: for batches that cannot be shared, or are not alike.
        """
        if isinstance(batch, Iterator):
            raise StepError(
                "a step takes dataloader_iter, from which it would draw a batch on every stage; "
                "allowed: steps that are given their batch; use training_step(self, batch, "
                "batch_idx)"
            )
        leaves, structure = flatten(batch)
        at = [k for k, x in enumerate(leaves) if isinstance(x, Tensor)]
        shared = self.share(Payload.D, t, source, [leaves[k] for k in at], len(at))
        if shared.facts != len(at):
            raise StepError(
                f"the batch of worker {self._worker} has {len(at)} tensors, that of worker "
                f"{source} has {shared.facts}; allowed: batches of one structure; "
                "check the dataset of each worker"
            )
        for k, x in zip(at, shared.tensors, strict=True):
            leaves[k] = x
        return unflatten(structure, leaves)

    def share_summary(
        self, t: int, summary: Summary, learnt: Mapping[str, Lesson]
    ) -> tuple[Summary, Mapping[str, Lesson]]:
        """Return what the last stage's worker sums up of a step, on every worker of the replica.

        Args:
            t: step.
            summary: of the outcomes, on that worker; ignored elsewhere.
            learnt: what micro-batches taught, as ``summary``.
        """
        if len(self.workers) == 1:
            return summary, learnt
        self.post.settle()
        facts = [summary.facts, {f: lesson.to_data() for f, lesson in learnt.items()}]
        shared = self.share(Payload.L, t, self.workers[-1], summary.tensors, facts)
        lessons = {f: Lesson.from_data(data) for f, data in shared.facts[1].items()}
        return Summary(shared.tensors, shared.facts[0]), lessons


class _NoTransport:
    """Stand where one worker has nobody to send to."""


def _no_wait(pending: Any, action: Action) -> None:
    raise AssertionError("one worker waits for nobody")
