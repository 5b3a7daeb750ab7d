import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner import Graph, split_milp

from .brute import best, graphs
from .test_ideals import ENTANGLED, check


@settings(deadline=None, max_examples=15)
@given(graphs(), st.integers(1, 3))
def test_as_good_as_the_best_of_all_splits(graph, parts):
    pytest.importorskip("scipy")
    split = split_milp(graph, parts)
    check(graph, split, parts)
    assert split.load_s == best(graph, parts)  # loads are whole numbers, taken from the stages


def test_stages_that_need_each_other_are_none():
    pytest.importorskip("scipy")
    split = split_milp(ENTANGLED, 3, limit_bytes=8.4)
    check(ENTANGLED, split, 3, 8.4)
    assert split.load_s == 17


def test_a_limit_that_cannot_be_kept():
    pytest.importorskip("scipy")
    with pytest.raises(PlanError, match="limit_bytes=6 cannot be kept with 2 stages; allowed: 7"):
        split_milp(Graph.row([1, 2], num_bytes=[5, 7]), 2, limit_bytes=6)


def test_no_time(monkeypatch):
    optimize = pytest.importorskip("scipy.optimize")
    late = SimpleNamespace(status=1, x=None)
    monkeypatch.setattr(optimize, "milp", lambda *args, **kwargs: late)
    with pytest.raises(PlanError, match=r"no split of 2 nodes was found in 0.1 s"):
        split_milp(Graph.row([1, 2]), 2, limit_s=0.1)


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(PlanError, match=r"pip install 'lightning-cyclic\[milp\]'"):
        split_milp(Graph.row([1, 2]), 2)
