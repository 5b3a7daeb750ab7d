"""Programs as a graph: what each action waits for, and on which lane of its worker it runs.

Each worker has five lanes, which are busy independently of each other:

    compute   F, B, UPDATE, one after the other in program order
    send      messages out
    receive   messages in; receives count as posted ahead
    tiers     what leaves memory, or comes back
    coding    gradients on their way into a message, or out of one, in program order, where that
              takes time; where updates end a step, the next begins behind it

An action waits for the data that it reads (plan/dataflow.py) and for nothing else, so a late
message delays the actions that need it, and a send never delays the compute of its worker.

Not so parameters for one use (sharding "full"). Who computes sends them, when the program
comes to it; and they leave when their receiver has room for them, which it has from its GATHER
on, and has said so, which takes a latency.

    owner     F2 | SEND P5 | F3               waits for F2
                 ^
    receiver  F3 | GATHER 5, RECV P5 | F4     and for F3, one latency later
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.actions import Lane as ActionLane
from lightning_cyclic.plan.dataflow import Dataflow, Datum, Item
from lightning_cyclic.plan.passes.messages import is_for_one_use
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.simulate.costs import Network, is_of_gradient

_NOT_SIMULATED = frozenset({Payload.K, Payload.X, Payload.M, Payload.C})
"""What no steady step has: start signals, descriptions, metrics, copies at a flush."""
_COMPUTE = (ActionLane.MAIN, False, False)  # the queue of what has no message


class Lane(enum.IntEnum):
    """Name the lanes of a worker."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2
    TIERS = 3
    CODING = 4


@final
@dataclass(slots=True)
class Graph:
    """Hold the actions of all workers as numbered nodes; parallel lists, for speed.

    Args:
        after: nodes that wait for the end of each node.
        feeds: of a SEND, its RECV, which waits for the message's first byte; else -1.
        told: nodes that wait for the end of each node, and for one latency more.
        blockers: number of nodes that each node waits for.
        coding: nodes that encode what an action sends, or that an action adds once it is decoded.
    """

    actions: list[Action] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    feeds: list[int] = field(default_factory=list)
    told: list[list[int]] = field(default_factory=list)
    blockers: list[int] = field(default_factory=list)
    coding: set[int] = field(default_factory=set)

    def add(self, worker: int, action: Action) -> int:
        self.actions.append(action)
        self.workers.append(worker)
        self.after.append([])
        self.feeds.append(-1)
        self.told.append([])
        self.blockers.append(0)
        return len(self.actions) - 1

    def wait(self, node: int, *, on: int) -> None:
        """Let ``node`` wait for the end of the node ``on``."""
        self.after[on].append(node)
        self.blockers[node] += 1

    def wait_to_hear(self, node: int, *, of: int) -> None:
        """Let ``node`` wait for the end of the node ``of``, of another worker that says so."""
        self.told[of].append(node)
        self.blockers[node] += 1

    def lane(self, node: int) -> Lane:
        kind = self.actions[node].kind
        if node in self.coding:
            return Lane.CODING
        if kind in (Kind.SEND, Kind.ADD, Kind.OUTER):  # an ADD takes no time, holds nothing up
            return Lane.SEND
        if kind in (Kind.FETCH, Kind.EVICT):
            return Lane.TIERS
        return Lane.RECEIVE if kind is Kind.RECV else Lane.COMPUTE


def build(
    programs: Sequence[Iterable[Action]], plan: Plan | None = None,
    network: Network | None = None, *, codes: bool = False,
) -> Graph:  # fmt: skip
    """Connect the actions of all workers by the data and the order that they wait for.

    Args:
        plan: of the programs, where stages share parameters. [they share none]
        network: the links, where hosts have several workers. [each has its own]
        codes: whether it takes time to encode and decode gradients. [False]

    Returns:
        The graph; its nodes are numbered worker by worker, in program order.

    Raises:
        PlanError: if a message is sent and not received, or received and not sent.
    """
    graph = Graph()
    rooms: dict[int, int] = {}
    for worker, program in enumerate(programs):
        inside = partial((network or Network()).is_inside, worker)
        coding = _Coding(graph, codes, plan)
        rooms |= _read_program(graph, Dataflow(plan, worker), worker, program, inside, coding)
    _pair_messages(graph, rooms)
    return graph


def _read_program(
    graph: Graph, flow: Dataflow, worker: int, program: Iterable[Action],
    inside: Callable[[int | None], bool], coding: _Coding,
) -> dict[int, int]:  # fmt: skip
    """Add the actions of a worker; return RECV -> GATHER, from which on there is room for it."""
    made = _Made(graph)
    previous: dict[object, int] = {}  # the last node of the compute lane and of each payload
    rooms: dict[int, int] = {}
    for action in program:
        if action.payload in _NOT_SIMULATED:
            continue
        node, row = graph.add(worker, action), flow(action)
        for item in row.reads:
            made.wait(node, item, for_later=bool(action.lane))
        node = coding.put(node)
        if is_for_one_use(action):
            if _COMPUTE in previous and action.kind is Kind.SEND:
                graph.wait(node, on=previous[_COMPUTE])
            elif _COMPUTE in previous:
                rooms[node] = previous[_COMPUTE]
        elif action.kind is not Kind.RECV:
            # messages of one payload leave a port in program order
            carried = None if action.kind is Kind.FREE else action.payload
            queue = action.lane, carried or action.kind is Kind.ADD, inside(action.peer)
            # a FETCH has room behind what comes before it
            for before in {queue, _COMPUTE} if action.kind is Kind.FETCH else (queue,):
                _wait_if_any(graph, node, previous.get(before))
            previous[queue] = node
        for item in row.makes:
            made.add(node, item)
    return rooms


@final
class _Coding:
    """Put what encodes and decodes gradients on its lane.

    Args:
        takes_time: whether it does; else nothing is put there.
        plan: of the programs, if it is known.
    """

    def __init__(self, graph: Graph, takes_time: bool, plan: Plan | None) -> None:
        self._graph = graph
        self._takes_time = takes_time
        self._settles = plan is not None and plan.axes.weights.at_end_of_step
        self._last: int | None = None

    def put(self, node: int) -> int:
        """Let a node of gradients encode or decode them; return it, or what sends them then."""
        graph, before = self._graph, self._last
        action = graph.actions[node]
        is_coded = action.kind is Kind.ADD or is_of_gradient(action)
        # sums are waited for at a step's end, before anything of the next one leaves
        is_next = before is not None and graph.actions[before].t < action.t
        if is_coded or (is_next and self._settles and action.kind is not Kind.RECV):
            _wait_if_any(graph, node, before)
        if not self._takes_time or not is_coded:
            return node
        self._last = node
        graph.coding.add(node)
        if action.kind is Kind.ADD:
            return node
        sender = graph.add(graph.workers[node], action)
        graph.wait(sender, on=node)
        return sender


def _wait_if_any(graph: Graph, node: int, on: int | None) -> None:
    if on is not None:
        graph.wait(node, on=on)


@final
class _Made:
    """Know which nodes of a worker have made its data, and which wait for what is to come."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._makers: defaultdict[Item, list[int]] = defaultdict(list)
        self._waiting: defaultdict[Item, list[int]] = defaultdict(list)

    def wait(self, node: int, item: Item, *, for_later: bool) -> None:
        """Let a node wait for what it reads; on a lane, also for what is received later."""
        for maker in self._makers[item]:
            self._graph.wait(node, on=maker)
        if for_later and not self._makers[item]:
            self._waiting[item].append(node)

    def add(self, node: int, item: Item) -> None:
        """Note who makes an item: the last, but of a sum of which nobody says the last all."""
        if item[0] is not Datum.SUM:
            self._makers[item].clear()
        self._makers[item].append(node)
        for waiting in self._waiting.pop(item, ()):
            self._graph.wait(waiting, on=node)


def _pair_messages(graph: Graph, rooms: Mapping[int, int]) -> None:
    """Connect each SEND to its RECV; equal messages pair up in program order."""
    sent: defaultdict[tuple[object, ...], deque[int]] = defaultdict(deque)
    for node, action in enumerate(graph.actions):
        if action.kind is Kind.SEND and node not in graph.coding:
            sent[_envelope(action, graph.workers[node], action.peer)].append(node)
    for node, action in enumerate(graph.actions):
        if action.kind is not Kind.RECV:
            continue
        waiting = sent[_envelope(action, action.peer, graph.workers[node])]
        if not waiting:
            raise _unpaired(graph, node, "is received and never sent")
        send = waiting.popleft()
        graph.feeds[send] = node
        graph.blockers[node] += 1
        if node in rooms:
            graph.wait_to_hear(send, of=rooms[node])
    for left in sent.values():
        if left:
            raise _unpaired(graph, left[0], "is sent and never received")


def _envelope(action: Action, source: int | None, target: int | None) -> tuple[object, ...]:
    return source, target, action.payload, action.t, action.i, action.j, action.v


def _unpaired(graph: Graph, node: int, what: str) -> PlanError:
    return PlanError(
        f"{graph.actions[node]} of worker {graph.workers[node]} {what}; allowed: a SEND and a "
        "RECV for each message; validate the programs first"
    )
