"""Steps without a program are those of the program, served in turn: no digit differs."""

import random
from dataclasses import replace
from itertools import product

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.simulate import Costs, Network, simulate, steady_step_s
from lightning_cyclic.simulate.longest_path import ends_of_steps
from lightning_cyclic.simulate.result import steady_step, steady_window
from lightning_cyclic.simulate.steady import is_quick
from lightning_cyclic.simulate.timetable import Timetable, is_regular

INSIDE = Network(latency_s=0.001, bandwidth_bytes_per_s=17.0)
NETWORKS = [
    Network(),
    Network(latency_s=0.013),
    Network(bandwidth_bytes_per_s=1.3),
    Network(latency_s=0.013, bandwidth_bytes_per_s=3.1),
]
PRESETS = "cyclic_dp", "cyclic_dp_v1"
MORE = pytest.mark.exhaustive
FEW = (1, 2, 3, 4, 6), (1, 2, 4)
ALL = (1, 2, 3, 4, 6, 8, 16), tuple(range(1, 9))


def costs_of(num_stages, draws):
    """Return costs of stages that differ, some of which have nothing to send."""
    if draws.random() < 0.3:
        return Costs.even(num_stages, model_bytes=0.5, update_s=draws.choice((0, 0.1)))

    def some(least, most):
        return tuple(draws.uniform(least, most) for _ in range(num_stages))

    sent = tuple(x * (draws.random() < 0.8) for x in some(0.0, 0.4))
    return Costs(
        forward_s=some(0.1, 0.3), backward_s=some(0.2, 0.6), param_bytes=some(0.0, 0.3),
        update_s=some(0.0, 0.1), sent_sum_bytes=sent,
    )  # fmt: skip


def without_programs(plan, costs, network):
    """Return the step of a plan however small it is."""
    first, last = steady_window(plan.num_steps)
    return steady_step(ends_of_steps(plan, costs, network, last), first, last)


def on_hosts(network, num_workers, draws):
    each = draws.choice((0, 1, 2, 3))
    if each == 0:
        return network
    return replace(network, hosts=tuple(w // each for w in range(num_workers)), inside=INSIDE)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("workers", "stages", "most"), [(*FEW, 40), pytest.param(*ALL, 400, marks=MORE)]
)
def test_to_the_last_digit(preset, workers, stages, most):
    draws = random.Random(f"{preset} {workers}")
    numbers = list(product(workers, stages, (0, 2), (1, 2)))
    for n, s, slack, rounds in draws.sample(numbers, min(len(numbers), most)):
        groups = draws.choice([x for x in range(1, 1 + n) if n % x == 0])
        plan = make_plan(
            preset, num_workers=n, num_stages=s, slack=slack, num_micro=rounds * n,
            num_steps=draws.choice((4, 5, 6)), groups=groups, proved=False,
        )  # fmt: skip
        costs = costs_of(s, draws)
        for each in draws.sample(NETWORKS, 2):
            network = on_hosts(each, n, draws)
            given = simulate(plan.programs, costs, network, plan, in_turn=True).step_s
            assert without_programs(plan, costs, network) == given, (plan, costs, network)


@pytest.mark.parametrize(
    ("preset", "numbers"),
    [
        ("cyclic_dp", {"sharding": "none", "slack": 8}),
        ("cyclic_dp_v1", {"sharding": "optimizer"}),
        ("cyclic_dp", {"slack": 100}),
        ("cyclic_dp", {"slack": 7}),
        ("cyclic_dp", {"num_workers": 24, "num_stages": 2}),
        ("cyclic_dp", {"num_workers": 13, "num_stages": 1, "slack": 1}),
        ("cyclic_dp", {"num_workers": 6, "groups": 2, "slack": 3}),  # others lead in each stage
        ("cyclic_dp", {"num_workers": 6, "groups": 2, "sharding": "none", "slack": 9}),
        ("cyclic_dp_v1", {"num_workers": 8, "groups": 4}),
        ("cyclic_dp", {"num_workers": 4, "groups": 1}),
    ],
)
def test_of_other_owners_and_more_workers_than_slots(preset, numbers):
    numbers = {"num_workers": 4, "num_stages": 6, "num_steps": 6, **numbers}
    plan, draws = make_plan(preset, proved=False, **numbers), random.Random(preset)
    for network in NETWORKS:
        costs = costs_of(plan.num_stages, draws)
        given = simulate(plan.programs, costs, network, plan, in_turn=True).step_s
        assert without_programs(plan, costs, network) == given


@pytest.mark.parametrize(
    ("preset", "numbers"),
    [
        ("1f1b", {}),
        ("lockstep_dp", {}),
        ("cyclic_zero", {}),
        ("cyclic_dp", {"relayed": (1,)}),
        ("cyclic_dp", {"tied": ((0, 3),)}),
        ("cyclic_dp_v1", {"norms": "owners"}),
        ("cyclic_dp", {"sharding": "none"}),  # forwards are due before the owner updates
    ],
)
def test_other_programs_are_simulated(preset, numbers):
    plan = make_plan(preset, num_workers=4, num_stages=4, num_steps=4, **numbers)
    costs = costs_of(4, random.Random(1))
    assert ends_of_steps(plan, costs, NETWORKS[3], 0) is None
    given = simulate(plan.programs, costs, NETWORKS[3], plan).step_s
    assert steady_step_s(plan, costs, NETWORKS[3]) == given
    with pytest.raises(PlanError, match="messages have no fixed order.*leave in_turn out"):
        simulate(plan.programs, costs, NETWORKS[3], plan, in_turn=True)


def test_small_plans_are_simulated_by_their_programs_and_large_ones_without():
    small, large = (
        make_plan("cyclic_dp", num_workers=n, num_stages=8, num_steps=8, proved=False)
        for n in (8, 256)
    )
    costs, network = Costs.even(8, model_bytes=0.5), NETWORKS[3]
    given = simulate(small.programs, costs, network, small).step_s
    assert steady_step_s(small, costs, network) == given
    assert steady_step_s(large, costs, network) == without_programs(large, costs, network)


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_turns_are_those_of_the_timetable_however_many_workers_there_are(slack):
    for n, s in product((1, 2, 3, 5, 8, 13, 24, 64), (1, 2, 3, 4, 7, 8, 16)):
        for preset in PRESETS:
            numbers = {"slack": slack} if preset == "cyclic_dp" else {}
            for groups in (n, 1, n // 2, n // 8):
                if groups and n % groups == 0:
                    plan = make_plan(
                        preset, num_workers=n, num_stages=s, groups=groups, proved=False, **numbers
                    )
                    assert not is_regular(plan) or Timetable(plan).keeps_order, plan


@pytest.mark.parametrize(("workers", "groups"), [(3, 3), (4, 2), (6, 2), (6, 3), (3, 1)])
def test_a_timetable_has_what_programs_have(workers, groups):
    plan = make_plan(
        "cyclic_dp", num_workers=workers, groups=groups, num_stages=4, num_steps=12, slack=1
    )
    assert is_regular(plan)
    t, table = 6, Timetable(plan)
    messages = table.messages
    found = sorted(
        (x, j, source, target)
        for x, j, source, target in zip(
            ("S" if is_sum else "P" for is_sum in messages.is_sum),
            *map(list, (messages.j, messages.source, messages.target)),
            strict=True,
        )
        if source != target
    )
    expected = sorted(
        ("P" if a.payload == "P" else "S", a.j, w, a.peer)
        for w, program in enumerate(plan.programs)
        for a in program
        if a.kind == "SEND" and (a.v - 1 if a.payload == "P" else a.t) == t and a.payload != "K"
    )
    assert found == expected


def test_hosts_of_other_workers_are_refused():
    plan = make_plan("cyclic_dp", num_workers=2, num_stages=2)
    network = Network(hosts=(0, 1, 1), inside=INSIDE)
    with pytest.raises(PlanError, match="of 2 workers; allowed: 2 numbers"):
        steady_step_s(plan, Costs.even(2), network)


def test_a_step_is_found_in_seconds_where_plans_are_small_or_need_no_program():
    numbers = {"num_stages": 8, "num_steps": 8, "proved": False}
    small, large, without_turns = (
        make_plan("cyclic_dp", num_workers=n, sharding=sharding, **numbers)
        for n, sharding in ((8, "none"), (256, "optimizer"), (256, "none"))
    )
    assert [is_quick(plan) for plan in (small, large, without_turns)] == [True, True, False]
