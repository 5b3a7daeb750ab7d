from fractions import Fraction
from itertools import product

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.planner.ring_numbers import RingChoices, RingNumbers
from lightning_cyclic.simulate import Network


@pytest.mark.parametrize(("num_workers", "num_stages"), [(1, 1), (2, 3), (4, 4), (3, 5)])
def test_how_old_weights_are_is_what_plans_say(num_workers, num_stages):
    for is_delayed, slack in ((False, 0), (False, 3), (True, 0)):
        numbers = RingNumbers(is_delayed, slack, num_stages, "none")
        plan = numbers.plan(num_workers)
        cells = product(range(num_workers), range(num_stages))
        lags = [plan.lag(plan.late_step, i, j) for i, j in cells]
        if num_workers > 1:
            assert numbers.behind(num_workers) == Fraction(sum(lags), len(lags))


def test_numbers_are_those_of_the_plan():
    plan = RingNumbers(False, 2, 8, "none").plan(4, num_steps=3)
    assert plan == make_plan(
        "cyclic_dp", num_workers=4, num_stages=8, slack=2, sharding="none", num_steps=3
    )
    assert RingNumbers(True, 0, 8, "none").plan(4).preset == "cyclic_dp_v1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stages": ()}, r"stages=\(\) leaves nothing to choose"),
        ({"delayed": ()}, r"delayed=\(\) leaves nothing"),
        ({"most_stages": 0}, "most_stages=0; allowed: 1 or more"),
    ],
)
def test_nothing_to_choose_from(given, message):
    with pytest.raises(PlanError, match=message):
        RingChoices(**{"most_stages": 4} | given)


def test_no_more_stages_than_there_are():
    found = list(RingChoices(most_stages=6).numbers(3, Network()))
    assert {n.num_stages for n in found} == {1, 2, 3, 4, 6}
    assert {n.slack for n in found if n.num_stages == 4} == {0, 1, 2, 4}
    assert {n.num_stages for n in RingChoices(most_stages=2).numbers(8, Network())} == {1, 2}


def test_simpler_is_less_old_then_less_of_all():
    names = [(False, 0, 8), (False, 1, 8), (False, 0, 1), (True, 0, 1)]
    ranks = [RingNumbers(*name, "none").rank(8) for name in names]
    assert ranks == sorted(ranks)
    default, other = (RingNumbers(False, 0, 8, name) for name in ("optimizer", "none"))
    assert default.rank(8) < other.rank(8)
