"""Several replicas of a pipeline: as a picture, and what stays as with one."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import ValidationError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.plan.check.proof import probe, validate
from lightning_cyclic.plan.clock import Entry, picture
from lightning_cyclic.plan.dataflow import live_activations
from tests.program_texts import from_text, to_text


def test_timetable():
    plan = make_plan(
        "1f1b", num_stages=2, num_workers=4, num_microbatches=4, num_steps=1, replicas=2
    )
    cells = [Entry(s, w, f"{a.j}{a.kind}{a.i}") for s, w, a in plan.timetable]
    assert picture(cells).splitlines() == [
        "slot   0   1   2   3   4   5",
        "w0   0F0 0F2   . 0B0   . 0B2",
        "w1     . 1F0 1B0 1F2 1B2   .",
        "w2   0F1 0F3   . 0B1   . 0B3",
        "w3     . 1F1 1B1 1F3 1B3   .",
    ]


@st.composite
def wide(draw):
    """Draw numbers of a pipeline in which workers hold one stage or several."""
    num_stages = draw(st.integers(1, 6))
    replicas = draw(st.integers(1, 4))
    stages = st.integers(0, num_stages - 1)
    groups = st.sets(stages, min_size=2, max_size=3).map(sorted).map(tuple)
    return {
        "preset": draw(st.sampled_from(["gpipe", "1f1b"])),
        "num_stages": num_stages,
        "num_workers": draw(st.integers(1, num_stages)) * replicas,
        "num_microbatches": draw(st.integers(1, 7)) * replicas,
        "num_steps": draw(st.integers(1, 3)),
        "relayed": draw(st.sets(stages)),
        "replicas": replicas,
        "tied": draw(st.lists(groups, max_size=3)) if num_stages > 1 else (),
    }


@given(wide())
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_any_numbers_make_a_program_that_holds(numbers):
    plan = make_plan(**numbers)
    validate(plan)
    validate(plan, from_text(to_text(plan.programs)))


@given(wide())
@settings(deadline=None, max_examples=30)
def test_each_forward_and_backward_runs_once_on_the_worker_of_its_replica(numbers):
    plan = make_plan(**numbers, proved=False)
    depth = plan.num_workers // plan.replicas
    done = sorted(
        (a.kind, a.t, a.i, a.j, w)
        for w, program in enumerate(plan.programs)
        for a in program
        if a.kind in (Kind.F, Kind.B)
    )
    assert done == sorted(
        (kind, t, i, j, i % plan.replicas * depth + j * depth // plan.num_stages)
        for kind in (Kind.F, Kind.B)
        for t in range(plan.num_steps)
        for i in range(plan.num_microbatches)
        for j in range(plan.num_stages)
    )


@given(wide())
@settings(deadline=None, max_examples=30)
def test_sums_go_from_each_micro_batch_to_the_next(numbers):
    plan = make_plan(**numbers, proved=False)
    hops = {
        (a.t, a.j, a.i): (w, a.peer)
        for w, program in enumerate(plan.programs)
        for a in program
        if a.kind is Kind.SEND and a.payload is Payload.S
    }
    expected = {
        (t, j, i): (plan.worker_of(i, j), plan.worker_of(i + 1, j))
        for t in range(plan.num_steps)
        for j in range(plan.num_stages)
        for i in range(plan.num_microbatches - 1)
        if plan.replicas > 1
    }
    assert hops == expected


@given(wide())
@settings(deadline=None, max_examples=30)
def test_messages_pair_up_in_order(numbers):
    plan = make_plan(**numbers, proved=False)
    sent, received = defaultdict(list), defaultdict(list)
    for w, program in enumerate(plan.programs):
        for a in program:
            if a.kind is Kind.SEND:
                sent[w, a.peer, a.payload].append((a.t, a.i, a.j, a.v))
            elif a.kind is Kind.RECV:
                received[a.peer, w, a.payload].append((a.t, a.i, a.j, a.v))
    assert sent == received
    for channel, messages in sent.items():
        assert len(messages) == len(set(messages)), channel


@given(wide())
@settings(deadline=None, max_examples=30)
def test_a_replica_keeps_what_a_pipeline_of_its_own_keeps(numbers):
    plan = make_plan(**numbers, proved=False)
    num_stages, num_microbatches = plan.num_stages, plan.num_microbatches // plan.replicas
    for w, program in enumerate(plan.programs):
        own = [j for j in range(num_stages) if w in plan.axes.placement.workers_of(j)]
        most = [
            num_microbatches if plan.schedule == "gpipe" else min(num_microbatches, num_stages - j)
            for j in own
        ]
        live = live_activations(program)
        assert live == most[0] if len(own) == 1 else live <= sum(most)


@pytest.mark.parametrize("replicas", [2, 64])
def test_a_probe_is_small_and_as_wide_as_needed(replicas):
    plan = make_plan(
        "1f1b", num_stages=64, num_workers=64 * replicas, replicas=replicas, tied=((0, 63),)
    )
    small = probe(plan)
    assert small.num_stages * small.num_microbatches * small.num_steps <= 2_000
    assert (small.replicas, small.num_workers) == (min(replicas, 3), 8 * min(replicas, 3))
    assert small.tied == ((0, 7),)


def test_micro_batches_default_to_one_per_stage_and_replica():
    assert make_plan("gpipe", num_stages=3, num_workers=6, replicas=2).num_microbatches == 6


@given(numbers=wide(), data=st.data())
@settings(deadline=None, max_examples=60)
def test_no_action_can_be_left_out(numbers, data):
    plan = make_plan(**numbers, proved=False)
    w = data.draw(st.integers(0, plan.num_workers - 1))
    n = data.draw(st.integers(0, len(plan.programs[w]) - 1))
    program = plan.programs[w][:n] + plan.programs[w][n + 1 :]
    with pytest.raises(ValidationError):
        validate(plan, (*plan.programs[:w], program, *plan.programs[w + 1 :]))


@given(numbers=wide(), data=st.data())
@settings(deadline=None, max_examples=60)
def test_no_message_can_be_left_out_on_both_sides(numbers, data):
    plan = make_plan(**numbers, proved=False)
    sends = [(w, a) for w, p in enumerate(plan.programs) for a in p if a.kind is Kind.SEND]
    if not sends:
        return
    w, a = data.draw(st.sampled_from(sends))
    missing = {(Kind.SEND, w, a.peer), (Kind.RECV, a.peer, w)}
    programs = tuple(
        tuple(
            b
            for b in program
            if (b.kind, v, b.peer) not in missing
            or (b.payload, b.t, b.i, b.j, b.v) != (a.payload, a.t, a.i, a.j, a.v)
        )
        for v, program in enumerate(plan.programs)
    )
    with pytest.raises(ValidationError):
        validate(plan, programs)
