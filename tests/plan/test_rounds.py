"""Several rounds of whole micro-batches in a step: as a picture, and what stays as with one."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan, program_of, programs_of
from lightning_cyclic.plan.actions import Kind, Lane, Payload
from lightning_cyclic.plan.check.proof import probe, validate
from lightning_cyclic.plan.check.replay import Replay
from lightning_cyclic.plan.passes.messages import step_of

numbers = {
    "preset": st.sampled_from(["cyclic_zero", "cyclic_dp", "cyclic_dp_v1", "lockstep_dp"]),
    "num_stages": st.integers(1, 5),
    "num_workers": st.integers(1, 4),
    "rounds": st.integers(1, 4),
    "slack": st.sampled_from([0, 1, 2, 5, 50]),
    "sharding": st.sampled_from([None, "none", "full"]),
    "is_relayed": st.booleans(),
}


def made(
    preset, num_stages, num_workers, rounds, slack=0, sharding=None, is_relayed=False, proved=True
):  # fmt: skip
    return make_plan(
        preset, num_stages=num_stages, num_workers=num_workers,
        num_microbatches=rounds * num_workers,
        slack=slack, sharding=sharding, relayed=range(num_stages if is_relayed else 0),
        num_steps=2, proved=proved,
    )  # fmt: skip


@given(**numbers)
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_how_many_rounds_there_are_changes_no_version_and_no_owner(rounds, **rest):
    plan, one = made(rounds=rounds, **rest), made(rounds=1, **rest)
    stages, workers = range(plan.num_stages), range(plan.num_workers)
    for j in stages:
        assert plan.owner(j) == one.owner(j)
        assert plan.chain(j) == one.chain(j)
        assert plan.delay(j) == one.delay(j)
        assert plan.depth(j) == one.depth(j)
        for t in range(4):
            reads = [plan.reads(t, i, j) for i in range(plan.num_microbatches)]
            assert reads == [one.reads(t, w, j) for w in workers] * rounds
    # so that one goes on where the other has ended, behind a flush
    assert program_of(plan).channels == program_of(one).channels
    lanes, of_one = ([program_of(p).waiting_lanes(w) for w in workers] for p in (plan, one))
    assert lanes == of_one


@given(**numbers)
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_sums_and_buffers_travel_once_a_step_and_parameters_in_each_round(**given_numbers):
    plan = made(**given_numbers)
    n, s, r = plan.num_workers, plan.num_stages, plan.rounds
    sent = [a for p in programs_of(plan) for a in p if a.kind is Kind.SEND and step_of(a) == 1]
    sums = [a for a in sent if a.payload in (Payload.S, Payload.H)]
    assert len(sums) == s * (n - 1)
    assert {a.payload for a in sums} <= {Payload.H if plan.sharding == "full" else Payload.S}
    gathers = plan.sharding == "full"
    assert all(a.i // n == r - 1 for a in sums)
    assert sum(a.payload is Payload.R for a in sent) == len(plan.relayed) * n * (n > 1)
    fetched = sum(a.payload is Payload.P and a.i is not None and a.t < 2 for a in sent)
    assert fetched == (2 * s * (n - 1) * r if gathers else 0)


@pytest.mark.parametrize("is_relayed", [False, True])
@pytest.mark.parametrize("slack", [0, 2, 5])
@pytest.mark.parametrize(("num_workers", "num_stages"), [(2, 2), (3, 3), (3, 6), (4, 8), (6, 5)])
def test_nobody_waits_for_another_worker_s_next_step(num_workers, num_stages, slack, is_relayed):
    """Between steps all workers may meet; a send waits, too, where a ring has no room."""
    plan = made("cyclic_zero", num_stages, num_workers, 3, slack, None, is_relayed, proved=False)
    replay, workers = Replay(plan), range(num_workers)
    for t in range(5):
        replay.run([program_of(plan).step(w, t, starts=t == 0) for w in workers])
        for worker in replay._workers:
            assert not worker.todo
            assert not (is_relayed and worker._lanes[Lane.WEIGHTS])


@pytest.mark.parametrize("is_relayed", [False, True])
@pytest.mark.parametrize(
    ("preset", "num_workers", "num_stages", "slack"),
    [
        *(("cyclic_zero", *numbers) for numbers in ((2, 2, 0), (3, 4, 2), (4, 3, 5))),
        *(("cyclic_dp", *numbers) for numbers in ((2, 2, 0), (3, 4, 2), (4, 3, 5))),
    ],
)
def test_plans_of_other_rounds_go_on_behind_a_flush(
    preset, num_workers, num_stages, slack, is_relayed
):
    """What one leaves at a flush is what another one begins with: as the engine has it."""
    plans = {r: made(preset, num_stages, num_workers, r, slack, None, is_relayed) for r in (1, 3)}
    workers, ended = range(num_workers), -1
    numbers = [1, 3, 3, 1, 3]
    replay = Replay(plans[1])
    for t, rounds in enumerate(numbers):
        plan, begins = plans[rounds], t == ended + 1
        if begins:
            follow(replay, plan, t)
        replay.run([program_of(plan).step(w, t, ended=ended, starts=begins) for w in workers])
        if numbers[t + 1 :][:1] != [rounds]:
            replay.run([program_of(plan).flush(w, t, ended=ended) for w in workers])
            replay.check_flushed(t)
            ended = t
    assert ended == 4


def follow(replay, plan, t):
    """Let a replay go on with another plan in step ``t``, as ``Engine.follow``."""
    replay._plan = plan
    for worker in replay._workers:
        worker._plan, worker._depths = plan, program_of(plan).depths
        worker._flow = program_of(plan).flow(worker._w)


def test_many_workers_are_proved_on_fewer_with_few_rounds():
    plan = make_plan("cyclic_zero", num_stages=64, num_workers=16, num_microbatches=160)
    small = probe(plan)
    assert (small.num_workers, small.num_stages, small.rounds) == (2, 8, 3)
    assert small.spacing == Fraction(2 * 8, 2)
    validate(small)
