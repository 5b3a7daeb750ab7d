"""Workers that share cores: alone as fast as ever, together as fast as their share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import parse
from lightning_cyclic.simulate import Costs, Network, simulate

COSTS = Costs(
    forward_s=(1.0, 1.0), backward_s=(2.0, 2.0), param_bytes=(8.0, 8.0), update_s=(0.25, 0.25),
    cut_bytes=(0.0, 8.0),
)  # fmt: skip
NETWORK = Network(latency_s=0.5, bandwidth_bytes_per_s=8.0)


def times(result):
    return {(e.worker, str(e.action)): (e.start_s, e.end_s) for e in result.events}


def run(*programs, cores):
    programs = [[parse(text) for text in program.split()] for program in programs]
    return times(simulate(programs, COSTS, NETWORK, cores=cores))


@settings(deadline=None, max_examples=30)
@given(
    preset=st.sampled_from(["1f1b", "gpipe", "cyclic_pipeline", "cyclic_dp"]),
    workers=st.integers(1, 4),
    num_micro=st.integers(3, 5),
)
def test_with_a_core_each_it_is_the_other_clock(preset, workers, num_micro):
    many = {} if preset == "cyclic_dp" else {"num_micro": num_micro}
    plan = make_plan(preset, num_stages=4, num_workers=workers, **many)
    costs = Costs(
        forward_s=(1.0,) * 4, backward_s=(2.0, 2.5, 2.0, 2.0), param_bytes=(8.0,) * 4,
        update_s=(0.25,) * 4, cut_bytes=(4.0,) * 4,
    )  # fmt: skip
    expected = simulate(plan.programs, costs, NETWORK)
    given = simulate(plan.programs, costs, NETWORK, cores=workers)
    assert times(given) == times(expected)  # all times are sums of powers of two
    assert given.step_s == expected.step_s


def test_two_workers_on_one_core_halve_it():
    # worker 1 computes for 1 s, until 2; worker 0 has 1 s left then
    assert run("0F0@0#0 0B0@0#0", "1F0@0#0", cores=1) == {
        (0, "0F0@0#0"): (0.0, 2.0),
        (1, "1F0@0#0"): (0.0, 2.0),
        (0, "0B0@0#0"): (2.0, 4.0),
    }


def test_messages_take_no_core():
    programs = (
        "0F0@0#0 1SEND_A0>1#0 0F1@0#0", "1RECV_A0<0#0 1F0@0#0"
    )  # fmt: skip
    assert run(*programs, cores=1) == {
        (0, "0F0@0#0"): (0.0, 1.0),
        (0, "1SEND_A0>1#0"): (1.0, 2.0),
        (0, "0F1@0#0"): (1.0, 2.0),
        (1, "1RECV_A0<0#0"): (1.5, 2.5),
        (1, "1F0@0#0"): (2.5, 3.5),
    }


def test_a_pipeline_on_fewer_cores_is_bound_by_them():
    plan = make_plan("1f1b", num_stages=4, num_workers=4, num_micro=16, num_steps=6)
    costs = Costs.even(4, compute_s=4.0)
    alone = simulate(plan.programs, costs).step_s
    shared = simulate(plan.programs, costs, cores=2).step_s
    work = 16 * 4.0
    assert alone == pytest.approx(19 / 4 * 4.0)
    assert work / 2 <= shared < 1.1 * work / 2


def test_no_core_is_refused():
    with pytest.raises(PlanError, match=r"cores=0; allowed: whole numbers from 1"):
        simulate([[]], COSTS, cores=0)
