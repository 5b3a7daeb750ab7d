"""transfers pairs messages up; they are received in one order per channel."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import PRESETS, make_plan
from lightning_cyclic.plan.actions import Kind, Lane, Payload
from lightning_cyclic.plan.passes.messages import Channel, channel_of


def traffic(plan):
    sent, received = defaultdict(list), defaultdict(list)
    for w, program in enumerate(plan.programs):
        for a in program:
            if a.kind is Kind.SEND:
                sent[channel_of(a, w)].append((a.payload, a.t, a.i, a.j, a.v))
            elif a.kind is Kind.RECV:
                received[channel_of(a, w)].append((a.payload, a.t, a.i, a.j, a.v))
    return sent, received


@given(
    preset=st.sampled_from(sorted(PRESETS)),
    num_stages=st.integers(1, 8),
    num_workers=st.integers(1, 5),
    slack=st.sampled_from([0, 1, 3, 50]),
    is_sharded=st.booleans(),
)
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_sends_and_receives_pair_up_in_order(preset, num_stages, num_workers, slack, is_sharded):
    if PRESETS[preset].placement != "replicated":
        num_workers = min(num_workers, num_stages)
    plan = make_plan(
        preset,
        num_stages=num_stages,
        num_workers=num_workers,
        slack=slack if PRESETS[preset].placement == "replicated" else 0,
        sharding=None if is_sharded else "none",
        relayed=[0],
    )
    sent, received = traffic(plan)
    assert sent == received
    assert all(channel.source != channel.target for channel in sent)


def test_neighbouring_stages_on_one_worker_exchange_nothing():
    plan = make_plan("gpipe", num_stages=4, num_workers=2, num_microbatches=2, num_steps=1)
    sent, _ = traffic(plan)
    assert dict(sent) == {
        Channel(0, 1, Lane.MAIN): [
            (Payload.D, 0, None, 2, None), (Payload.A, 0, 0, 2, None), (Payload.A, 0, 1, 2, None)
        ],
        Channel(1, 0, Lane.MAIN): [
            (Payload.G, 0, 0, 1, None), (Payload.L, 0, None, 0, None), (Payload.G, 0, 1, 1, None)
        ],
    }  # fmt: skip


@pytest.mark.parametrize("preset", ["cyclic_dp", "lockstep_dp", "cyclic_mp"])
def test_sums_travel_in_the_order_of_micro_batches(preset):
    plan = make_plan(preset, num_stages=3, num_workers=3, num_steps=1)
    for j in range(3):
        hops = sorted(
            (a.i, w, a.peer)
            for w, program in enumerate(plan.programs)
            for a in program
            if a.kind is Kind.SEND and a.payload is Payload.S and a.j == j
        )
        for i, source, target in hops:
            assert (source, target) == (plan.worker_of(i, j), plan.worker_of(i + 1, j))
