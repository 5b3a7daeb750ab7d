"""Replay programs on integers: the runtime without tensors.

What is played is the strictest transport that the package runs on:

* a channel (what leaves one worker for another on one lane) is one queue without tags: the n-th
  send meets the n-th receive, whatever was meant;
* sends are rendezvous: one is over when its receive has been posted, and a sender waits where as
  many of a kind are not over as it has buffers for;
* every message may be followed, on its channel, by another with its description and content (X),
  as it is where it has not the form of the last of its kind, which both ends remember; where
  forms stay as they are X is left out at both ends, which changes no order;
* receives are posted where they stand in the program, and wait for nothing; what waits is the
  action that reads what was received. Actions on lanes wait beside the others of their worker.

Whatever an action takes must be there by then, or under way to it: see dataflow.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import NoReturn, final

from lightning_cyclic.plan.actions import COMPUTE, Action, Kind, Lane, Payload
from lightning_cyclic.plan.clock import refuse
from lightning_cyclic.plan.dataflow import Dataflow, Datum, Item
from lightning_cyclic.plan.lower import program_of
from lightning_cyclic.plan.passes.messages import (
    Channel,
    Ring,
    channel_of,
    is_for_one_use,
    ring_of,
)
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.plan.roles import version_readers

# what would be alive for ever behind a flush
_ARE_TAKEN = frozenset({
    Datum.INPUT, Datum.GRAPH, Datum.WORK, Datum.OUTPUT_GRADIENT, Datum.TIED_GRADIENT, Datum.SUM,
    Datum.STATE, Datum.NEW_STATE, Datum.GRAPH_COPY,
})  # fmt: skip
_WITHOUT_FORM = frozenset({Payload.K, Payload.X})


_meant = attrgetter("payload", "t", "i", "j", "v")
_TODO = "move or correct it, or use the programs of make_plan(...)"


@final
class Replay:
    """Play the programs of all workers, part after part."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._queues: dict[Channel, _Queue] = defaultdict(_Queue)
        self._workers = [_Worker(plan, w, self._queues) for w in range(plan.num_workers)]

    def run(self, programs: Sequence[Sequence[Action]]) -> None:
        """Play one part of every worker's program as far as it gets.

        Raises:
            ValidationError: messages do not meet those that were meant, or an action takes
                something that is not there.
        """
        for worker, program in zip(self._workers, programs, strict=True):
            worker.todo.extend(_described(program))
        turns = [True]
        while any(turns):
            turns = [worker.run() for worker in self._workers]

    def check_step_ended(self) -> None:
        """Check that nobody waits for what others do in their next steps.

        Behind a step of Lightning's all workers may meet (to write a checkpoint, to reduce a
        value), so those steps may begin only when every worker has ended this one.
        """
        for worker in self._workers:
            worker.check_step_ended()

    def check_flushed(self, t: int) -> None:
        """Check that nothing is left to do, and that all have come to the same point.

        Raises:
            ValidationError: a worker waits for ever, a message is pending, or somebody lacks the
                newest weights or losses.
        """
        for never_comes in (
            True,
            False,
        ):  # to blame is not who waits for one who waits for nothing
            for worker in self._workers:
                worker.check_idle(never_comes=never_comes)
        for channel, queue in self._queues.items():
            for w, a in queue.pending(channel):
                given = "is sent and never received" if a.kind is Kind.SEND else (
                    "waits for a message that nobody sends"
                )  # fmt: skip
                refuse(
                    self._plan, a, w, given=given,
                    allowed="as many receives as sends, channel by channel", todo=_TODO,
                )  # fmt: skip
        for worker in self._workers:
            worker.check_end(t)


@final
class _Queue:
    def __init__(self) -> None:
        self.sends: deque[tuple[_Worker, Action]] = deque()
        self.receives: deque[tuple[_Worker, Action]] = deque()

    def meet(self) -> None:
        """Let the first send meet the first receive, as long as there are both."""
        while self.sends and self.receives:
            sender, sent = self.sends.popleft()
            receiver, a = self.receives.popleft()
            sender.has_sent(sent)
            receiver.has_received(a, sent)

    def pending(self, channel: Channel) -> Iterator[tuple[int, Action]]:
        yield from ((channel.source, a) for _, a in self.sends)
        yield from ((channel.target, a) for _, a in self.receives)


@final
class _Worker:
    """Play the program of one worker; what it holds are names of items (see dataflow.py)."""

    def __init__(self, plan: Plan, w: int, queues: dict[Channel, _Queue]) -> None:
        self.todo: deque[Action] = deque()
        self._plan = plan
        self._w = w
        self._queues = queues
        self._flow = Dataflow(plan, w)
        self._depths = program_of(plan).depths
        self._lanes: dict[Lane, deque[Action]] = {lane: deque() for lane in Lane if lane}
        self._under_way: Counter[Ring] = Counter()
        self._expected: Counter[Item] = Counter()  # will be there: received, or made on a lane
        own = {j for j in range(plan.num_stages) if not self._fetches or plan.owner(j) == w}
        tiers = plan.tiers
        away = {j for j in own if tiers is not None and tiers.moves_weights(j)}
        self._have: set[Item] = {(Datum.WEIGHTS, j, 0) for j in own - away}
        self._have |= {(Datum.WEIGHTS_COPY, j, 0) for j in away}
        self._have |= {(Datum.COPY, j, 0) for j in range(plan.num_stages) if plan.owner(j) == w}
        self._ended: Counter[int] = Counter()  # step -> forwards of the last stage
        self._room: dict[int, int | None] = {}  # stages that are fetched for use -> version
        self._holds = [j for j in range(plan.num_stages) if w in plan.axes.placement.workers_of(j)]
        self._took_part: set[int] = set()  # in steps

    @property
    def _fetches(self) -> bool:
        return self._plan.axes.sharding.gathers

    # ------------------------------------------------------------------ running

    def run(self) -> bool:
        """Run until everything waits; say whether anything was run."""
        has_run = False
        while self._run_main() or any(map(self._run_lane, self._lanes.values())):
            has_run = True
        return has_run

    def _run_main(self) -> bool:
        if not self.todo:
            return False
        a = self.todo[0]
        if a.kind is Kind.UPDATE and not self._plan.makes_versions(self._w, a.j):
            self._refuse(a, "updates somebody else's stage", f"worker {self._plan.owner(a.j)}")
        if _runs_beside(a):
            self._lanes[a.lane].append(self.todo.popleft())
            self._expected.update(self._flow(a).makes)
            return True
        if not self._is_ready(a):
            return False
        self._do(self.todo.popleft())
        return True

    def _run_lane(self, lane: deque[Action]) -> bool:
        if not lane or not self._is_ready(lane[0]):
            return False
        a = lane.popleft()
        self._expected.subtract(self._flow(a).makes)
        self._do(a)
        return True

    def _is_ready(self, a: Action) -> bool:
        """Say whether an action can run now.

        On the main lane, what it reads must be under way by then; lanes may be given an action
        before its message is posted.
        """
        if a.kind is Kind.RECV or a.payload is Payload.X:
            return True
        ring = ring_of(a, self._w) if a.kind is Kind.SEND else None
        if ring is not None and self._under_way[ring] >= self._depths[ring]:
            return False
        missing = [item for item in self._flow(a).reads if not self._has(item, a)]
        if not _runs_beside(a) and not all(self._expected[item] for item in missing):
            self._refuse_early(a)
        return not missing

    def _do(self, a: Action) -> None:
        row = self._flow(a)
        match a.kind:
            case Kind.SEND:
                self._send(a)
            case Kind.RECV:
                self._receive(a)
            case Kind.GATHER:
                self._need(a, a.j not in self._room)
                self._room[a.j] = a.v
            case Kind.FREE if a.payload is None:
                self._need(a, self._room.pop(a.j, None) == a.v)
            case Kind.TELL:
                self._make(a, (Kind.TELL, a.t))
            case _:
                self._need(a, a.kind is not Kind.UPDATE or a.v == a.t + 1)
                self._compute(a, row.makes)
        self._have.difference_update(row.frees)

    # ------------------------------------------------------------------ actions

    def _compute(self, a: Action, makes: Iterable[Item]) -> None:
        for item in makes:
            if item[0] is Datum.LOSSES:
                self._ended[a.t] += 1
            elif item[0] is Datum.TIED_GRADIENT:  # to which several of its stages add
                self._have.add(item)
            else:
                self._make(a, item)
        if a.kind is not Kind.UPDATE:
            self._took_part.add(a.t)

    def _send(self, a: Action) -> None:
        ring = ring_of(a, self._w)
        self._under_way[ring] += 1
        queue = self._queues[ring.channel]
        queue.sends.append((self, a))
        queue.meet()

    def has_sent(self, a: Action) -> None:
        """Note that a send has met its receive."""
        ring = ring_of(a, self._w)
        self._under_way[ring] -= 1

    def _receive(self, a: Action) -> None:
        self._expected.update(self._flow(a).makes)
        queue = self._queues[channel_of(a, self._w)]
        queue.receives.append((self, a))
        queue.meet()

    def has_received(self, a: Action, sent: Action) -> None:
        """Take in what has come where ``a`` was posted."""
        if _meant(sent) != _meant(a):
            self._refuse(a, f"takes what was sent as {sent}", "receives in the order of the sends")
        makes = self._flow(a).makes
        self._expected.subtract(makes)
        if a.payload is Payload.P:
            self._need(a, not self._fetches or self._room.get(a.j) == a.v)
        if a.payload in (Payload.P, Payload.V):
            self._need(a, (a.j in self._holds) is (a.payload is Payload.P))
        for item in makes:
            self._make(a, item)

    # ------------------------------------------------------------------ what is there

    def _has(self, item: Item, a: Action) -> bool:
        """Say whether an item that an action reads is there, or need not be."""
        plan = self._plan
        match item[0]:
            case Datum.START:
                return self._expected[item] == 0
            case Datum.BATCH:
                return self._w == plan.beginner(self._w, a.t) or item in self._have
            case Datum.LOSSES:
                return item in self._have or self._has_losses(a.t)
            case Datum.NORMS:
                return plan.owner(int(str(item[2]))) == self._w or item in self._have
            case _:
                return item in self._have

    def _has_losses(self, t: int) -> bool:
        """Say whether all forwards of a step that end on this worker have been run."""
        j, micros = self._plan.num_stages - 1, range(self._plan.num_microbatches)
        own = sum(self._plan.worker_of(i, j, t) == self._w for i in micros)
        return 0 < own == self._ended[t]

    def _make(self, a: Action, item: Item) -> None:
        self._need(a, item not in self._have)
        self._have.add(item)

    # ------------------------------------------------------------------ the end

    def check_step_ended(self) -> None:
        """Check that nothing is left to do but on lanes."""
        if self.todo:
            self._refuse(
                self.todo[0], "waits at the end of a step for what others do in their next one",
                "what can be done when all have ended the step",
            )  # fmt: skip

    def check_idle(self, *, never_comes: bool) -> None:
        """Check that nothing is left to do.

        Args:
            never_comes: look for what waits for something that is not even under way.
        """
        for queue in (self.todo, *self._lanes.values()):
            if not queue:
                continue
            first, *behind = queue
            missing = [item for item in self._flow(first).reads if not self._has(item, first)]
            too_late = Counter(x for a in behind if first.lane for x in self._flow(a).makes)
            if never_comes and any(self._expected[x] <= too_late[x] for x in missing):
                self._refuse_early(first)
            if not never_comes:
                self._refuse(
                    first, "waits for ever for a message, or for its receiver",
                    "a send that is not behind it, and a receive for each send",
                )  # fmt: skip

    def check_end(self, t: int) -> None:
        """Check that the worker has the newest weights and the losses of the last step."""
        plan = self._plan
        last = Action(kind=Kind.UPDATE, t=t, j=0, v=t + 1, s=plan.end(t, 0))
        for j in range(plan.num_stages):
            newest = {(Datum.WEIGHTS, j, t + 1), (Datum.WEIGHTS_COPY, j, t + 1)}
            is_held = not newest.isdisjoint(self._have)
            if not is_held and (j in self._holds or self._w in version_readers(plan, j)):
                self._refuse(last, f"ends without version {t + 1} of stage {j}", "the last one")
        if plan.axes.weights.is_local:
            self._check_exchanged(t, last)
        if not plan.axes.placement.runs_whole_micro:
            self._check_told(t, last)
        for item in self._have:
            if item[0] in _ARE_TAKEN:
                what = str(item[0]).rpartition(".")[-1].lower().replace("_", " ")
                numbers = ", ".join(map(str, item[1:]))
                self._refuse(last, f"ends with {what} ({numbers}), which nobody takes", "none")
        for j in plan.relayed:
            if j in self._holds and (Datum.BUFFERS, t + 1, 0, j) not in self._have:
                self._refuse(last, f"ends without the newest buffers of stage {j}", "these")

    def _check_exchanged(self, t: int, last: Action) -> None:
        """Check that the worker has what came of all exchanges, also if it is used later."""
        stages, steps = range(self._plan.num_stages), range(t + 1)
        for j, step in product(stages, steps):
            if self._plan.exchanges(step, j) and (Datum.OUTER, j, step) not in self._have:
                self._refuse(
                    last, f"ends without what step {step} has made of stage {j}", "outer weights"
                )

    def _check_told(self, t: int, last: Action) -> None:
        """Check that the worker was told of every step in which it took part."""
        for step in sorted(self._took_part):
            if step <= t and (Kind.TELL, step) not in self._have:
                self._refuse(last, f"ends without losses of step {step}", "those of all")

    # ------------------------------------------------------------------ refusals

    def _need(self, a: Action, is_there: bool) -> None:
        if not is_there:
            self._refuse_early(a)

    def _refuse_early(self, a: Action) -> NoReturn:
        if a.v is not None and a.kind in COMPUTE or a.payload in (Payload.P, Payload.V):
            held = sorted({int(str(x[2])) for x in self._have if x[:2] == (Datum.WEIGHTS, a.j)})
            if a.v not in held and a.kind is not Kind.RECV:
                self._refuse(
                    a, f"takes version {a.v} of stage {a.j}, which is not there", f"one of {held}"
                )
        self._refuse(
            a,
            "runs before what it needs is there, or twice",
            "F after F of the stage before, B after F and B of the stage behind, sums in the "
            "order of micro-batches, UPDATE after the version before and the whole sum",
        )

    def _refuse(self, a: Action, given: str, allowed: str) -> NoReturn:
        refuse(self._plan, a, self._w, given=given, allowed=allowed, todo=_TODO)


def _described(program: Iterable[Action]) -> Iterator[Action]:
    for a in program:
        yield a
        if a.kind in (Kind.SEND, Kind.RECV) and a.payload not in _WITHOUT_FORM:
            yield replace(a, payload=Payload.X)


def _runs_beside(a: Action) -> bool:
    """Say whether an action runs beside those of its worker's main lane."""
    return bool(a.lane) and a.kind is not Kind.RECV and not is_for_one_use(a)
