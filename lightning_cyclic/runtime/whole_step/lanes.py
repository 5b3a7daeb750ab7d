"""Lanes: what a worker passes on while its main thread computes.

    SumLane      grad of stage j --> + partial sum from worker w-1 --> worker w+1 or the owner
    RelayLane    parameters of stage j from worker w-1 --> worker w+1, and kept for this worker

Each lane does its work in program order, so it never waits for a message that comes behind
another one it would have to pass on first. A lane that fails keeps its error for the main thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, final

from torch import Tensor

from lightning_cyclic.errors import CyclicError, StepError
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport
from lightning_cyclic.runtime.waiting import Wait
from lightning_cyclic.runtime.whole_step.flat import FlatBuffer, FlatLayout
from lightning_cyclic.runtime.whole_step.script import Script

Item = TypeVar("Item")


@final
class Ledger:
    """Let threads of one worker wait for what other threads of it put down.

    Args:
        timeout_s: limit of every wait, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._entries: dict[tuple[str, int, int], FlatBuffer] = {}
        self._error: CyclicError | None = None

    def put(self, what: str, number: int, j: int, buffer: FlatBuffer) -> None:
        """Put down a buffer under (what, step or version, stage)."""
        with self._changed:
            self._entries[what, number, j] = buffer
            self._changed.notify_all()

    def take(self, what: str, number: int, j: int, late: Callable[[], CyclicError]) -> FlatBuffer:
        """Wait for the buffer under (what, step or version, stage) and take it away.

        Raises:
            CyclicError: the error of a lane, or ``late()`` when the time limit has passed.
        """
        key = (what, number, j)
        with self._changed:
            # lanes have the same limit on each single message and say more: let them speak first
            done = self._changed.wait_for(
                lambda: key in self._entries or self._error is not None, self._timeout_s * 1.1 + 1
            )
            if key in self._entries:
                return self._entries.pop(key)
            raise self._error if done and self._error is not None else late()

    def fail(self, error: CyclicError) -> None:
        """Put down an error that every later wait raises."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of a lane, if there is one."""
        if self._error is not None:
            raise self._error


class _Lane(Generic[Item]):
    """Do items in order, in a thread of its own or at once.

    Args:
        name: name of the thread.
        ledger: where an error goes.
        threaded: False does every item at once, for work that never waits for another worker.
    """

    def __init__(self, name: str, ledger: Ledger, *, threaded: bool) -> None:
        self.ledger = ledger
        self._name = name
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def put(self, item: Item) -> None:
        """Do an item, now or in its turn."""
        if self._thread is None:
            self.do(item)
        else:
            self._items.put(item)

    def close(self) -> None:
        """End the thread behind the items it has; never wait for it."""
        self._items.put(None)

    def do(self, item: Item) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self.do(item)
            except CyclicError as error:
                self.ledger.fail(error)
                return
            except Exception as error:  # a lane that dies must say so, or others wait for nothing
                self.ledger.fail(
                    StepError(f"{self._name} failed: {type(error).__name__}: {error}")
                )
                return


SumItem = tuple[int, int, list[Tensor | None], int]  # step, stage, gradients, word


@final
class SumLane(_Lane[SumItem]):
    """Add this worker's gradients to the partial sums, in micro-batch order, and pass them on.

    Args:
        script: what the program has this worker send and receive.
        layouts: layout of each stage's gradients.
        transport: how messages travel.
        ledger: where totals that stay here go, as ("total", step, stage).
        wait: waits for a message and names it if it does not come.
    """

    def __init__(
        self,
        script: Script,
        layouts: Sequence[FlatLayout],
        transport: AbstractTransport,
        ledger: Ledger,
        wait: Wait,
    ) -> None:
        self._script = script
        self._layouts = layouts
        self._transport = transport
        self._wait = wait
        self._free: list[list[FlatBuffer]] = [[] for _ in layouts]
        self._sent: dict[int, tuple[AbstractPending, FlatBuffer, Action]] = {}
        self._posted: dict[int, tuple[AbstractPending, FlatBuffer]] = {}
        self._receives = any(stage.sum_from is not None for stage in script.stages)
        if self._receives:
            for j in reversed(range(len(layouts))):
                self._post(j)
        super().__init__(f"cyclic-sums-{script.worker}", ledger, threaded=self._receives)

    def give_back(self, j: int, buffer: FlatBuffer) -> None:
        """Return a total's buffer that has been read."""
        self._free[j].append(buffer)

    def do(self, item: SumItem) -> None:
        """Add one stage's gradients to the sum and send it on."""
        t, j, grads, word = item
        if self._receives:
            pending, buffer = self._posted.pop(j)
            self._wait(pending, self._script.action(Kind.RECV, Payload.S, t=t, j=j, v=None))
            buffer.add(grads)
            buffer.word.bitwise_or_(word)
        else:
            self._reclaim(j)
            buffer = self._take(j)
            buffer.write(grads)
            buffer.word.fill_(word)
        self._pass_on(t, j, buffer)
        if self._receives and j == 0:  # the step's last stage: make ready for the next step
            for k in reversed(range(len(self._layouts))):
                self._reclaim(k)
                self._post(k)

    def _pass_on(self, t: int, j: int, buffer: FlatBuffer) -> None:
        stage = self._script.stages[j]
        if stage.sum_to is not None:
            self._send(Payload.S, stage.sum_to, t, j, buffer)
        elif stage.total_to is not None:
            self._send(Payload.T, stage.total_to, t, j, buffer)
        else:
            self.ledger.put("total", t, j, buffer)

    def _send(self, payload: Payload, peer: int, t: int, j: int, buffer: FlatBuffer) -> None:
        action = self._script.action(Kind.SEND, payload, t=t, j=j, v=None)
        pending = self._transport.isend(payload, j, peer, buffer.data)
        self._sent[j] = (pending, buffer, action)

    def _reclaim(self, j: int) -> None:
        """Wait for the stage's last send, which frees its buffer."""
        if j in self._sent:
            pending, buffer, action = self._sent.pop(j)
            self._wait(pending, action)
            self._free[j].append(buffer)

    def _post(self, j: int) -> None:
        peer = self._script.stages[j].sum_from
        assert peer is not None
        buffer = self._take(j)
        self._posted[j] = (self._transport.irecv(Payload.S, j, peer, buffer.data), buffer)

    def _take(self, j: int) -> FlatBuffer:
        return self._free[j].pop() if self._free[j] else self._layouts[j].new()


RelayItem = tuple[int, int, AbstractPending, FlatBuffer]  # version, stage, receive, its buffer


@final
class RelayLane(_Lane[RelayItem]):
    """Pass versions on as soon as they arrive, and put them down for this worker.

    Args:
        script: what the program has this worker send and receive.
        transport: how messages travel.
        ledger: where versions go, as ("version", version, stage).
        wait: waits for a message and names it if it does not come.
    """

    def __init__(
        self, script: Script, transport: AbstractTransport, ledger: Ledger, wait: Wait
    ) -> None:
        self._script = script
        self._transport = transport
        self._wait = wait
        self._sent: dict[tuple[int, int], tuple[AbstractPending, Action]] = {}
        self.passes_on = any(
            not stage.owned and stage.parameters_to is not None for stage in script.stages
        )
        super().__init__(f"cyclic-relay-{script.worker}", ledger, threaded=self.passes_on)

    def do(self, item: RelayItem) -> None:
        """Wait for one stage's version, pass it on, and put it down."""
        v, j, pending, buffer = item
        self._wait(pending, self._parameters(Kind.RECV, v, j))
        self.send(v, j, buffer)
        self.ledger.put("version", v, j, buffer)

    def send(self, v: int, j: int, buffer: FlatBuffer) -> None:
        """Send a version on, if the program does."""
        peer = self._script.stages[j].parameters_to
        if peer is not None:
            pending = self._transport.isend(Payload.P, j, peer, buffer.data)
            self._sent[j, v] = (pending, self._parameters(Kind.SEND, v, j))

    def reclaim(self, j: int, v: int) -> None:
        """Wait until version ``v`` has been sent on, so that its buffer may be written again."""
        sent = self._sent.pop((j, v), None)
        if sent is not None:
            self._wait(*sent)

    def finish(self) -> None:
        """Wait until everything has been sent on: behind it this worker may leave."""
        for j, v in list(self._sent):
            self.reclaim(j, v)

    def _parameters(self, kind: Kind, v: int, j: int) -> Action:
        t = v + self._script.stages[j].lag  # the step in which this worker reads the version
        return self._script.action(kind, Payload.P, t=t, j=j, v=v)
