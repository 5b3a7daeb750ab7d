"""The worker: carry out the program of one worker, action by action.

    F, B      what runs the stages of the user's step                    (compute)
    SEND      hand what the action names to the messages
    RECV      be ready for a message; what waits for it is the first action that reads it
    ADD       the own gradient to a sum that came
    UPDATE, TELL   the host: who applies gradients, and who wants to know what came out

The table of what actions read (plan/dataflow.py) says what must have come before an action; the
program says everything else. Nothing here knows a schedule, a rule or a placement.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol, cast, final

from lightning_cyclic.errors import WaitTimeoutError
from lightning_cyclic.plan.actions import Action, Kind, Lane, Payload
from lightning_cyclic.plan.dataflow import Dataflow, Datum, Item
from lightning_cyclic.runtime.lanes import LaneThread
from lightning_cyclic.runtime.messages import Message, Messages

_MANY = 256


class AbstractCompute(Protocol):
    """Be what runs the stages of a worker."""

    def forward(self, a: Action) -> None:
        """Run F."""

    def backward(self, a: Action) -> None:
        """Run B."""


class AbstractStores(Protocol):
    """Be what messages are made of, and what they come to."""

    def key(self, a: Action) -> Hashable:
        """Return what the messages of an action are likely to look like, alike at both ends."""

    def give(self, a: Action) -> Message:
        """Return what a SEND sends."""

    def take(self, a: Action, message: Message) -> None:
        """Take in what has come for a RECV, when it is read."""

    def add(self, a: Action) -> None:
        """Carry out an ADD."""

    def hold(self, a: Action) -> None:
        """Keep what an action sends, which a lane runs later, from being dropped till then."""

    def let_go(self, a: Action) -> None:
        """Keep it no longer."""


class AbstractHost(Protocol):
    """Be who has the optimizer, and who is told."""

    def update(self, a: Action) -> None:
        """Make a new version of a stage."""

    def tell(self, a: Action) -> None:
        """Note what came out of a step."""


@final
class _Arrival:
    """Hold a receive until its message has been taken in, by the first that needs it."""

    __slots__ = ("action", "is_taken", "lock")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.lock = threading.Lock()  # the others that need it wait here
        self.is_taken = False


@final
class Worker:
    """Carry out actions.

    Args:
        flow: what each action reads and makes.
        messages: of this worker.
        compute: runs its stages.
        stores: what its messages are made of.
        host: has the optimizer.
        lanes: those whose actions wait for other workers, and so run in threads of their own.
        limit_s: of waits of a lane for what the main thread does, in seconds.
    """

    def __init__(
        self,
        flow: Dataflow,
        messages: Messages,
        compute: AbstractCompute,
        stores: AbstractStores,
        host: AbstractHost,
        lanes: Iterable[Lane] = (),
        limit_s: float = 60.0,
    ) -> None:
        self._flow = flow
        self._messages = messages
        self._stores = stores
        # in the order in which they were posted: item -> receives that bring it, or parts of it
        self._coming: dict[Item, list[_Arrival]] = {}
        self._changing = threading.Condition()  # what is coming, by several lanes
        self._to_come: set[object] = {Datum.WEIGHTS}  # what is ever received, or made by lanes
        self._posted: dict[object, int] = {}  # stage -> newest version that has been posted
        self._limit_s = limit_s
        self._promised: dict[Item, threading.Event] = {}  # what lanes will have made
        self._do: dict[Kind, Callable[[Action], None]] = {
            Kind.F: compute.forward,
            Kind.B: compute.backward,
            Kind.ADD: stores.add,
            Kind.SEND: self._send,
            Kind.RECV: self._post,
            Kind.UPDATE: host.update,
            Kind.TELL: host.tell,
        }
        self._lanes = {lane: LaneThread(f"cyclic-{lane}", self._carry_out) for lane in lanes}

    def run(self, actions: Iterable[Action]) -> None:
        """Carry out actions in their order, each on its lane."""
        for a in actions:
            lane = self._lanes.get(a.lane)
            if lane is None:
                self._carry_out(a)
                continue
            lane.check()
            self._stores.hold(a)
            over = lane.put(a)
            if len(self._promised) > _MANY:  # most are of no interest outside their lane
                self._promised = {k: x for k, x in self._promised.items() if not x.is_set()}
            for item in self._flow(a).makes:
                self._promised[item] = over
                self._to_come.add(item[0])

    def prepare(self, a: Action) -> None:
        """Take in everything that an action reads and that is still on its way."""
        to_come = self._to_come
        for item in self._flow(a).reads:
            if item[0] in to_come:
                self.fetch(item)

    def fetch(self, item: Item) -> None:
        """Wait for an item and take it in, if it is on its way; else it is here, or not needed."""
        if any(lane.is_current() for lane in self._lanes.values()):
            if item[0] is Datum.WEIGHTS:
                self._await_post(*cast(tuple[int, int], item[1:]))
        elif item in self._promised:
            self._await_lanes(item)
        if item not in self._coming:
            return
        with self._changing:
            arrivals = list(self._coming.get(item, ()))
        for arrival in arrivals:
            with arrival.lock:
                if not arrival.is_taken:
                    a = arrival.action
                    self._stores.take(a, self._messages.take(a))
                    arrival.is_taken = True
        with self._changing:
            left = [x for x in self._coming.get(item, ()) if not x.is_taken]
            if left:
                self._coming[item] = left
            else:
                self._coming.pop(item, None)

    def settle(self) -> None:
        """Take in everything that is on its way, and wait until what was sent has left."""
        for lane in self._lanes.values():
            lane.put().wait()  # each of its waits has a limit
            lane.check()
        self._promised.clear()
        for item in list(self._coming):
            self.fetch(item)
        self._messages.settle()

    def close(self) -> None:
        """End the lanes behind what they have to do."""
        for lane in self._lanes.values():
            lane.close()

    def _await_lanes(self, item: Item) -> None:
        """Wait until a lane has come to what makes an item."""
        self._promised.pop(item).wait()  # each of the lane's own waits has a limit
        for lane in self._lanes.values():
            lane.check()

    def _await_post(self, j: object, v: int) -> None:
        """Wait until the main thread has room for a version that a lane hands on."""
        with self._changing:
            if not self._changing.wait_for(lambda: self._posted.get(j, -1) >= v, self._limit_s):
                raise WaitTimeoutError(
                    f"version {v} of stage {j} was to be handed on, but nothing has been received "
                    f"into for {self._limit_s:g} s; look at what this worker does meanwhile"
                )

    def _carry_out(self, a: Action) -> None:
        # a lane may be ahead of the main thread, which has posted nothing yet
        if self._coming or self._promised or a.lane in self._lanes:
            self.prepare(a)
        self._do[a.kind](a)

    def _send(self, a: Action) -> None:
        self._messages.send(a, self._stores.key(a), self._stores.give(a))
        if a.lane in self._lanes:
            self._stores.let_go(a)

    def _post(self, a: Action) -> None:
        self._messages.post(a, self._stores.key(a))
        (item,) = self._flow(a).makes
        self._to_come.add(item[0])
        with self._changing:
            self._coming.setdefault(item, []).append(_Arrival(a))
            if a.payload is Payload.P and a.v is not None:
                self._posted[a.j] = a.v
                self._changing.notify_all()
