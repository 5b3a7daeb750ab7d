import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.planner import Problem
from lightning_cyclic.planner.fit import Fitter
from lightning_cyclic.planner.search import least_step_s, timed
from lightning_cyclic.simulate import Network

from .profiles import candidate, profile_of, unit


def problem(*, seconds=(1.0,) * 4, num_workers=4, network=None, crossing=0.0):
    units = (
        unit(f"h.{k}", forward_s=s, backward_s=2 * s, param_bytes=1, activation_bytes=1,
             crossing_bytes=crossing)
        for k, s in enumerate(seconds)
    )  # fmt: skip
    return Problem(
        profiles=(profile_of(units),),
        num_workers=num_workers,
        memory_bytes=1e9,
        network=network or Network(),
    )


def fitted(given_, preset, *, num_stages=4, num_microbatches=8, **more):
    asked = candidate(preset, num_stages=num_stages, num_microbatches=num_microbatches, **more)
    return Fitter(given_).fit(asked)


@pytest.mark.parametrize(
    ("preset", "step_s", "bubble"),
    [
        ("gpipe", 33, 3 / 11),  # (S-1)/(m+S-1)
        ("1f1b", 33, 3 / 11),
        ("pipedream_2bw", 24, 0),
        ("cyclic_pipeline", 24, 0),
    ],
)
def test_step_and_bubble_where_messages_are_free(preset, step_s, bubble):
    given_ = problem()
    fit = fitted(given_, preset)
    plan = timed(fit, given_)
    assert plan.is_simulated
    assert plan.step_s == least_step_s(fit, given_) == step_s
    assert plan.bubble == pytest.approx(bubble, abs=1e-12)


def test_rematerialisation_costs_a_forward():
    given_ = problem()
    assert timed(fitted(given_, "cyclic_pipeline", remat=True), given_).step_s == 32


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(["gpipe", "1f1b", "pipedream_2bw", "cyclic_pipeline", "lockstep_dp"]),
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([0.0, 1.0, 9.0]),
)
def test_no_simulation_beats_the_bound(preset, seconds, latency_s, crossing):
    network = Network(latency_s=latency_s, bandwidth_bytes_per_s=2.0)
    given_ = problem(seconds=tuple(map(float, seconds)), network=network, crossing=crossing)
    fit = fitted(given_, preset, num_microbatches=4 if preset == "lockstep_dp" else 8)
    assert timed(fit, given_).step_s >= least_step_s(fit, given_) * (1 - 1e-12)


@pytest.mark.parametrize(
    ("preset", "num_microbatches", "expected", "horizon"),
    [
        ("1f1b", 4, (0, 0), 0),
        ("pipedream_2bw", 4, (1, 1), 0),
        ("cyclic_pipeline", 4, (6 / 16, 1), 0),  # version t where i + j >= S-1
        ("pipedream", 1, (1.5, 3), 0),  # S-1-j
        ("pipeoptim", 1, (1.5, 3), 3),
        ("cyclic_dp", 4, (6 / 16, 1), 0),
        ("cyclic_dp_v1", 4, (1, 1), 0),
    ],
)
def test_staleness(preset, num_microbatches, expected, horizon):
    given_ = problem()
    plan = timed(fitted(given_, preset, num_microbatches=num_microbatches), given_)
    assert plan.staleness == expected
    assert plan.horizon == horizon


@pytest.mark.parametrize(
    ("preset", "num_microbatches"), [("gpipe", 8), ("cyclic_pipeline", 8), ("cyclic_dp", 4)]
)
def test_where_simulation_takes_too_long(monkeypatch, preset, num_microbatches):
    given_ = problem()
    fit = fitted(given_, preset, num_microbatches=num_microbatches)
    simulated = timed(fit, given_)
    monkeypatch.setattr(sys.modules["lightning_cyclic.planner.search"], "_MOST_SIMULATED", 0)
    plan = timed(fit, given_)
    assert not plan.is_simulated
    assert (plan.step_s, plan.bubble) == (simulated.step_s, simulated.bubble)  # free messages


def test_workers_that_share_hosts_have_the_links_of_hosts():
    far = Network(latency_s=50.0, bandwidth_bytes_per_s=1e3)
    near = replace(far, hosts=(0, 0, 0, 0), inside=Network())
    for preset, is_near in (("cyclic_dp", True), ("gpipe", False)):
        given_ = replace(problem(network=far), host_network=near)
        fit = fitted(given_, preset, num_microbatches=4)
        seconds = [timed(fit, x).step_s for x in (given_, problem(network=far), problem())]
        assert seconds[0] == seconds[2 if is_near else 1]
        assert seconds[1] > seconds[2]
