"""The graphs that Tarnawski et al. published, and what a split of theirs costs.

The files are in ``throughput-inputs`` of https://github.com/msr-fiddle/dnn-partitioning; their
"FPGA" is any accelerator. Nodes of one colour class stay together, so they become one node here;
a backward node sends its gradients as a forward node sends its activations.

A stage pays once for each tensor that it makes or uses, and not alone, on top of its computing;
one stage may run on a host, which sends nothing and has memory enough. Neither is so in this
package's runtime, so it is only here; ideals, and how rows of them are cut, are the package's.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from typing import NamedTuple

from lightning_cyclic.planner.ideals import CostGraph, ideals, nodes_in, smaller_ideals
from lightning_cyclic.planner.partition import cut_row


class Workload(NamedTuple):
    """Hold a graph and the devices that its file names.

    Args:
        graph: says which nodes come before which, and what each takes on an accelerator.
        sent: seconds of each tensor's transfer, its maker and its users.
        num_bytes: of each node.
        host_s: seconds of each node on the host.
        parts: number of accelerators.
        limit_bytes: of each.
        hosts: 0 or 1.
    """

    graph: CostGraph
    sent: tuple[tuple[float, frozenset[int]], ...]
    num_bytes: tuple[float, ...]
    host_s: tuple[float, ...]
    parts: int
    limit_bytes: float
    hosts: int

    def load_s(self, nodes):
        """Return what a stage of some nodes takes."""
        inside = set(nodes_in(nodes))
        shared = (s for s, ends in self.sent if 0 < len(inside & ends) < len(ends))
        return self.graph.compute_s(nodes) + sum(shared)

    def host_load_s(self, nodes):
        """Return what it takes on the host."""
        return sum(self.host_s[v] for v in nodes_in(nodes))

    def best_s(self):
        """Return the slowest stage of the best split, with any stage or none on the host."""
        found = ideals(self.graph)
        splits = [(parts, None) for parts in range(1, self.parts + 1)]
        if self.hosts:
            splits += [(n + 1, host) for n in range(self.parts + 1) for host in range(n + 1)]
        return min(self._best_s(found, parts, host) for parts, host in splits)

    def _best_s(self, found, parts, host):
        compute_s = [self.graph.compute_s(ideal) for ideal in found]
        host_s = [self.host_load_s(ideal) for ideal in found]
        inside = smaller_ideals(found, compute_s)
        inside_host = smaller_ideals(found, host_s)
        load_s = _loads(self)

        def pieces(p, b):
            for a in inside_host[b] if p == host else inside[b]:
                if p == host:
                    yield a, host_s[b] - host_s[a], host_s[b] - host_s[a]
                else:
                    yield a, compute_s[b] - compute_s[a], load_s(found[b] & ~found[a])

        def fits(p, a, b):
            kept = sum(self.num_bytes[v] for v in nodes_in(found[b] & ~found[a]))
            return p == host or kept <= self.limit_bytes

        begins = cut_row(len(found) - 1, parts, pieces, fits=fits)
        if begins is None:
            return float("inf")
        ends = [*begins[1:], len(found) - 1]
        stages = [found[b] & ~found[a] for a, b in zip(begins, ends, strict=True)]
        return max(
            self.host_load_s(stage) if p == host else load_s(stage)
            for p, stage in enumerate(stages)
        )


@cache
def _loads(workload):
    return cache(workload.load_s)


def read_workload(text):
    """Read one file: JSON with nodes, edges, ``maxFPGAs``, ``maxCPUs`` and ``maxSizePerFPGA``."""
    data = json.loads(text)
    nodes, edges = {node["id"]: node for node in data["nodes"]}, data["edges"]
    group_of = _groups(nodes)
    group_of = _merged(group_of, set(_orders(nodes, edges, group_of)))
    count = 1 + max(group_of.values())
    seconds, num_bytes, host_s = [0.0] * count, [0.0] * count, [0.0] * count
    for name, node in nodes.items():
        seconds[group_of[name]] += node["fpgaLatency"]
        host_s[group_of[name]] += node["cpuLatency"]
        num_bytes[group_of[name]] += node["size"]
    ends, costs = defaultdict(set), {}
    for edge in edges:
        ends[edge["sourceId"]] |= {group_of[edge["sourceId"]], group_of[edge["destId"]]}
        costs[edge["sourceId"]] = max(costs.get(edge["sourceId"], 0.0), edge["cost"])
    keeps = sorted((u, v) for u, v in set(_orders(nodes, edges, group_of)) if u != v)
    return Workload(
        CostGraph(seconds=tuple(seconds), keeps=tuple(keeps)),
        tuple((costs[name], frozenset(ends[name])) for name in costs if len(ends[name]) > 1),
        tuple(num_bytes),
        tuple(host_s),
        data["maxFPGAs"],
        data["maxSizePerFPGA"],
        data["maxCPUs"],
    )


def _groups(nodes):
    """Number the colour classes, and the nodes without one."""
    numbers, found = {}, {}
    for name, node in nodes.items():
        colour = node.get("colorClass")
        key = (True, name) if colour is None else (False, colour)
        found[name] = numbers.setdefault(key, len(numbers))
    return found


def _orders(nodes, edges, group_of):
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


def _merged(group_of, orders):
    """Merge groups that must not be behind each other; number them in an order that can run."""
    users = [[] for _ in range(1 + max(group_of.values()))]
    for u, v in orders:
        users[u].append(v)
    reach = [_reached(users, v) for v in range(len(users))]
    first = [min(u for u in reach[v] if v in reach[u]) for v in range(len(users))]
    before = {v: set() for v in first}
    for u, v in orders:
        before[first[v]] |= {first[u]} - {first[v]}
    numbers = {v: k for k, v in enumerate(TopologicalSorter(before).static_order())}
    return {name: numbers[first[group]] for name, group in group_of.items()}


def _reached(users, start):
    found, stack = {start}, [start]
    while stack:
        for v in users[stack.pop()]:
            if v not in found:
                found.add(v)
                stack.append(v)
    return found
