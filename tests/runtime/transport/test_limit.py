from __future__ import annotations

from datetime import timedelta

from lightning_cyclic import CyclicStrategy, PipelineStrategy
from lightning_cyclic.runtime.transport.limit import FIRST_STEPS, Limit


def seconds(limit: Limit, num_steps: int) -> list[float]:
    found = []
    for _ in range(num_steps):
        found.append(limit.seconds)
        limit.end_step()
    return found


def test_the_first_steps_and_those_behind_a_first_evaluation_have_longer() -> None:
    limit = Limit(300.0, 1800.0, first_steps=2)
    assert seconds(limit, 4) == [1800.0, 1800.0, 300.0, 300.0]
    limit.begin()
    assert seconds(limit, FIRST_STEPS + 1) == [1800.0] * FIRST_STEPS + [300.0]
    limit.begin()
    limit.end()
    assert limit.seconds == 300.0


def test_the_limit_of_training_is_never_the_longer_one() -> None:
    assert seconds(Limit(7200.0, 1800.0), 5) == [7200.0] * 5
    assert seconds(Limit(0.5), 5) == [0.5] * 5


def test_waits_have_five_minutes_in_training_and_half_an_hour_before_by_default() -> None:
    for strategy in (CyclicStrategy(), PipelineStrategy("1f1b", timeout=None)):
        options = strategy._options
        assert (options.timeout_s, options.starting_s) == (300.0, 1800.0)
        assert strategy._timeout == timedelta(minutes=30)  # of the process group


def test_a_limit_that_is_given_is_that_of_every_wait() -> None:
    strategy = CyclicStrategy(timeout=timedelta(seconds=7))
    assert (strategy._options.timeout_s, strategy._options.starting_s) == (7.0, 7.0)
    assert strategy._timeout == timedelta(seconds=7)
