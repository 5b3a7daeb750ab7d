"""The published cost model, on graphs of our own and, where they were fetched, on the published.

git clone https://github.com/msr-fiddle/dnn-partitioning /somewhere
COST_GRAPHS=/somewhere/throughput-inputs pytest tests/planner/test_published.py
"""

import json
import os
from itertools import product
from pathlib import Path

import pytest

from .published import read_workload

# layer graph -> the load of the slowest device of the best split
GOLDEN = {
    "bert24_inference": 17.7899,
    "bert24_training": 41.7458,
    "resnet50_inference": 33.7747,
    "resnet50_training": 78.6318,
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_published_loads(name):
    folder = os.environ.get("COST_GRAPHS")
    if folder is None:
        pytest.skip("COST_GRAPHS names no copy of the published graphs")
    text = (Path(folder) / "LayerGraphs" / f"{name}.json").read_text()
    assert round(read_workload(text).best_s(), 4) == GOLDEN[name]


def node(number, *, seconds=1, backward=False, colour=None, size=1):
    found = {
        "id": number, "supportedOnFpga": 1, "fpgaLatency": seconds, "cpuLatency": 10 * seconds,
        "isBackwardNode": backward, "size": size,
    }  # fmt: skip
    return found if colour is None else found | {"colorClass": colour}


def edge(u, v, cost=0):
    return {"sourceId": u, "destId": v, "cost": cost}


def read(nodes, edges, hosts=0, limit=50):
    head = {"maxFPGAs": 2, "maxCPUs": hosts, "maxSizePerFPGA": limit}
    return read_workload(json.dumps(head | {"nodes": nodes, "edges": edges}))


def training(count, host_factor=10):
    """Make a layer graph: each layer feeds the next and the one after it, and has its backward."""
    pairs = [(v, w) for v in range(count) for w in (v + 1, v + 2) if w < count]
    nodes = [node(v, seconds=v % 3 + 1, colour=v) for v in range(count)]
    nodes += [
        node(100 + v, seconds=2 * (v % 3 + 1), colour=v, backward=True) for v in range(count)
    ]
    for n in nodes:
        n["cpuLatency"] = host_factor * n["fpgaLatency"]
    return nodes, [edge(v, w, 1) for v, w in pairs] + [edge(100 + w, 100 + v, 2) for v, w in pairs]


def best_of_all(workload):
    """Try every stage of every node, on two accelerators and perhaps a host, wherever it is."""
    loads = []
    for host in [None, *(range(3) if workload.hosts else ())]:
        parts = workload.parts + (host is not None)
        for stage_of in product(range(parts), repeat=workload.graph.num_nodes):
            if any(stage_of[u] > stage_of[v] for u, v in workload.graph.keeps):
                continue
            stages = [
                (j, {v for v, home in enumerate(stage_of) if home == j}) for j in set(stage_of)
            ]
            if all(
                j == host or sum(workload.num_bytes[v] for v in stage) <= workload.limit_bytes
                for j, stage in stages
            ):
                loads.append(max(load(workload, stage, j == host) for j, stage in stages))
    return min(loads)


def load(workload, stage, is_host):
    if is_host:
        return sum(workload.host_s[v] for v in stage)
    pays = sum(s for s, ends in workload.sent if stage & ends and ends - stage)
    return sum(workload.graph.seconds[v] for v in stage) + pays


@pytest.mark.parametrize("count", [5, 7])
@pytest.mark.parametrize(("hosts", "host_factor", "limit"), [(0, 1, 50), (1, 2, 50), (1, 1, 6)])
def test_graphs_of_the_published_shape(count, hosts, host_factor, limit):
    workload = read(*training(count, host_factor), hosts, limit)
    assert workload.best_s() == best_of_all(workload)
