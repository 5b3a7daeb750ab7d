"""shards fetches and drops, and sends one slot ahead."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.plan import make_plan, program_of, programs_of
from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.plan.check.replay import Replay
from lightning_cyclic.plan.passes.shards import shards
from tests.harness.programs import replayed
from tests.harness.rows import more

FULL = {"preset": "cyclic_zero"}


def test_without_full_sharding_nothing_changes():
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2)
    assert shards(plan, programs_of(plan)) is programs_of(plan)


@given(num_stages=st.integers(1, 6), num_workers=st.integers(1, 5))
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_users_hold_the_stage_in_use_beside_their_own_and_the_next(num_stages, num_workers):
    plan = make_plan("cyclic_zero", num_stages=num_stages, num_workers=num_workers)
    for w, program in enumerate(programs_of(plan)):
        held = []
        for n, a in enumerate(program):
            if a.kind is Kind.GATHER and a.t < plan.num_steps:
                assert len(held) <= 1
                # a flush may come before the next step
                assert all(t == a.t and j != a.j for t, j in held)
                assert program[n + 1].payload is Payload.P
                held.append((a.t, a.j))
            elif a.kind is Kind.FREE:
                assert held.pop(0) == (a.t, a.j)
            elif a.kind in (Kind.F, Kind.B):
                assert plan.owner(a.j) == w or (a.t, a.j) == held[0]


def test_a_receive_is_posted_while_the_stage_before_is_run():
    plan = make_plan("cyclic_zero", num_stages=3, num_workers=3, num_steps=2)
    shown = " ".join(
        str(a) for a in programs_of(plan)[0] if a.t == 1 and a.payload in (None, Payload.P)
    )
    assert "1GATHER@0#1 1RECV_P0@0<1#1~weights 0F0@0#1 0FREE@0#1 1F0@0#1" in shown


def test_owners_send_one_slot_ahead_of_use():
    plan = make_plan("cyclic_zero", num_stages=3, num_workers=3)
    uses = [
        (plan.owner(a.j), w, a.s)
        for w, program in enumerate(programs_of(plan))
        for a in program
        if a.kind in (Kind.F, Kind.B) and plan.owner(a.j) != w
    ]
    sends = [
        (w, a.peer, a.s)
        for w, program in enumerate(programs_of(plan))
        for a in program
        if a.payload is Payload.P and a.kind is Kind.SEND and a.t < plan.num_steps
    ]
    assert sorted(sends) == sorted((o, w, max(0, s - 1)) for o, w, s in uses)


def test_lockstep_can_be_sharded_too():
    plan = make_plan("lockstep_dp", num_stages=4, num_workers=2, sharding="full", num_steps=2)
    assert {a.kind for p in programs_of(plan) for a in p} == set(Kind) - {
        Kind.TELL, Kind.I, Kind.W, Kind.FETCH, Kind.EVICT, Kind.OUTER,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("num_workers", "num_stages", "axes", "relayed"),
    [
        (*sizes, axes, relayed) if (j + k) % 2 == relayed else more(*sizes, axes, relayed)
        for j, sizes in enumerate([(2, 2), (3, 3), (3, 1), (4, 8), (6, 5)])
        for k, axes in enumerate([FULL, {"slack": 2, **FULL}, {"slack": 5, **FULL}])
        for relayed in (False, True)
    ],
)
def test_flushes_anywhere_leave_nothing_pending(num_workers, num_stages, axes, relayed):
    stages = tuple(range(num_stages)) if relayed else ()
    plan = make_plan(
        **axes, num_stages=num_stages, num_workers=num_workers,
        relayed=stages, relayed_until=stages, proved=False,
    )  # fmt: skip
    for behind in ({0, 1, 2, 3, 4}, {0}, {2, 3}, {4}):
        replayed(plan, behind)


@pytest.mark.parametrize("axes", [FULL, {"slack": 2, **FULL}, {"slack": 5, **FULL}])
@pytest.mark.parametrize(("num_workers", "num_stages"), [(2, 2), (3, 2), (3, 6), (8, 4), (6, 5)])
def test_nobody_waits_for_another_worker_s_next_step(num_workers, num_stages, axes):
    """Between steps all workers may meet, for a checkpoint or a value that is reduced."""
    plan = make_plan(**axes, num_stages=num_stages, num_workers=num_workers)
    replay, workers = Replay(plan), range(num_workers)
    for t in range(8):
        replay.run([program_of(plan).step(w, t, starts=t == 0) for w in workers])
        assert not any(worker.todo for worker in replay._workers)
