"""What local steps cost: messages every so many steps, and what is kept beside own weights."""

from __future__ import annotations

import pytest

from lightning_cyclic.plan import LocalSteps, make_plan, program_of
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.simulate import Costs, Network, account, compare, memory

SLOW = Network(latency_s=0.01, bandwidth_bytes_per_s=1e6)
COSTS = Costs.even(4, compute_s=1.0, model_bytes=4e6)


def plan_of(preset: str, every: int, **numbers: int):
    in_turn = preset == "streaming_diloco"
    given = {"num_stages": 4, "num_workers": 4} | numbers
    return make_plan(preset, weights=LocalSteps(every=every, in_turn=in_turn), **given)


@pytest.mark.parametrize("preset", ["diloco", "streaming_diloco"])
@pytest.mark.parametrize("every", [1, 3, 8, 1000])
def test_a_stage_is_sent_in_one_step_of_a_period(preset: str, every: int) -> None:
    plan = plan_of(preset, every)
    sends = {
        (t, a.j)
        for w in range(4)
        for t in range(every, 2 * every)
        for a in program_of(plan).step(w, t)
        if a.kind is Kind.SEND
    }
    assert sorted(j for _, j in sends) == [0, 1, 2, 3]
    each = [-(-(j + 1) * every // 4) if preset == "streaming_diloco" else every for j in range(4)]
    assert sends == {(every + k - 1, j) for j, k in enumerate(each)}


@pytest.mark.parametrize("preset", ["diloco", "streaming_diloco"])
def test_bytes_of_a_step_are_those_of_lockstep_over_the_period(preset: str) -> None:
    lockstep = make_plan("lockstep_dp", num_stages=4, num_workers=4, sharding="none")
    whole = compare(lockstep, COSTS, SLOW).plan
    for every in (1, 2, 10):
        found = compare(plan_of(preset, every), COSTS, SLOW).plan
        assert found.sent_bytes * every == pytest.approx(whole.sent_bytes)
        assert found.sent_messages * every == pytest.approx(whole.sent_messages)


def test_a_long_period_takes_as_long_as_its_compute() -> None:
    steps = [compare(plan_of("diloco", every), COSTS, SLOW).plan.step_s for every in (1, 10, 100)]
    exposed = [step_s - 1.0 for step_s in steps]
    assert exposed[0] > 5
    assert exposed[1] == pytest.approx(exposed[0] / 10)
    assert exposed[2] == pytest.approx(exposed[0] / 100)


def test_outer_weights_and_all_optimizer_state_are_counted() -> None:
    counted = memory(plan_of("diloco", 2, num_workers=2), COSTS, state_per_param=2)
    other, owner = counted
    assert other.versions - 4e6 == owner.versions - 4e6 == 0
    assert other.optimizer == 2 * 4e6
    assert owner.optimizer == other.optimizer + 4e6  # momentum


def test_the_middle_period_is_counted_once() -> None:
    plan = plan_of("diloco", 3)
    programs = program_of(plan).first(8)
    (counted, *_) = account(programs, COSTS, period=3).workers
    assert sum(counted.sent_messages.values()) == 4
