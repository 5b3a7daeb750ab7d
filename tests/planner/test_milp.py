import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner import CostGraph, split_milp
from lightning_cyclic.simulate import Network

from .brute import best, graphs_and_parts
from .test_ideals import ENTANGLED, check


@settings(deadline=None, max_examples=25)
@given(graphs_and_parts())
def test_as_good_as_the_best_of_all_splits(drawn):
    pytest.importorskip("scipy")
    graph, parts = drawn
    split = split_milp(graph, parts)
    check(graph, split, parts)
    assert split.slowest_s == best(graph, parts)  # whole numbers, computed from the stages


def test_stages_that_need_each_other_are_none():
    pytest.importorskip("scipy")
    check(ENTANGLED, split_milp(ENTANGLED, 3), 3)


def test_times_of_nanoseconds_count():
    pytest.importorskip("scipy")
    graph = CostGraph(
        seconds=tuple(s * 2**-30 for s in ENTANGLED.seconds),
        tensors=ENTANGLED.tensors,
        network=Network(bandwidth_bytes_per_s=2**30),
    )
    assert split_milp(graph, 3).slowest_s == best(ENTANGLED, 3) * 2**-30


def test_a_graph_too_wide_for_ideals():
    pytest.importorskip("scipy")
    graph = CostGraph(seconds=(3, 1, 2) * 5)
    assert split_milp(graph, 5).slowest_s == 6


def test_no_time(monkeypatch):
    optimize = pytest.importorskip("scipy.optimize")
    late = SimpleNamespace(status=1, x=None)
    monkeypatch.setattr(optimize, "milp", lambda *args, **kwargs: late)
    with pytest.raises(PlanError, match=r"no split of 2 nodes was found in 0.1 s"):
        split_milp(CostGraph(seconds=(1, 2)), 2, limit_s=0.1)


@pytest.mark.parametrize("parts", [0, 3])
def test_stages_that_would_be_empty_are_refused(parts):
    with pytest.raises(PlanError, match=f"cannot be cut into {parts} stages; allowed: 1 to 2"):
        split_milp(CostGraph(seconds=(1, 2)), parts)


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(PlanError, match=r"pip install 'lightning-cyclic\[milp\]'"):
        split_milp(CostGraph(seconds=(1, 2)), 2)
