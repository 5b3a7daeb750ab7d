"""Turns: messages in one order for all ports, known before any of them is sent.

Where a port serves of its messages whichever is ready, when one leaves depends on which others
happened to be ready before it, and a run has to be walked event by event. In turn, a port serves
its messages in a fixed order and waits for each: what waits for what is known, a run is a longest
path, and one step stands for all, so that a thousand workers are simulated in seconds
(longest_path.py). It is what networks are that keep messages in order; a port is at times idle
that could have served another message.

The order is that in which the timetable has messages *due*, in exact time (timetable.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.simulate.costs import Network
from lightning_cyclic.simulate.graph import Graph, Lane


def take_turns(graph: Graph, plan: Plan, network: Network, seconds: Sequence[float]) -> list[int]:
    """Let each message wait for the one before it on its port.

    What has no bytes holds nothing up, and waits for no port.

    Args:
        graph: of the plan's programs, without an order of messages.
        plan: one whose messages have turns.
        network: the links between its workers.
        seconds: for which each node keeps its port busy.

    Returns:
        All nodes, each behind those that it waits for.

    Raises:
        PlanError: the plan's messages have no turns.
    """
    order = _in_turn(graph, _turns(graph, plan))
    last: dict[tuple[int, Lane, bool], int] = {}  # of each port
    for node in order:
        worker, action = graph.workers[node], graph.actions[node]
        if action.payload is None or seconds[node] == 0:
            continue
        port = worker, graph.lane(node), network.is_inside(worker, action.peer)
        if port in last:
            graph.wait(node, on=last[port])
        last[port] = node
    return order


def _turns(graph: Graph, plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return the turn of each send; the least is first."""
    from lightning_cyclic.simulate.timetable import Timetable, is_regular  # noqa: PLC0415  (numpy)

    timetable = Timetable(plan) if is_regular(plan) else None
    if timetable is None or not timetable.keeps_order:
        raise PlanError(
            f"in_turn=True for {plan.preset!r}, whose messages have no fixed order; allowed: "
            "cyclic_dp and cyclic_dp_v1 without ties or buffers that travel; leave "
            "in_turn out"
        )
    x, turns = timetable.messages, dict[int, tuple[int, ...]]()
    columns = (column.tolist() for column in (x.is_sum, x.j, x.source, x.target))
    at = {key: n for n, key in enumerate(zip(*columns, strict=True))}
    for node, a in enumerate(graph.actions):
        if a.kind is not Kind.SEND:
            continue
        is_sum = a.payload is not Payload.P
        step = a.t if is_sum or a.v is None else a.v - 1  # that makes the version
        n = at[is_sum, a.j, graph.workers[node], a.peer]
        due = int(x.due[n]) + step * timetable.period
        turns[node] = due, not is_sum, int(x.rank[n]), a.j
    return turns


def _in_turn(graph: Graph, turns: dict[int, tuple[int, ...]]) -> list[int]:
    """Return the nodes in an order in which none comes before one that it waits for."""
    blockers, order = list(graph.blockers), list[int]()
    free: list[int] = []
    waiting: list[tuple[tuple[int, ...], int]] = []  # heap of sends whose data are there

    def let(node: int) -> None:
        if node in turns:
            heapq.heappush(waiting, (turns[node], node))
        else:
            free.append(node)

    for node, count in enumerate(blockers):
        if not count:
            let(node)
    while free or waiting:
        node = free.pop() if free else heapq.heappop(waiting)[1]
        order.append(node)
        fed = graph.feeds[node]
        for other in (*graph.after[node], *([fed] if fed >= 0 else [])):
            blockers[other] -= 1
            if not blockers[other]:
                let(other)
    return order
