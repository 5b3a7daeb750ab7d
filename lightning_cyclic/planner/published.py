"""Read cost graphs in the format in which Tarnawski et al. published theirs.

The files are in ``throughput-inputs`` of https://github.com/msr-fiddle/dnn-partitioning; their
"FPGA" is any accelerator. Nodes of one colour class stay together, so they become one node here;
a backward node sends its gradients as a forward node sends its activations.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner.graph import Graph, Tensor

_NODE = ("id", "supportedOnFpga", "fpgaLatency", "size", "isBackwardNode", "cpuLatency")
_EDGE = ("sourceId", "destId", "cost")
_COSTS = ("fpgaLatency", "cpuLatency", "size", "cost")


class Workload(NamedTuple):
    """Hold a graph and the devices that its file names."""

    graph: Graph
    parts: int
    limit_bytes: float
    hosts: int


def read_workload(text: str) -> Workload:
    """Read one file.

    Args:
        text: JSON with ``nodes``, ``edges``, ``maxFPGAs``, ``maxCPUs`` and ``maxSizePerFPGA``.

    Returns:
        The graph, the number of accelerators, the memory of each, and the number of CPUs.

    Raises:
        PlanError: it is no such file, or a node runs on CPUs only.

    Source: Tarnawski et al., NeurIPS 2020, https://arxiv.org/abs/2006.16423; the format is
        described in the README of https://github.com/msr-fiddle/dnn-partitioning.
    """
    data = _parsed(text)
    nodes = {_field(node, "id", "node"): node for node in _list(data, "nodes")}
    for node in nodes.values():
        _check(node, _NODE, "node")
        if not node["supportedOnFpga"]:
            raise PlanError(
                f"node {node['id']} runs on CPUs only; allowed: nodes that run on accelerators; "
                "leave it out or merge it with a neighbour"
            )
    edges = _list(data, "edges")
    for edge in edges:
        _check(edge, _EDGE, "edge")
        for end in (edge["sourceId"], edge["destId"]):
            if end not in nodes:
                raise PlanError(
                    f"an edge names node {end}, which is not in the file; allowed: the ids of "
                    "nodes; add the node or drop the edge"
                )
    return Workload(
        _graph(nodes, edges),
        int(_field(data, "maxFPGAs", "file")),
        float(_field(data, "maxSizePerFPGA", "file")),
        int(_field(data, "maxCPUs", "file")),
    )


def _graph(nodes: Mapping[int, Mapping[str, Any]], edges: list[Mapping[str, Any]]) -> Graph:
    group_of = _groups(nodes)
    group_of = _merged(group_of, set(_orders(nodes, edges, group_of)))
    count = 1 + max(group_of.values())
    seconds, num_bytes, host_s = [0.0] * count, [0.0] * count, [0.0] * count
    for name, node in nodes.items():
        seconds[group_of[name]] += node["fpgaLatency"]
        host_s[group_of[name]] += node["cpuLatency"]
        num_bytes[group_of[name]] += node["size"]
    users: defaultdict[int, list[int]] = defaultdict(list)
    costs: dict[int, float] = {}
    for edge in edges:
        users[edge["sourceId"]].append(group_of[edge["destId"]])
        costs[edge["sourceId"]] = max(costs.get(edge["sourceId"], 0.0), edge["cost"])
    sent = {name: tuple(dict.fromkeys([group_of[name], *users[name]])) for name in costs}
    orders = set(_orders(nodes, edges, group_of))
    return Graph(
        seconds=tuple(seconds),
        num_bytes=tuple(num_bytes),
        host_s=tuple(host_s),
        edges=tuple(sorted((u, v) for u, v in orders if u != v)),
        tensors=tuple(
            Tensor(transfer_s=costs[name], nodes=groups)
            for name, groups in sent.items()
            if len(groups) > 1
        ),
    )


def _groups(nodes: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    """Number the colour classes, and the nodes without one."""
    numbers: dict[tuple[bool, Any], int] = {}
    found = {}
    for name, node in nodes.items():
        colour = node.get("colorClass")
        key = (True, name) if colour is None else (False, colour)
        found[name] = numbers.setdefault(key, len(numbers))
    return found


def _orders(
    nodes: Mapping[int, Mapping[str, Any]],
    edges: Iterable[Mapping[str, Any]],
    group_of: Mapping[int, int],
) -> Iterator[tuple[int, int]]:
    """Yield which group must not be behind which.

    Forward edges say so. A backward node that has no forward node in its group gets its place
    from its own edges, which the backward runs the other way round.
    """
    placed = {group_of[name] for name, node in nodes.items() if not node["isBackwardNode"]}
    for edge in edges:
        u, v = edge["sourceId"], edge["destId"]
        backwards = nodes[u]["isBackwardNode"], nodes[v]["isBackwardNode"]
        if not any(backwards):
            yield group_of[u], group_of[v]
        elif all(backwards) and not {group_of[u], group_of[v]} <= placed:
            yield group_of[v], group_of[u]


def _merged(group_of: Mapping[int, int], orders: set[tuple[int, int]]) -> dict[int, int]:
    """Merge groups that must not be behind each other, and number them anew."""
    count = 1 + max(group_of.values(), default=-1)
    users: list[list[int]] = [[] for _ in range(count)]
    for u, v in orders:
        users[u].append(v)
    reach = [_reached(users, v) for v in range(count)]
    first = [min(u for u in reach[v] if v in reach[u]) for v in range(count)]
    numbers = {v: number for number, v in enumerate(dict.fromkeys(first))}
    return {name: numbers[first[group]] for name, group in group_of.items()}


def _reached(users: list[list[int]], start: int) -> set[int]:
    found, stack = {start}, [start]
    while stack:
        for v in users[stack.pop()]:
            if v not in found:
                found.add(v)
                stack.append(v)
    return found


# ---------------------------------------------------------------------- fields


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"the cost graph is no JSON: {error}; allowed: a JSON object") from error
    if not isinstance(data, dict):
        raise PlanError("the cost graph is no JSON object; allowed: one with nodes and edges")
    return data


def _list(data: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = _field(data, name, "file")
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise PlanError(f"{name!r} of the cost graph is no list of objects; allowed: such a list")
    return found


def _check(item: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    for name in names:
        value = _field(item, name, what)
        if name in _COSTS and not (isinstance(value, int | float) and value >= 0):
            raise PlanError(
                f"{name}={value!r} of the {what} {item}; allowed: numbers >= 0; correct it"
            )


def _field(item: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in item:
        raise PlanError(
            f"a {what} of the cost graph has no {name!r}; allowed: {what}s that name it; see "
            "https://github.com/msr-fiddle/dnn-partitioning"
        )
    return item[name]
