"""The worker: carry out the program of one worker, action by action.

    F, B, I, W     what runs the stages of the user's step               (compute)
    SEND      hand what the action names to the messages
    RECV      be ready for a message; what waits for it is the first action that reads it
    ADD       the own gradient to a sum that came; OUTER what is made of the sum
    GATHER, FREE   parameters come for one use, and go
    UPDATE, TELL   the host: who applies gradients, and who wants to know what came out

The table of what actions read (plan/dataflow.py) says what must have come before an action; the
program says everything else. Nothing here knows a schedule, a rule or a placement.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Generic, Protocol, TypeAlias, TypeVar, cast, final

from lightning_cyclic.errors import CyclicError, StepError, WaitTimeoutError
from lightning_cyclic.plan.actions import Action, Kind, Lane, Payload
from lightning_cyclic.plan.dataflow import Dataflow, Datum, Flow, Item
from lightning_cyclic.runtime.flight_recorder import FlightRecorder, joining
from lightning_cyclic.runtime.messages import Incoming, Message, Messages
from lightning_cyclic.runtime.moments import HOST, PAST, AbstractMoment, AbstractStreams
from lightning_cyclic.viz.words import sentence, waiting

T = TypeVar("T")


@final
class LaneThread(Generic[T]):
    """Do actions in a thread, in their order.

    The program says which lane runs an action. A lane does its actions in their order, in a thread
    of its own if any of them waits for other workers, else at once. It never waits for a message
    that comes behind one that it would have to pass on first: the order of its actions is proved.

    Where the host runs ahead of the device, the lane has a stream, which does in the same order
    what the thread launches there; and who waits for an action has its own stream wait, too.

    Args:
        do: carries out an action, as it was put: alone, or with what belongs to it.
        streams: of the device.
        limit_s: returns that of waits for the lane, in seconds. [each wait of the lane has one]
    """

    def __init__(
        self, name: str, do: Callable[[T], None], streams: AbstractStreams = HOST,
        limit_s: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        self.error: CyclicError | None = None
        self.name = name
        self._do = do
        self._streams = streams
        self._limit_s = limit_s
        self._stream = streams.new()
        self._done: deque[tuple[int, AbstractMoment]] = deque()  # number of an action -> moment
        self._batches: queue.SimpleQueue[tuple[AbstractMoment, Sequence[T]] | None] = (
            queue.SimpleQueue()
        )
        self._over = threading.Condition(threading.Lock())
        self.num_put = self.num_over = 0  # of actions
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, actions: Sequence[T]) -> None:
        """Queue actions, behind all that the stream of this thread has; only one thread does."""
        self.num_put += len(actions)
        self._batches.put((self._streams.now(), actions))

    def wait_for(self, number: int) -> None:
        """Wait until as many actions are over, in all.

        Raises:
            CyclicError: the one that has ended the lane.
        """
        limit_s = None if self._limit_s is None else self._limit_s()
        with self._over:
            if not self._over.wait_for(lambda: self.num_over >= number, limit_s):
                raise WaitTimeoutError(
                    f"{self.name} has not ended what it does for {limit_s:g} s: it reads or "
                    "writes what leaves memory, in the folder disk=...; look at that disk, use "
                    "another folder, or raise timeout"
                )
        self.check()
        last: AbstractMoment = PAST
        with self._over:  # the lane takes away what is over, too
            while self._done and self._done[0][0] <= number:
                _, last = self._done.popleft()
        last.join()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread behind the actions it has; never wait for it."""
        self._batches.put(None)

    def _run(self) -> None:
        with self._streams.on(self._stream):
            while (batch := self._batches.get()) is not None:
                behind, actions = batch
                behind.join()
                self._run_all(actions)

    def _run_all(self, actions: Sequence[T]) -> None:
        for a in actions:
            if self.error is None:
                self._try(a)
                self._note_done()
            with self._over:
                self.num_over += 1
                self._over.notify_all()

    def _note_done(self) -> None:
        moment = self._streams.now()
        if moment.is_over():
            return
        with self._over:
            self._done.append((self.num_over + 1, moment))
            while self._done and self._done[0][1].is_over():  # of no interest any more
                self._done.popleft()

    def _try(self, a: T) -> None:
        try:
            self._do(a)
        except CyclicError as error:
            self.error = error
        except Exception as error:  # a lane that dies must say so, or others wait for nothing
            self.error = StepError(f"{self.name} failed: {type(error).__name__}: {error}")
            self.error.__cause__ = error


_LaneThread: TypeAlias = LaneThread[tuple[Action, Flow]]

_MANY = 256
_HANDED_ON = frozenset({Payload.P, Payload.U})
_lane_of = attrgetter("lane")


class AbstractCompute(Protocol):
    """Be what runs the stages of a worker."""

    def forward(self, a: Action) -> None:
        """Run F."""

    def backward(self, a: Action) -> None:
        """Run B, or one of its halves: I, for which the stage before waits, or W."""


class AbstractStores(Protocol):
    """Be what messages are made of, and what they come to."""

    def key(self, a: Action) -> Hashable:
        """Return what the messages of an action are likely to look like, alike at both ends."""

    def give(self, a: Action) -> Message:
        """Return what a SEND sends."""

    def take(self, a: Action, message: Message) -> None:
        """Take in what has come for a RECV, when it is read."""

    def add(self, a: Action) -> None:
        """Carry out an ADD, or an OUTER."""

    def free(self, a: Action) -> None:
        """Carry out a FREE."""

    def move(self, a: Action) -> None:
        """Carry out a FETCH or an EVICT."""

    def hold(self, a: Action) -> None:
        """Keep what an action sends or moves, which a lane runs later, as it is till then."""

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
    """Hold a receive until its message has been taken in, by the first that needs it.

    A message that did not come to the first comes to nobody: the others meet the same error.
    """

    __slots__ = ("_action", "_error", "_incoming", "_is_taken", "_lock", "_streams", "taken")

    def __init__(self, action: Action, incoming: Incoming, streams: AbstractStreams) -> None:
        self._action = action
        self._incoming = incoming
        self._streams = streams
        self.taken: AbstractMoment = PAST  # when the stream of who took it in has done so
        self._lock = threading.Lock()  # the others that need it wait here
        self._is_taken = False
        self._error: Exception | None = None

    def take(self, take_in: Callable[[Action, Incoming], None]) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._is_taken:
                self.taken.join()
                return
            try:
                take_in(self._action, self._incoming)
            except Exception as error:
                self._error = error
                raise
            self._is_taken = True
            self.taken = self._streams.now()


@final
class Worker:
    """Carry out actions.

    Args:
        flight: notes what is done, should the run fail.
        lanes: those whose actions wait, and so run in threads of their own.
        limit_s: returns that of waits of a lane for what the main thread does, in seconds, and of
            the main thread for a disk.
    """

    def __init__(
        self,
        flow: Dataflow,
        messages: Messages,
        compute: AbstractCompute,
        stores: AbstractStores,
        host: AbstractHost,
        flight: FlightRecorder,
        lanes: Iterable[Lane] = (),
        limit_s: Callable[[], float] = lambda: 60.0,
    ) -> None:
        self._flow = flow
        self._streams = streams = messages.streams
        self._messages = messages
        self._stores = stores
        self.flight = flight
        self._coming: dict[Item, _Arrival] = {}
        # what another stream may not have seen come yet: that of the main thread, or of a lane
        self._taken: dict[Item, AbstractMoment] = {}
        self._lock = threading.Lock()  # what is coming changes, by several lanes
        self._has_posted = threading.Condition(self._lock)
        # datum, stage -> the newest version, or step, for which it has been posted
        self._posted: dict[object, int] = {}
        self._limit_s = limit_s
        # what lanes will have made: item -> lane, and which of its actions makes it
        self._promised: dict[Item, tuple[_LaneThread, int]] = {}
        do: dict[Kind, Callable[[Action], None]] = {
            Kind.F: compute.forward,
            Kind.B: compute.backward,
            Kind.I: compute.backward,
            Kind.W: compute.backward,
            Kind.ADD: stores.add,
            Kind.OUTER: stores.add,
            Kind.SEND: self._send,
            Kind.RECV: self._post,
            Kind.UPDATE: host.update,
            Kind.TELL: host.tell,
            Kind.GATHER: _nothing,  # the receive behind it says all
            Kind.FREE: stores.free,
            Kind.FETCH: stores.move,
            Kind.EVICT: stores.move,
        }
        self._do = {kind: flight.noted(done, sentence) for kind, done in do.items()}
        self._take_message = flight.noted(self._receive, waiting)
        self._await_lane = flight.noted(LaneThread.wait_for, joining)
        self._lanes = {
            lane: LaneThread(
                f"cyclic-{lane}", self._run_on_lane, streams,
                limit_s if lane is Lane.TIERS else None,
            )
            for lane in lanes
        }  # fmt: skip

    def run(self, actions: Iterable[Action]) -> None:
        """Carry out actions in their order, each on its lane."""
        if not self._lanes:
            for a in actions:
                self._carry_out(a)
            return
        for name, batch in groupby(actions, _lane_of):
            if (lane := self._lanes.get(name)) is not None:
                self._hand_to(lane, batch)
            else:
                for a in batch:
                    self._carry_out(a)

    def fetch(self, item: Item) -> None:
        """Wait for an item and take it in, if it is on its way; else it is here, or not needed.

        For the main thread: a lane would wait for itself.
        """
        if item in self._promised:
            lane, number = self._promised.pop(item)
            self._join(lane, number)
        if item in self._coming or item in self._taken:
            self._take_in(item)

    def follow(self, flow: Dataflow) -> None:
        """Go on with actions of another plan, when nothing is on its way."""
        self._flow = flow

    def settle(self, *, joins: bool = True) -> None:
        """Take in everything that is on its way, and wait until what was sent has left.

        Args:
            joins: whether to wait for what lanes have to do, too.
        """
        if joins:
            for lane in self._lanes.values():
                self._join(lane, lane.num_put)
            self._promised.clear()
        for item in (*self._coming, *self._taken):
            self.fetch(item)
        self._taken.clear()
        self._messages.settle()

    def close(self) -> None:
        """End the lanes behind what they have to do."""
        for lane in self._lanes.values():
            lane.close()

    def _hand_to(self, lane: _LaneThread, batch: Iterable[Action]) -> None:
        lane.check()
        if len(self._promised) > _MANY:  # most are of no interest outside their lane
            kept = self._promised.items()
            self._promised = {item: at for item, at in kept if at[1] > at[0].num_over}
        rows = [(a, self._flow(a)) for a in batch]
        for number, (a, row) in enumerate(rows, start=lane.num_put + 1):
            self._stores.hold(a)
            for item in row.makes:
                self._promised[item] = (lane, number)
        lane.put(rows)

    def _run_on_lane(self, row: tuple[Action, Flow]) -> None:
        a, (reads, _, _) = row
        for item in reads:
            is_outer = item[0] is Datum.OUTER and a.lane is Lane.WEIGHTS  # not made by this one
            is_handed_on = item[0] is Datum.WEIGHTS and a.kind is Kind.SEND
            if is_handed_on or is_outer:  # a lane may be ahead of who posts
                self._await_post(item)
            if item in self._coming or item in self._taken:
                self._take_in(item)
        self._do[a.kind](a)

    def _join(self, lane: _LaneThread, number: int) -> None:
        (LaneThread.wait_for if lane.num_over >= number else self._await_lane)(lane, number)

    def _take_in(self, item: Item) -> None:
        with self._lock:
            arrival, taken = self._coming.get(item), self._taken.get(item, PAST)
        if arrival is None:
            taken.join()
            return
        arrival.take(self._take_message)
        with self._lock:
            if self._coming.get(item) is arrival:  # and neither another, nor one taken already
                del self._coming[item]
                self._note_taken(item, arrival.taken)

    def _note_taken(self, item: Item, taken: AbstractMoment) -> None:
        if not self._lanes or taken.is_over():
            return
        if len(self._taken) > _MANY:
            kept = self._taken.items()
            self._taken = {x: moment for x, moment in kept if not moment.is_over()}
        self._taken[item] = taken

    def _receive(self, a: Action, incoming: Incoming) -> None:
        self._stores.take(a, self._messages.take(incoming))

    def _await_post(self, item: Item) -> None:
        """Wait until another thread has room for weights that a lane hands on."""
        key, v = item[:2], cast(int, item[2])
        if self._posted.get(key, -1) >= v:
            return
        limit_s = self._limit_s()
        with self._has_posted:
            if not self._has_posted.wait_for(lambda: self._posted.get(key, -1) >= v, limit_s):
                what = "version" if item[0] is Datum.WEIGHTS else "the outer weights of step"
                raise WaitTimeoutError(
                    f"{what} {v} of stage {item[1]} was to be handed on, but nothing has been "
                    f"received into for {limit_s:g} s; look at what this rank does meanwhile"
                )

    def _carry_out(self, a: Action) -> None:
        if self._coming or self._promised or self._taken:
            coming, promised, taken = self._coming, self._promised, self._taken
            for item in self._flow(a).reads:
                if item in coming or item in promised or item in taken:
                    self.fetch(item)
        self._do[a.kind](a)

    def _send(self, a: Action) -> None:
        self._messages.send(a, self._stores.key(a), self._stores.give(a))
        if a.lane in self._lanes:
            self._stores.let_go(a)

    def _post(self, a: Action) -> None:
        arrival = _Arrival(a, self._messages.post(a, self._stores.key(a)), self._streams)
        (item,) = self._flow(a).makes
        with self._lock:
            self._coming[item] = arrival
            if a.payload in _HANDED_ON:
                self._posted[item[:2]] = cast(int, item[2])
                self._has_posted.notify_all()


def _nothing(a: Action) -> None:
    """Do nothing."""
