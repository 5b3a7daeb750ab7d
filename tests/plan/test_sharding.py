"""Who owns a stage."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan


def owners(preset, num_stages, num_workers, **options):
    plan = make_plan(
        preset, num_stages=num_stages, num_workers=num_workers, proved=False, **options
    )
    return [plan.owner(j) for j in range(num_stages)]


def test_the_first_reader_owns():
    assert owners("cyclic_dp", 4, 4) == [3, 2, 1, 0]
    assert owners("cyclic_dp", 4, 2) == [1, 1, 0, 0]
    assert owners("cyclic_zero", 4, 4) == [3, 2, 1, 0]


def test_lockstep_deals_the_stages_out():
    assert owners("lockstep_dp", 4, 4) == [3, 2, 1, 0]
    assert owners("lockstep_dp", 5, 2) == [1, 1, 1, 0, 0]
    assert owners("lockstep_dp", 2, 4) == [3, 1]


def test_where_nobody_is_fresh_worker_0_reads_first():
    assert owners("cyclic_dp_v1", 3, 3, sharding="optimizer") == [0, 0, 0]
    assert owners("cyclic_dp", 3, 3, slack=100) == [0, 0, 0]
    assert owners("cyclic_dp", 4, 2, slack=3) == [0, 0, 1, 1]


def test_without_sharding_the_last_worker_owns():
    for preset in ("cyclic_dp", "cyclic_dp_v1", "lockstep_dp"):
        assert owners(preset, 3, 3, sharding="none") == [2, 2, 2]


@settings(deadline=None)
@given(
    num_stages=st.integers(1, 9),
    num_workers=st.integers(1, 6),
    slack=st.sampled_from([0, 1, 2, 3, 5, 8, 100]),
)
def test_owner_is_the_first_fresh_worker(num_stages, num_workers, slack):
    d = Fraction(2 * num_stages, num_workers)
    for j, owner in enumerate(owners("cyclic_dp", num_stages, num_workers, slack=slack)):
        fresh = [i for i in range(num_workers) if d * i + 2 * j >= d * (num_workers - 1) + slack]
        assert owner == (fresh[0] if fresh else 0)


@pytest.mark.parametrize(("preset", "expected"), [("gpipe", [0, 1, 2]), ("cyclic_mp", [0, 1, 2])])
def test_in_pipelines_a_worker_of_the_stage_owns_it(preset, expected):
    assert owners(preset, 3, 3) == expected
