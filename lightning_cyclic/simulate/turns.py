"""Turns: in which order ports serve messages, known before any of them is sent.

All messages have one order, and each port serves its own in it. So no two ports can wait for each
other, when a message leaves does not depend on which happened to be ready first, and a run is a
longest path: what waits for what is known, and only the seconds are added up.

Messages go in the order in which the timetable has them *due*, in half slots:

    parameters   in the slot in which their sender has them
    a sum        three halves of a slot later, as the backward has to end
    a total      where the update begins, earlier by as much as its last sum is made before it,
                 but for a slot
    others       one slot before the F or B that reads them, but not before their sender has them

What is handed on is due by its sender, so that all workers pass it on in one order, also where
several of them begin in one slot; and nothing is due before what it waits for. What is due at once
goes in the order in which it is made, then by stage, then by hops: as often as it has been handed
on, then by chunk. Where a program does not keep to such an order a message has its turn behind
those that it waits for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.messages import is_for_one_use
from lightning_cyclic.simulate.graph import Graph, Lane

HALVES = 2  # per slot
SUM = 3
"""When a sum that is handed on is due, in half slots from where the timetable has its sender."""
AHEAD = {Kind.F: -2, Kind.B: -2, Kind.ADD: 1}  # when others are, from where it has their reader


class Turn(NamedTuple):
    """Say when a message has its turn; the least is first.

    Args:
        due: half slot in which it is due.
        made: slot in which its sender has it.
        j: stage.
        hops: how often it has been handed on before.
        c: chunk.
    """

    due: int
    made: int
    j: int
    hops: int
    c: int


def in_turn(graph: Graph) -> list[int]:
    """Return the nodes in an order in which none comes before one that it waits for.

    The sends among them are in turn; so are their receives, as each comes behind its own.

    Args:
        graph: of the programs.

    Returns:
        All nodes that need not wait for ever.
    """
    blockers, hops = list(graph.blockers), [0] * len(graph.actions)
    due = [0] * len(hops)  # of what each node waits for, at the latest
    made = [0] * len(hops)  # slot of the message that has come to a node last
    free: list[int] = []
    waiting: list[tuple[Turn, int]] = []  # heap of sends whose data are there

    def let(node: int) -> None:
        if graph.feeds[node] < 0:
            free.append(node)
        else:
            turn = _turn(graph, node, hops[node], due[node], made[node])
            due[node] = turn.due
            heapq.heappush(waiting, (turn, node))

    for node, count in enumerate(blockers):
        if not count:
            let(node)
    order: list[int] = []
    while free or waiting:
        node = free.pop() if free else heapq.heappop(waiting)[1]
        order.append(node)
        for other, handed_on in _behind(graph, node, hops[node]):
            hops[other] = max(hops[other], handed_on)
            due[other] = max(due[other], due[node])
            if handed_on:
                made[other] = max(made[other], _made(graph, node, made[node]))
            blockers[other] -= 1
            if not blockers[other]:
                let(other)
    return order


def take_turns(graph: Graph, order: Sequence[int], seconds: Sequence[float]) -> None:
    """Let each message wait for the one before it on its port.

    What has no bytes holds nothing up, and waits for no port.

    Args:
        graph: of the programs.
        order: all nodes, the sends and the receives in turn.
        seconds: for which each node keeps its port busy.
    """
    last: dict[tuple[int, Lane], int] = {}  # of each port
    for node in order:
        if graph.actions[node].payload is None or seconds[node] == 0:
            continue
        port = graph.workers[node], graph.lane(node)
        if port in last:
            graph.wait(node, on=last[port])
        last[port] = node


def _behind(graph: Graph, node: int, hops: int) -> Iterator[tuple[int, int]]:
    """Yield the nodes that wait for one, and how often what they have of it was handed on."""
    is_message = graph.actions[node].kind in (Kind.RECV, Kind.ADD)
    for other in (*graph.after[node], *graph.told[node]):
        yield other, hops if is_message else 0
    if graph.feeds[node] >= 0:
        yield graph.feeds[node], hops + 1


def _made(graph: Graph, node: int, before: int) -> int:
    """Return the slot in which a send has its message, or that of what has come to a node."""
    return graph.actions[node].s if graph.feeds[node] >= 0 else before


def _turn(graph: Graph, send: int, hops: int, least: int, before: int) -> Turn:
    a, receive = graph.actions[send], graph.feeds[send]
    readers = [graph.actions[node] for node in graph.after[receive]]
    return Turn(max(least, _due(a, readers, before)), a.s, a.j, hops, a.c or 0)


def _due(a: Action, readers: Sequence[Action], before: int) -> int:
    made = HALVES * a.s
    if a.payload is Payload.P and not is_for_one_use(a):
        return made
    if a.payload is Payload.S and a.lane:  # of workers that run whole micro-batches
        return made + SUM
    read = min((HALVES * b.s + AHEAD.get(b.kind, 0) for b in readers), default=0)
    if a.payload is Payload.T and a.lane:
        return read + HALVES * (before - a.s + 1)
    return max(read, made)
