"""Programs as a graph: what each action waits for, and on which lane of its worker it runs.

Each worker has three lanes, which are busy independently of each other:

    compute   F, B, UPDATE, one after the other in program order
    send      messages out
    receive   messages in; receives count as posted ahead

An action waits for the data that it reads and for nothing else, so a late message delays the
actions that need it, and a send never delays the compute of its worker:

    F, B              the version (RECV P or UPDATE); F the batch, the activations and the tied
                      parameters (V), B the gradients of both (G, W)
    SEND S, SEND T    the worker's own backward and the partial sum that it received
    UPDATE            the total: own backward, RECV T or RECV S
    SEND P, SEND V    the version, so a relay leaves as soon as the version has arrived
    SEND W            the latest backward of its micro-batch
    SEND L            the latest forward, which is the last one of the last stage
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import Action, Kind, Payload

Item: TypeAlias = tuple[object, ...]  # a name for data: the payload and the indices it belongs to


_WITH_MANY_MAKERS = (Payload.S, Payload.W, Payload.V)  # sums, and what several workers send
_BEFORE_F = (Payload.P, Payload.V, Payload.D, Payload.A, Payload.R)
_BEFORE_B = (Payload.P, Payload.G, Payload.W)


class Lane(enum.IntEnum):
    """Name the three lanes of a worker."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2


@final
@dataclass(slots=True)
class Graph:
    """Hold the actions of all workers as numbered nodes; parallel lists, for speed.

    Args:
        actions: action of each node.
        workers: worker of each node.
        after: nodes that wait for the end of each node.
        feeds: of a SEND, its RECV, which waits for the message's first byte; else -1.
        blockers: number of nodes that each node waits for.
    """

    actions: list[Action] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    feeds: list[int] = field(default_factory=list)
    blockers: list[int] = field(default_factory=list)

    def add(self, worker: int, action: Action) -> int:
        """Append a node and return its number."""
        self.actions.append(action)
        self.workers.append(worker)
        self.after.append([])
        self.feeds.append(-1)
        self.blockers.append(0)
        return len(self.actions) - 1

    def wait(self, node: int, *, on: int) -> None:
        """Let ``node`` wait for the end of the node ``on``."""
        self.after[on].append(node)
        self.blockers[node] += 1

    def lane(self, node: int) -> Lane:
        """Return the lane on which a node runs."""
        return lane_of(self.actions[node])


def lane_of(action: Action) -> Lane:
    """Return the lane on which an action runs."""
    if action.kind is Kind.SEND:
        return Lane.SEND
    return Lane.RECEIVE if action.kind is Kind.RECV else Lane.COMPUTE


def build(programs: Sequence[Iterable[Action]]) -> Graph:
    """Connect the actions of all workers by the data and the order that they wait for.

    Args:
        programs: actions of each worker, in program order.

    Returns:
        The graph; its nodes are numbered worker by worker, in program order.

    Raises:
        PlanError: if a message is sent and not received, or received and not sent.
    """
    graph = Graph()
    for worker, program in enumerate(programs):
        _read_program(graph, worker, program)
    _pair_messages(graph)
    return graph


def _read_program(graph: Graph, worker: int, program: Iterable[Action]) -> None:
    made: defaultdict[Item, list[int]] = defaultdict(list)  # who made the data, so far
    previous: dict[object, int] = {}  # the last node of the compute lane and of each payload
    for action in program:
        node = graph.add(worker, action)
        for item in _reads(action):
            for maker in made[item]:
                graph.wait(node, on=maker)
        if action.kind is not Kind.RECV:  # messages of one payload leave in program order
            if action.payload in previous:
                graph.wait(node, on=previous[action.payload])
            previous[action.payload] = node
        for item in _makes(action):
            if item[0] not in _WITH_MANY_MAKERS:  # of all else, only the latest counts
                made[item].clear()
            made[item].append(node)


def _reads(action: Action) -> Iterator[Item]:
    """Yield the names of the data that an action reads."""
    if action.kind is Kind.SEND and action.payload is Payload.W:
        yield Payload.W, action.t, action.i
    elif action.kind is Kind.SEND:
        yield _name(action, Payload.P if action.payload is Payload.V else action.payload)
    elif action.kind is Kind.F:
        yield from (_name(action, payload) for payload in _BEFORE_F)
    elif action.kind is Kind.B:
        yield from (_name(action, payload) for payload in _BEFORE_B)
    elif action.kind is Kind.UPDATE:
        yield _name(action, Payload.S)


def _makes(action: Action) -> Iterator[Item]:
    """Yield the names of the data that an action makes on its worker."""
    if action.kind is Kind.RECV:
        yield _name(action, action.payload)
    elif action.kind is Kind.F:
        yield _name(action, Payload.R)
        yield _name(action, Payload.L)
        yield Payload.A, action.t, action.i, action.j + 1
    elif action.kind is Kind.B:
        yield _name(action, Payload.S)
        yield Payload.W, action.t, action.i
        yield Payload.G, action.t, action.i, action.j - 1
    elif action.kind is Kind.UPDATE:
        yield _name(action, Payload.P)


def _name(action: Action, payload: Payload | None) -> Item:
    """Name the data of ``payload`` that belong to an action; A and G by the stage they enter."""
    if payload is Payload.P:
        return payload, action.j, action.v
    if payload in (Payload.S, Payload.T):  # a total is the last partial sum
        return Payload.S, action.t, action.j
    if payload is Payload.R:  # relayed around each forward, so that the latest is the right one
        return payload, action.j
    if payload is Payload.V:  # whichever stage it belongs to: the first reader waits for all
        return payload, action.v
    if payload in (Payload.D, Payload.L):
        return payload, action.t
    return payload, action.t, action.i, action.j


def _pair_messages(graph: Graph) -> None:
    """Connect each SEND to its RECV; equal messages pair up in program order."""
    sent: defaultdict[Item, deque[int]] = defaultdict(deque)
    for node, action in enumerate(graph.actions):
        if action.kind is Kind.SEND:
            sent[_envelope(action, graph.workers[node], action.peer)].append(node)
    for node, action in enumerate(graph.actions):
        if action.kind is not Kind.RECV:
            continue
        waiting = sent[_envelope(action, action.peer, graph.workers[node])]
        if not waiting:
            raise _unpaired(graph, node, "is received and never sent")
        graph.feeds[waiting.popleft()] = node
        graph.blockers[node] += 1
    for left in sent.values():
        if left:
            raise _unpaired(graph, left[0], "is sent and never received")


def _envelope(action: Action, source: int | None, target: int | None) -> Item:
    return source, target, action.payload, action.t, action.i, action.j, action.v


def _unpaired(graph: Graph, node: int, what: str) -> PlanError:
    return PlanError(
        f"{graph.actions[node]} of worker {graph.workers[node]} {what}; allowed: a SEND and a "
        "RECV for each message; validate the programs first"
    )
