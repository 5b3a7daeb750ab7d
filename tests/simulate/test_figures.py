"""The figures that the design names, from the package's own simulator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan, programs_of
from lightning_cyclic.plan.actions import Payload, parse
from lightning_cyclic.simulate import Costs, Network, account, lockstep, simulate


def both(num_workers, psi, latency_s):
    """Return the step times of cyclic and lockstep data parallelism, in units of compute."""
    num_stages = max(num_workers, 8)
    plan = make_plan("cyclic_dp", num_stages=num_stages, num_workers=num_workers, num_steps=12)
    costs = Costs.even(num_stages, compute_s=1.0, model_bytes=psi)
    network = Network(latency_s=latency_s, bandwidth_bytes_per_s=1.0)
    return (
        simulate(programs_of(plan), costs, network).step_s,
        lockstep(costs, network, num_workers).step_s,
    )


@pytest.mark.parametrize(
    ("num_workers", "psi", "latency_s", "cyclic", "reference"),
    [
        (2, 0.5, 0.0, 1.00, 1.06),
        (4, 0.5, 0.0, 1.00, 1.17),
        (16, 0.5, 0.0, 1.15, 1.31),
        (16, 0.3, 0.002, 1.00, 1.90),
    ],
)
def test_step_times_of_the_design(num_workers, psi, latency_s, cyclic, reference):
    got = both(num_workers, psi, latency_s)
    assert got == (pytest.approx(cyclic, abs=0.025), pytest.approx(reference, abs=0.005))


@pytest.mark.parametrize("preset", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 2), (4, 4), (4, 12), (3, 1)])
def test_bubble_of_flushed_pipelines(preset, num_stages, num_microbatches):
    plan = make_plan(
        preset,
        num_stages=num_stages,
        num_workers=num_stages,
        num_microbatches=num_microbatches,
        num_steps=6,
    )
    bubble = simulate(programs_of(plan), Costs.even(num_stages)).bubble
    expected = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert bubble == pytest.approx((expected,) * num_stages)


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1", "cyclic_pipeline", "pipedream"])
def test_no_bubble_without_a_flush(preset):
    plan = make_plan(preset, num_stages=4, num_workers=4, num_steps=12)
    assert simulate(programs_of(plan), Costs.even(4)).bubble == pytest.approx((0.0,) * 4)


P, S, T = Payload.P, Payload.S, Payload.T


def count(*programs, num_stages=1):
    """Return the account of programs given as text; each stage has 10 bytes."""
    costs = Costs.even(num_stages, model_bytes=10.0 * num_stages, cut_bytes=3.0)
    return account([[parse(text) for text in program.split()] for program in programs], costs)


def of_plan(preset, n, *, num_microbatches=None, num_steps=6):
    plan = make_plan(
        preset, num_stages=n, num_workers=n, num_microbatches=num_microbatches, num_steps=num_steps
    )
    return account(programs_of(plan), Costs.even(n, model_bytes=100.0 * n, cut_bytes=3.0))


def test_messages_and_bytes_of_the_middle_step_by_payload():
    steps = " ".join(f"0F0@0#{t} 0B0@0#{t} 0SEND_S0>1#{t} 1SEND_A0>1#{t}" for t in range(3))
    (worker,) = count(steps, num_stages=2).workers
    assert worker.sent_messages == {S: 1, Payload.A: 1}
    assert worker.sent_bytes == {S: 10.0, Payload.A: 3.0}


@pytest.mark.parametrize(
    ("program", "versions"),
    [
        ("0F0@0#0 0B0@0#0 0UPDATE@1#0 0F0@1#1 0B0@1#1", 1),  # in place: nothing reads 0 any more
        ("0F0@0#0 0UPDATE@1#0 0B0@0#0 0F0@1#1 0B0@1#1", 2),
        ("0F0@0#0 0RECV_P@1<1#1 0F0@1#1 0RECV_P@2<1#2 0F0@2#2 0B0@0#0 0B0@1#1 0B0@2#2", 3),
        ("0F0@0#0 0B0@0#0 0RECV_P@1<1#1 0F0@1#1 0B0@1#1", 1),
        ("0RECV_P@1<1#1 0F0@1#1 0FREE@1#1 0F1@0#1 0RECV_P@1<1#1 0B0@1#1", 2),
    ],
)
def test_versions_live_from_the_first_to_the_last_use(program, versions):
    (worker,) = count(program).workers
    assert (worker.versions, worker.param_bytes) == (versions, 10.0 * versions)


def test_versions_are_counted_per_stage_and_bytes_over_all():
    (worker,) = count("0F0@0#0 1F0@0#0 1B0@0#0 0B0@0#0", num_stages=2).workers
    assert (worker.versions, worker.param_bytes, worker.activations) == (1, 20.0, 2)


def test_tied_parameters_are_no_version_of_a_stage():
    (worker,) = count("0RECV_V@1<1#1 1F0@1#1 1B0@1#1", num_stages=2).workers
    assert (worker.versions, worker.param_bytes) == (1, 10.0)
    owner = count("0UPDATE@1#0 0SEND_P@1>1#1 0SEND_V@1>2#1 0F0@1#1").workers[0]
    assert (owner.versions, owner.sent_messages) == (1, {P: 1, Payload.V: 1})


def test_a_wide_pipeline_keeps_what_one_replica_keeps():
    one = of_plan("1f1b", 3).workers
    plan = make_plan("1f1b", num_stages=3, num_workers=6, num_steps=6, replicas=2)
    wide = account(programs_of(plan), Costs.even(3, model_bytes=300.0, cut_bytes=3.0)).workers
    assert [worker.activations for worker in wide] == [w.activations for w in one] * 2
    assert [worker.param_bytes for worker in wide] == [100.0] * 6
    assert [worker.updates for worker in wide] == [1, 1, 1, 0, 0, 0]


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 8))
def test_cyclic_keeps_half_the_activations_of_lockstep(n):
    assert of_plan("cyclic_dp", n).activations == n * (n + 1) // 2
    assert of_plan("lockstep_dp", n).activations == n * n


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 8))
def test_cyclic_sends_what_a_ring_sends_in_few_messages(n):
    workers = of_plan("cyclic_dp", n).workers
    total = {
        payload: sum(worker.sent_messages.get(payload, 0) for worker in workers)
        for payload in (S, T, P)
    }
    # Each stage: n-1 partial sums, its total unless the last worker owns it, n-1 relays.
    assert total == {S: n * (n - 1), T: n - 1, P: n * (n - 1)}
    assert [worker.updates for worker in workers] == [1] * n


@pytest.mark.parametrize(
    ("preset", "seconds"),
    [
        ("lockstep_dp", [1.009, 1.054, 1.247]),
        ("cyclic_zero", [1.153, 1.198, 1.274]),
    ],
)
def test_steps_take_what_the_page_on_presets_says(preset, seconds):
    plan = make_plan(preset, num_stages=16, num_workers=8, num_steps=8)
    costs = Costs.even(16, model_bytes=1.0)
    for psi_s, expected in zip((0.01, 0.1, 0.25), seconds, strict=True):
        network = Network(latency_s=0.0005, bandwidth_bytes_per_s=1 / psi_s)
        found = simulate(programs_of(plan), costs, network, plan).step_s
        assert found == pytest.approx(expected, abs=5e-4)
