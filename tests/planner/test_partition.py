from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner import balance, balance_between


def heaviest(weights, starts):
    return max(sum(weights[a:b]) for a, b in pairwise([*starts, len(weights)]))


def best(weights, parts):
    """Return the lightest heaviest part, by trying every cut."""
    cuts = combinations(range(1, len(weights)), parts - 1)
    return min(heaviest(weights, [0, *cut]) for cut in cuts)


@st.composite
def rows(draw):
    weights = draw(st.lists(st.integers(0, 30), min_size=1, max_size=9))
    return weights, draw(st.integers(1, len(weights)))


@given(rows())
def test_as_good_as_the_best_of_all_cuts(row):
    weights, parts = row
    starts = balance(weights, parts)
    assert len(starts) == parts
    assert starts[0] == 0
    assert all(a < b for a, b in pairwise([*starts, len(weights)]))  # non-empty parts
    assert heaviest(weights, starts) == best(weights, parts)


@pytest.mark.parametrize(
    ("weights", "parts", "starts"),
    [
        ([7], 1, [0]),
        ([1, 2, 3], 3, [0, 1, 2]),
        ([0, 0, 0, 0], 2, [0, 1]),
        ([1] * 10, 4, [0, 3, 5, 8]),  # even, not 3 3 3 1
        ([9, 1, 1, 1, 1], 2, [0, 1]),
        ([1, 1, 1, 1, 9], 2, [0, 4]),
    ],
)
def test_cuts(weights, parts, starts):
    assert balance(weights, parts) == starts


def test_many_units_into_many_parts():
    weights = [(k * 7919) % 1000 for k in range(10_000)]
    starts = balance(weights, 64)
    # no part can be below the mean, and one unit more or less is as near as a cut can come
    assert sum(weights) / 64 <= heaviest(weights, starts) <= sum(weights) / 64 + 1000


def test_exact_where_floats_are_not():
    assert balance([2**60, 1, 2**60], 2) == [0, 1]
    assert balance([2**60 + 1, 1, 2**60], 2) == [0, 1]
    assert balance([2**60, 1, 2**60 + 1], 2) == [0, 2]


@pytest.mark.parametrize("parts", [0, -1, 4])
def test_numbers_of_parts_that_leave_one_empty_are_refused(parts):
    with pytest.raises(PlanError, match=rf"3 units .* {parts} non-empty parts; allowed: 1 to 3"):
        balance([1, 2, 3], parts)


def test_negative_weights_are_refused():
    with pytest.raises(PlanError, match="weight -2 of a unit is negative"):
        balance([1, -2], 1)


@st.composite
def windows(draw):
    """Draw running sums, a number of parts and where the part before each place may begin."""
    weights, parts = draw(rows())
    ends = [0, *accumulate(weights)]
    lows = [draw(st.integers(0, max(b - 1, 0))) for b in range(len(ends))]
    highs = [draw(st.integers(-1, b - 1)) for b in range(len(ends))]
    return ends, parts, lows, highs


def allowed_cuts(ends, parts, lows, highs):
    for cut in combinations(range(1, len(ends) - 1), parts - 1):
        places = [0, *cut, len(ends) - 1]
        if all(lows[b] <= a <= highs[b] for a, b in pairwise(places)):
            yield max(ends[b] - ends[a] for a, b in pairwise(places)), places[:-1]


@given(windows())
def test_as_good_as_the_best_of_all_allowed_cuts(row):
    ends, parts, lows, highs = row
    allowed = list(allowed_cuts(*row))
    starts = balance_between(ends, parts, lows=lows, highs=highs)
    if starts is None:
        assert not allowed
        return
    found = {tuple(cut): heaviest for heaviest, cut in allowed}
    assert found[tuple(starts)] == min(found.values())


@given(rows())
def test_where_all_is_allowed_it_is_as_good_as_the_plain_cut(row):
    weights, parts = row
    ends = [0, *accumulate(weights)]
    everywhere = list(range(-1, len(weights)))
    starts = balance_between(ends, parts, lows=[0] * len(ends), highs=everywhere)
    assert heaviest(weights, starts) == heaviest(weights, balance(weights, parts))
