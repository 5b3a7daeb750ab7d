"""The published format, on graphs of our own and, where they were fetched, on the published ones.

git clone https://github.com/msr-fiddle/dnn-partitioning /somewhere
COST_GRAPHS=/somewhere/throughput-inputs pytest tests/planner/test_published.py
"""

import json
import os
from pathlib import Path

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner import read_workload, split_ideals, split_linear

from .brute import best

# layer graph -> the load of the slowest device, of the best split, and in one order of the nodes
GOLDEN = {
    "bert24_inference": (17.7899, 17.7899),
    "bert24_training": (41.7458, 41.7458),
    "resnet50_inference": (33.7747, 33.7747),
    "resnet50_training": (78.6318, 78.6498),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_published_loads(name):
    folder = os.environ.get("COST_GRAPHS")
    if folder is None:
        pytest.skip("COST_GRAPHS names no copy of the published graphs")
    text = (Path(folder) / "LayerGraphs" / f"{name}.json").read_text()
    graph, parts, limit_bytes, hosts = read_workload(text)
    loads = [
        split(graph, parts, limit_bytes=limit_bytes, hosts=hosts).load_s
        for split in (split_ideals, split_linear)
    ]
    assert tuple(round(load, 4) for load in loads) == GOLDEN[name]


def node(number, *, seconds=1, backward=False, colour=None, size=1):
    found = {
        "id": number, "supportedOnFpga": 1, "fpgaLatency": seconds, "cpuLatency": 10 * seconds,
        "isBackwardNode": backward, "size": size,
    }  # fmt: skip
    return found if colour is None else found | {"colorClass": colour}


def edge(u, v, cost=0):
    return {"sourceId": u, "destId": v, "cost": cost}


def workload(nodes, edges):
    return {"maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 50, "nodes": nodes, "edges": edges}


def read(nodes, edges):
    return read_workload(json.dumps(workload(nodes, edges)))


def training(count):
    """Make a layer graph: each layer feeds the next and the one after it, and has its backward."""
    pairs = [(v, w) for v in range(count) for w in (v + 1, v + 2) if w < count]
    nodes = [node(v, seconds=v % 3 + 1, colour=v) for v in range(count)]
    nodes += [
        node(100 + v, seconds=2 * (v % 3 + 1), colour=v, backward=True) for v in range(count)
    ]
    return nodes, [edge(v, w, 1) for v, w in pairs] + [edge(100 + w, 100 + v, 2) for v, w in pairs]


def test_forward_and_backward_become_one_node_with_two_outputs():
    graph, parts, limit_bytes, hosts = read(*training(3))
    assert (parts, limit_bytes, hosts) == (2, 50, 1)
    assert graph.seconds == (3, 6, 9)
    assert graph.host_s == (30, 60, 90)
    assert graph.num_bytes == (2, 2, 2)
    assert graph.edges == ((0, 1), (0, 2), (1, 2))
    sent = {(tensor.nodes[0], tensor.transfer_s): set(tensor.nodes) for tensor in graph.tensors}
    assert sent == {
        (0, 1): {0, 1, 2}, (1, 1): {1, 2}, (2, 2): {0, 1, 2}, (1, 2): {0, 1},
    }  # fmt: skip
    # 0 | 1 2: 0 sends its output and receives two gradients; 0 1 | 2: three tensors cross
    assert split_ideals(graph, 2).load_s == best(graph, 2) == 9 + 1 + 1 + 2


@pytest.mark.parametrize("count", [5, 7])
def test_graphs_of_the_published_shape(count):
    graph = read(*training(count)).graph
    assert split_ideals(graph, 3).load_s == best(graph, 3)


def test_a_backward_node_without_forward_node_keeps_between_its_neighbours():
    nodes = [node(0, colour=0), node(1, colour=1)]
    nodes += [node(9, colour=1, backward=True), node(8, backward=True)]
    nodes += [node(7, colour=0, backward=True)]
    graph = read(nodes, [edge(0, 1), edge(9, 8), edge(8, 7)]).graph
    assert graph.num_nodes == 3
    assert graph.edges == ((0, 1), (0, 2), (2, 1))


def test_nodes_that_would_need_each_other_become_one():
    nodes = [node(0, colour=5, seconds=1), node(1, seconds=2), node(2, colour=5, seconds=4)]
    graph = read(nodes, [edge(0, 1), edge(1, 2)]).graph  # 0 and 2 stay together, 1 lies between
    assert graph.seconds == (7,)
    assert graph.edges == ()
    assert graph.tensors == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("maxFPGAs"), "a file of the cost graph has no 'maxFPGAs'"),
        (lambda data: data["nodes"][0].pop("size"), "a node of the cost graph has no 'size'"),
        (lambda data: data["edges"][0].pop("cost"), "a edge of the cost graph has no 'cost'"),
        (lambda data: data["edges"].append(edge(0, 77)), "an edge names node 77"),
        (lambda data: data["nodes"][0].update(supportedOnFpga=0), "node 0 runs on CPUs only"),
        (lambda data: data["nodes"][0].update(fpgaLatency=-1), "fpgaLatency=-1 of the node"),
        (lambda data: data["edges"][0].update(cost="3"), "cost='3' of the edge"),
        (lambda data: data.update(nodes=3), "'nodes' of the cost graph is no list"),
    ],
)
def test_files_that_cannot_be(change, message):
    data = workload(*training(3))
    change(data)
    with pytest.raises(PlanError, match=message):
        read_workload(json.dumps(data))


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_text_that_is_no_graph(text):
    with pytest.raises(PlanError, match="the cost graph is no JSON"):
        read_workload(text)
