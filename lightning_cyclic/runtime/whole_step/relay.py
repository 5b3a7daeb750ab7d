"""Relayed buffers: BatchNorm statistics travel from micro-batch to micro-batch.

Worker i's forward reads and changes the statistics that worker i-1's forward left, exactly as in
one process that runs the micro-batches one after the other; worker N-1 hands them to worker 0 of
the next step. They are copied in and out of the module's own tensors: they are small, and code
may have replaced them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.runtime.stages.stage_map import StageMap
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport
from lightning_cyclic.runtime.waiting import Wait
from lightning_cyclic.runtime.whole_step.flat import FlatBuffer, FlatLayout
from lightning_cyclic.runtime.whole_step.script import Script

_FLUSH_CHANNELS = 1 << 16  # flush copies use channels of their own: stage + this


@final
class BufferRelay:
    """Receive, hand on and spread the buffers that training changes.

    Args:
        module: the whole module.
        stages: which buffers belong to which stage.
        script: neighbours of each stage's relay.
        transport: how messages travel.
        wait: waits for a message and names it if it does not come.
        ready: whether the module already holds what the next step would receive (worker 0 at
            the beginning and behind a flush).
    """

    def __init__(
        self,
        module: nn.Module,
        stages: StageMap,
        script: Script,
        transport: AbstractTransport,
        wait: Wait,
        *,
        ready: bool,
    ) -> None:
        self._module = module
        self._stages = stages
        self._script = script
        self._transport = transport
        self._wait = wait
        self._ready = ready
        self._handed_on: list[tuple[str, Tensor, int]] = []  # name, buffer, its state when sent
        self._posted: dict[int, tuple[AbstractPending, FlatBuffer]] = {}
        self._sent: dict[int, tuple[AbstractPending, FlatBuffer, Action]] = {}
        self._spare: dict[int, FlatBuffer] = {}
        self._layouts = {j: FlatLayout(self._tensors(j)) for j in stages.relayed}
        for j in stages.relayed:
            self._post(j)

    def receive(self, t: int, j: int) -> None:
        """Take in stage ``j``'s buffers as micro-batch i-1 left them, before F(i,j)."""
        if j not in self._posted or self._ready:
            return
        pending, buffer = self._posted.pop(j)
        self._wait(pending, self._script.action(Kind.RECV, Payload.R, t=t, j=j, v=None))
        self._load(j, buffer)
        self._post(j, buffer)

    def hand_on(self, t: int, after: int) -> None:
        """Send on the buffers that are final once stage ``after``'s forward is done."""
        for j in self._layouts:
            if self._stages.stages[j].buffers_final_after == after:
                self._send(t, j)

    def step_done(self) -> None:
        """Note that a step's forwards are over: the next step receives again.

        Raises:
            StepError: a buffer has changed since it was handed on.
        """
        self._ready = False
        changed = [name for name, buffer, state in self._handed_on if buffer._version != state]
        self._handed_on.clear()
        if changed:
            raise StepError(
                f"buffer {changed[0]!r} of worker {self._transport.worker} changed after it had "
                "been handed on to the next worker, because its module ran later than in the "
                "first training step; allowed: the order of the first step; cut only where the "
                'order is always the same, CyclicStrategy(stages=["module.path", ...]), or use '
                "stages=1"
            )

    def flush(self, t: int) -> None:
        """Bring the statistics behind step ``t - 1`` to every worker, for evaluation.

        Worker 0 takes in what it would have received in step ``t`` anyway and starts a chain of
        copies 0 -> 1 -> ... -> N-2; worker N-1 made them.
        """
        num_workers, worker = self._transport.num_workers, self._transport.worker
        if not self._layouts or num_workers == 1:
            return
        for j in self._layouts:
            if worker == 0:
                self.receive(t, j)
            elif worker < num_workers - 1:
                self._receive_copy(t, j)
            if worker < num_workers - 2:
                self._send_copy(t, j)
        for j in list(self._sent):  # behind a flush this worker may leave
            self._spare[j] = self._sent_buffer(j)
        self._ready = worker == 0

    def _receive_copy(self, t: int, j: int) -> None:
        action = self._script.action(Kind.RECV, Payload.R, t=t, j=j, v=None)
        buffer = self._layouts[j].new()
        peer = self._transport.worker - 1
        self._wait(
            self._transport.irecv(Payload.R, j + _FLUSH_CHANNELS, peer, buffer.data), action
        )
        self._load(j, buffer)

    def _send_copy(self, t: int, j: int) -> None:
        action = self._script.action(Kind.SEND, Payload.R, t=t, j=j, v=None)
        buffer = self._layouts[j].new()
        buffer.write(self._tensors(j))
        peer = self._transport.worker + 1
        self._wait(
            self._transport.isend(Payload.R, j + _FLUSH_CHANNELS, peer, buffer.data), action
        )

    def _send(self, t: int, j: int) -> None:
        peer = self._script.stages[j].buffers_to
        if peer is None:
            return
        buffer = self._sent_buffer(j) if j in self._sent else self._spare.pop(j, None)
        buffer = buffer or self._layouts[j].new()
        buffer.write(self._tensors(j))
        names = self._stages.stages[j].buffers
        self._handed_on += [
            (name, x, x._version) for name, x in zip(names, self._tensors(j), strict=True)
        ]
        action = self._script.action(Kind.SEND, Payload.R, t=t, j=j, v=None)
        self._sent[j] = (self._transport.isend(Payload.R, j, peer, buffer.data), buffer, action)

    def _sent_buffer(self, j: int) -> FlatBuffer:
        pending, buffer, action = self._sent.pop(j)
        self._wait(pending, action)
        return buffer

    def _post(self, j: int, buffer: FlatBuffer | None = None) -> None:
        peer = self._script.stages[j].buffers_from
        if peer is not None:
            buffer = buffer or self._layouts[j].new()
            self._posted[j] = (self._transport.irecv(Payload.R, j, peer, buffer.data), buffer)

    def _load(self, j: int, buffer: FlatBuffer) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._tensors(j), buffer.views)

    def _tensors(self, j: int) -> list[Tensor]:
        names: Sequence[str] = self._stages.stages[j].buffers
        return [self._module.get_buffer(name) for name in names]
