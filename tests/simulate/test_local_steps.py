"""What local steps cost: messages every so many steps, and what is kept beside own weights."""

from __future__ import annotations

import pytest

from lightning_cyclic.plan import LocalSteps, make_plan, program_of
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.simulate import Costs, Network, account, compare, memory

SLOW = Network(latency_s=0.01, bandwidth_bytes_per_s=1e6)
COSTS = Costs.even(4, compute_s=1.0, model_bytes=4e6)


def plan_of(preset: str, every: int, delay: int = 0, **numbers: int):
    rule = LocalSteps(every=every, delay=delay, in_turn=preset == "streaming_diloco")
    given = {"num_stages": 4, "num_workers": 4} | numbers
    return make_plan(preset, weights=rule, **given)


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


def test_what_an_exchange_takes_is_spread_over_its_period() -> None:
    exposed = {
        every: every * (compare(plan_of("diloco", every), COSTS, SLOW).plan.step_s - 1.0)
        for every in (2, 10, 100)
    }
    assert exposed[2] > 5
    assert exposed[10] == pytest.approx(exposed[2])
    assert exposed[100] == pytest.approx(exposed[2])


@pytest.mark.parametrize(("preset", "exchanges"), [("diloco", 1), ("streaming_diloco", 4)])
def test_each_step_of_a_delay_hides_as_much_of_each_exchange(preset: str, exchanges: int) -> None:
    exposed = [
        20 * (compare(plan_of(preset, 20, delay), COSTS, SLOW).plan.step_s - 1.0)
        for delay in (0, 1, 2, 8)
    ]
    assert exposed[0] > 6
    assert exposed[1:3] == pytest.approx([exposed[0] - exchanges, exposed[0] - 2 * exchanges])
    assert exposed[3] == pytest.approx(0, abs=1e-9)


def test_outer_weights_and_all_optimizer_state_are_counted() -> None:
    size = 4e6
    own = memory(plan_of("diloco", 1, num_workers=2), COSTS, state_per_param=2)
    for local in own:
        assert local.versions == 2 * size  # the outer weights, and the messages that bring them
    assert [x.optimizer for x in own] == [2 * size, 3 * size]  # the owner's has a momentum


def test_the_messages_of_a_period_are_counted_once() -> None:
    programs = program_of(plan_of("diloco", 3)).first(8)
    counted = account(programs, COSTS, period=3).workers
    # sums go 0, 1, 2, 3, and versions 3, 0, 1, 2
    assert [sum(x.sent_messages.values()) for x in counted] == [8, 8, 4, 4]
