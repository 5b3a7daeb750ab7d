"""What sending less would gain: told where the network is waited for, and never chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from lightning_cyclic.plan import LocalSteps, make_plan, programs_of
from lightning_cyclic.planner import Problem, search
from lightning_cyclic.planner.candidates import candidates
from lightning_cyclic.planner.gains import gains, of_first, told
from lightning_cyclic.planner.ring import ring_bound_s
from lightning_cyclic.planner.table import as_config, as_data, table, written
from lightning_cyclic.simulate import CodecCosts, Coding, Costs, Network, simulate

from .test_search import everything, key, profile

SLOW = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e7)
TOP_K = CodecCosts(kind="TopK", numbers={"density": 0.01}, num_bytes=lambda n: 0.08 * n)
BF16 = CodecCosts(kind="bf16", num_bytes=lambda n: 2.0 * n, to_owners=False)
SMALL = Coding(gradients=TOP_K)
KEPT = Coding(gradients=replace(TOP_K, has_memory=True))
HALF = Coding(gradients=BF16)
WEIGHTS = Coding(weights=TOP_K)
BOTH = Coding(gradients=TOP_K, weights=TOP_K)
MIXED = Coding(gradients=BF16, weights=TOP_K)


def problem(**changes) -> Problem:
    given = {
        "profiles": (profile(),), "num_workers": 2, "memory_bytes": 1e9, "network": SLOW,
        "presets": ("cyclic_dp",), "checkpointing": ("never",),
    }  # fmt: skip
    return Problem(**(given | changes))


def offered(*codings: Coding):
    return lambda: [(coding, f"risk {n}") for n, coding in enumerate(codings)]


def test_where_the_network_is_waited_for_it_is_told_and_not_chosen():
    ranking = search(problem())
    text = told(of_first(ranking, offered(HALF, SMALL)))
    assert "waits for the network: without messages its step would take 120 ms" in text
    assert 'CyclicStrategy("cyclic_dp", compress="bf16")' in text
    assert 'CyclicStrategy("cyclic_dp", compress=TopK(density=0.01))\n            risk 1' in text
    assert "CyclicStrategy(LocalSteps(every=50))" in text
    assert "never chosen" in text
    assert "compress" not in table(ranking)


def test_what_is_told_is_in_the_data_of_the_first_plan_alone():
    ranking = search(problem(presets=("cyclic_dp", "lockstep_dp")))
    found = of_first(ranking, offered(HALF, SMALL))
    first, *others = as_data(ranking, found)
    assert first["gains"]["alone_s"] == found.alone_s < first["step_s"]
    ways = [(way["strategy"], way["step_s"], way["risk"]) for way in first["gains"]["ways"]]
    assert ways == list(found.ways)
    assert len(ways) == 3  # and local steps
    assert [row["gains"] for row in others] == [None] * len(others) != []
    assert as_data(ranking)[0]["gains"] is None


def test_where_it_is_not_nobody_asks_for_codecs():
    ranking = search(problem(network=Network(bandwidth_bytes_per_s=1e12)))
    assert of_first(ranking, lambda: pytest.fail("codecs take torch")) is None


def test_where_new_weights_alone_are_too_slow_codecs_of_them_are_told():
    given = problem(network=Network(bandwidth_bytes_per_s=1e6))
    (best,) = search(given, most=1).plans
    weights_s = 0.5 * 4e6 / 1e6
    at_most = replace(best, step_s=weights_s)  # as of a plan that hides all gradients
    found = [x.strategy for x in gains(at_most, given, offered(SMALL, BOTH))]
    assert found[0] == f'CyclicStrategy("cyclic_dp", compress={BOTH})'
    assert f"compress={SMALL}" not in found[0]
    assert len(found) == 2  # and local steps


@pytest.mark.parametrize("coding", [HALF, SMALL, WEIGHTS, BOTH])
def test_a_gain_is_that_of_the_plan_with_the_codec(coding):
    given = problem()
    (best,) = search(given, most=1).plans
    (gain, _) = gains(best, given, offered(coding))
    (coded,) = search(problem(coding=coding), most=1).plans
    assert gain.step_s == coded.step_s < 0.95 * best.step_s


def test_local_steps_are_a_step_alone_and_a_share_of_meeting():
    given = problem()
    (best,) = search(given, most=1).plans
    (gain,) = gains(best, given, offered())
    rule = LocalSteps(every=50)
    plan = make_plan("diloco", num_stages=2, num_workers=2, num_steps=102, weights=rule)
    costs = Costs(
        forward_s=(0.02,) * 2, backward_s=(0.04,) * 2, param_bytes=(2e6,) * 2
    )  # fmt: skip
    assert gain.step_s == pytest.approx(simulate(programs_of(plan), costs, SLOW).step_s)


def test_what_has_no_room_in_memory_is_not_offered():
    (best,) = search(problem(), most=1).plans
    for room, found in ((best.fit.memory_bytes + 3e6, []), (1e9, [KEPT])):
        given = problem(memory_bytes=room)
        assert [x.strategy for x in gains(best, given, offered(KEPT)) if "TopK" in x.strategy] == [
            f'CyclicStrategy("cyclic_dp", compress={each})' for each in found
        ]


def test_of_pipelines_alone_there_is_nothing_to_tell():
    ranking = search(problem(presets=("1f1b",)))
    assert of_first(ranking, offered(HALF)) is None


@pytest.mark.parametrize("coding", [HALF, SMALL, WEIGHTS, BOTH, MIXED])
def test_plans_under_a_codec_are_ranked_as_if_all_were_simulated(coding):
    given = problem(
        coding=coding, presets=("cyclic_dp", "cyclic_dp_v1", "lockstep_dp", "1f1b"),
        num_workers=3, batch_size=12,
    )  # fmt: skip
    found, expected = search(given, most=100).plans, everything(given)
    assert [key(plan) for plan in found] == [key(plan) for plan in expected]
    whole = [c for c in candidates(given) if c.runs_whole_micro]
    assert {c.plan(given, num_steps=3).to_owners for c in whole} == {coding.to_owners}
    of_whole_alone = coding.to_owners or coding.weights is not None
    assert (len(whole) == len([*candidates(given)])) == of_whole_alone


def test_new_weights_of_shards_add_to_nothing():
    given = problem(coding=WEIGHTS, presets=("cyclic_zero", "cyclic_dp", "lockstep_dp"))
    assert {c.preset for c in candidates(given)} == {"cyclic_dp", "lockstep_dp"}


def test_a_codec_is_written_where_it_is_used():
    found = search(problem(coding=SMALL))
    assert written(found.plans[0], found.problem).endswith(", compress=TopK(density=0.01))")
    made = as_config(found.plans[0], found.problem, "lightning")["init_args"]["compress"]
    assert made == {"class_path": "lightning_cyclic.TopK", "init_args": {"density": 0.01}}
    hydra = as_config(found.plans[0], found.problem, "hydra")["compress"]
    assert hydra == {"_target_": "lightning_cyclic.TopK", "density": 0.01}
    both = search(problem(coding=MIXED))
    line = ', compress={"gradients": "bf16", "weights": TopK(density=0.01)})'
    assert written(both.plans[0], both.problem).endswith(line)
    codecs = as_config(both.plans[0], both.problem, "lightning")["init_args"]["compress"]
    assert codecs == {"gradients": "bf16", "weights": made}
    pipelines = search(problem(coding=HALF, presets=("1f1b",), num_workers=4, batch_size=16))
    lines = [(x.fit.candidate.replicas, written(x, pipelines.problem)) for x in pipelines.plans]
    assert {replicas > 1 for replicas, _ in lines} == {True, False}
    assert all(('compress="bf16"' in line) == (replicas > 1) for replicas, line in lines)


def test_what_is_left_of_gradients_takes_room():
    given = problem(coding=KEPT)
    assert given.left_bytes == 4e6
    assert given.room_bytes == 1e9 - 4e6
    assert "4 MB of what gradients left" in table(search(given))
    assert "what gradients left" not in table(search(problem(coding=SMALL)))


def test_what_new_weights_need_takes_room():
    given = problem(coding=Coding(gradients=KEPT.gradients, weights=TOP_K))
    assert (given.left_bytes, given.versions_bytes) == (4e6, 4e6)
    assert given.room_bytes == 1e9 - 8e6
    text = " ".join(table(search(given)).split())
    assert "4 MB of what gradients left and 4 MB for new weights, which memory above" in text
    assert problem(coding=KEPT).versions_bytes == 0


NETWORKS = [  # of powers of two, so that no sum of times is rounded
    Network(bandwidth_bytes_per_s=4.0),
    Network(latency_s=0.25, bandwidth_bytes_per_s=2.0),
    Network(latency_s=2.0, bandwidth_bytes_per_s=64.0),
]


@pytest.mark.parametrize("of_weights", [1.0, 0.25])
@pytest.mark.parametrize(
    ("num_workers", "num_stages", "size"), [(2, 2, 1), (4, 4, 1), (4, 3, 1), (4, 3, 2), (6, 3, 3)]
)
def test_no_simulated_step_is_faster_than_its_bound(num_workers, num_stages, size, of_weights):
    ones = (1.0,) * num_stages
    costs = Costs(
        forward_s=(0.25,) * num_stages, backward_s=(0.5,) * num_stages, param_bytes=ones,
        sent_sum_bytes=(0.5,) * num_stages, sent_param_bytes=(of_weights,) * num_stages,
    )  # fmt: skip
    close = 0
    for network, sharding, slack in product(NETWORKS, ("optimizer", "none"), (0, 2)):
        numbers = {"slack": slack, "sharding": sharding, "group_size": size, "to_owners": True}
        plan = make_plan(
            "cyclic_dp", num_workers=num_workers, num_stages=num_stages, num_steps=16,
            proved=False, **numbers,
        )  # fmt: skip
        step_s = simulate(programs_of(plan), costs, network, plan).step_s
        bound_s = ring_bound_s(costs, network, num_workers, **numbers)
        assert step_s >= bound_s, (network, numbers)
        close += step_s < 1.2 * bound_s
    assert close > 2 or size > 1  # of 12: the bound says something, but of groups' ports nothing
