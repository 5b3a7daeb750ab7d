"""The order on the ring: few hops cross, rank 0 stays, and nothing moves for nothing."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cyclic.plan.neighbours import crossings, listed_order, ring_order

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)
TREES = st.lists(
    st.tuples(st.sampled_from("st"), st.sampled_from("lmn"), st.sampled_from("abc")),
    min_size=1, max_size=12,
)  # fmt: skip
UNEVEN = st.lists(
    st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map(tuple), min_size=1, max_size=9
)


def alone(hosts):
    return [(host,) for host in hosts]


def placed(paths, order):
    return [paths[rank] for rank in order]


@pytest.mark.parametrize(
    ("hosts", "order"),
    [
        ("abab", [0, 2, 1, 3]),
        ("abcabc", [0, 3, 1, 4, 2, 5]),
        ("aabb", [0, 1, 2, 3]),
        ("abba", [0, 1, 2, 3]),  # a and a are neighbours where the ring closes
        ("abc", [0, 1, 2]),
        ("aaaa", [0, 1, 2, 3]),
        ("a", [0]),
    ],
)
def test_ranks_of_a_host_are_neighbours(hosts, order):
    assert ring_order(alone(hosts)) == order


def test_hosts_of_a_switch_are_neighbours():
    paths = [("s0", "a"), ("s1", "b"), ("s0", "c"), ("s1", "d")]
    assert ring_order(paths) == [0, 2, 1, 3]
    assert crossings(paths) == (4, 4)
    assert crossings(placed(paths, [0, 2, 1, 3])) == (2, 4)


def test_switches_that_have_one_name_below_others_are_different():
    paths = [("s0", "leaf", "a"), ("s1", "leaf", "b"), ("s0", "leaf", "c")]
    assert ring_order(paths) == [0, 1, 2]  # a ring of three crosses twice in any order
    assert crossings(paths) == (2, 2, 3)


@given(TREES | UNEVEN)
def test_no_level_is_crossed_more_often_than_as_launched(paths):
    order = ring_order(paths)
    assert sorted(order) == list(range(len(paths)))
    assert order[0] == 0
    before, now = crossings(paths), crossings(placed(paths, order))
    assert all(few <= many for few, many in zip(now, before, strict=True))
    if now == before:
        assert order == list(range(len(paths)))


@given(TREES)
def test_each_branch_is_entered_once(paths):
    for level, crossed in enumerate(crossings(placed(paths, ring_order(paths)))):
        num = len({path[: level + 1] for path in paths})
        assert crossed == (num if num > 1 else 0)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=7))
def test_no_ring_crosses_less(hosts):
    paths = alone(hosts)
    rings = ((0, *rest) for rest in permutations(range(1, len(hosts))))
    least = min(crossings(placed(paths, ring)) for ring in rings)
    assert crossings(placed(paths, ring_order(paths))) == least


@given(HOSTS, st.data())
def test_a_list_is_followed_from_the_host_of_rank_0_on(hosts, data):
    listed = data.draw(st.permutations(sorted(set(hosts))))
    order = listed_order(hosts, listed)
    assert sorted(order) == list(range(len(hosts)))
    assert order[0] == 0
    visited = list(dict.fromkeys(hosts[rank] for rank in order))
    turn = listed.index(hosts[0])
    assert visited == [*listed[turn:], *listed[:turn]]
    least = len(listed) if len(listed) > 1 else 0
    assert crossings(placed(alone(hosts), order)) == (least,)
