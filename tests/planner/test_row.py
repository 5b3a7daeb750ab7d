from itertools import accumulate, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_cyclic.planner import balance
from lightning_cyclic.planner.row import cut_row, row_of


@st.composite
def rows(draw):
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


@given(rows())
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


@given(rows())
def test_without_crossings_it_is_as_good_as_balance(row):
    work, _, parts, _ = row
    starts = cut_row(len(work), parts, row_of(work, [0] * (len(work) + 1)))
    ends = [0, *accumulate(work)]

    def heaviest(starts):
        return max(ends[b] - ends[a] for a, b in pairwise([*starts, len(work)]))

    assert heaviest(starts) == heaviest(balance(work, parts))


def test_a_place_where_much_crosses_is_avoided():
    assert cut_row(4, 2, row_of([3, 3, 3, 3], [0, 1, 20, 1, 0])) in ([0, 1], [0, 3])
    assert cut_row(4, 2, row_of([3, 3, 3, 3], [0, 1, 6, 1, 0])) == [0, 2]


def test_more_parts_than_units():
    assert cut_row(2, 3, row_of([1, 1], [0, 0, 0])) is None
