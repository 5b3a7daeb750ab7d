from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner import balance, balance_between
from lightning_cyclic.planner.partition import cut_row, row_of


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


@st.composite
def rows_with_crossings(draw):
    """Draw work, crossings, a number of parts, and which parts are forbidden."""
    work = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))
    count = len(work)
    crossing = draw(st.lists(st.integers(0, 20), min_size=count + 1, max_size=count + 1))
    crossing[0] = crossing[-1] = 0
    parts = draw(st.integers(1, count))
    triple = st.tuples(st.integers(0, parts - 1), st.integers(0, count), st.integers(0, count))
    return work, crossing, parts, draw(st.sets(triple, max_size=20))


def cost(work, crossing, a, b):
    return max(sum(work[a:b]), crossing[a] + crossing[b])


def all_cuts(work, crossing, parts, forbidden):
    """Yield the cost of the dearest part and the evenness of every allowed cut."""
    count = len(work)
    for cut in combinations(range(1, count), parts - 1):
        places = [0, *cut, count]
        if not any((p, a, b) in forbidden for p, (a, b) in enumerate(pairwise(places))):
            dearest = max(cost(work, crossing, a, b) for a, b in pairwise(places))
            yield dearest, sum(sum(work[a:b]) ** 2 for a, b in pairwise(places)), places[:-1]


@given(rows_with_crossings())
def test_the_best_of_all_allowed_cuts_and_of_these_the_most_even(row):
    work, crossing, parts, forbidden = row
    starts = cut_row(
        len(work), parts, row_of(work, crossing), fits=lambda p, a, b: (p, a, b) not in forbidden
    )
    found = sorted(all_cuts(*row))
    if starts is None:
        assert not found
        return
    best = found[0][:2]
    assert next(cut[:2] for cut in found if cut[2] == starts) == best


def test_a_place_where_much_crosses_is_avoided():
    assert cut_row(4, 2, row_of([3, 3, 3, 3], [0, 1, 20, 1, 0])) in ([0, 1], [0, 3])
    assert cut_row(4, 2, row_of([3, 3, 3, 3], [0, 1, 6, 1, 0])) == [0, 2]


def test_more_parts_than_units():
    assert cut_row(2, 3, row_of([1, 1], [0, 0, 0])) is None
