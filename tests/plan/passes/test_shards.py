"""shards fetches and drops, and sends one slot ahead."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import ValidationError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.plan.check.replay import Replay
from lightning_cyclic.plan.check.validate import validate
from lightning_cyclic.plan.passes.messages import is_for_one_use
from lightning_cyclic.plan.passes.shards import shards
from tests.rows import more

FULL = {"preset": "cyclic_zero"}
RING = {"preset": "lockstep_dp", "schedule": "cyclic_flush", "sharding": "ring"}


def test_without_full_sharding_nothing_changes():
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2)
    assert shards(plan, plan.programs) is plan.programs


@given(
    axes=st.sampled_from([FULL, RING]), num_stages=st.integers(1, 6), num_workers=st.integers(1, 5)
)
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_users_hold_the_stage_in_use_beside_their_own_and_the_next(axes, num_stages, num_workers):
    plan = make_plan(**axes, num_stages=num_stages, num_workers=num_workers)
    for w, program in enumerate(plan.programs):
        held = []
        for n, a in enumerate(program):
            if a.kind is Kind.GATHER and a.t < plan.num_steps:
                assert len(held) <= (axes is FULL)
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
        str(a) for a in plan.programs[0] if a.t == 1 and a.payload in (None, Payload.P)
    )
    assert "1GATHER@0#1 1RECV_P0@0<1#1~weights 0F0@0#1 0FREE@0#1 1F0@0#1" in shown


def test_owners_send_one_slot_ahead_of_use():
    plan = make_plan("cyclic_zero", num_stages=3, num_workers=3)
    uses = [
        (plan.owner(a.j), w, a.s)
        for w, program in enumerate(plan.programs)
        for a in program
        if a.kind in (Kind.F, Kind.B) and plan.owner(a.j) != w
    ]
    sends = [
        (w, a.peer, a.s)
        for w, program in enumerate(plan.programs)
        for a in program
        if a.payload is Payload.P and a.kind is Kind.SEND and a.t < plan.num_steps
    ]
    assert sorted(sends) == sorted((o, w, max(0, s - 1)) for o, w, s in uses)


@given(num_stages=st.integers(1, 7), num_workers=st.integers(1, 6))
@settings(deadline=None, max_examples=settings().max_examples // 5)
def test_neighbours_hand_parameters_on(num_stages, num_workers):
    """N-1 messages for each stage, forwards and backwards: down the line, behind the owner's."""
    plan = make_plan(**RING, num_stages=num_stages, num_workers=num_workers, num_steps=3)
    last, hops = num_workers - 1, {}
    for w, program in enumerate(plan.programs):
        uses = {a: n for n, a in enumerate(program) if a.kind in (Kind.F, Kind.B)}
        for n, a in enumerate(program):
            if a.kind is Kind.RECV and is_for_one_use(a):
                use = next(b for b in program[n:] if b in uses)
                assert (use.i, use.j, use.v) == (a.i, a.j, a.v) == (w, a.j, a.t)
                hops.setdefault((use.kind, a.t, a.j), set()).add((a.peer, w))
            elif a.kind is Kind.SEND and is_for_one_use(a) and a.peer != 0:
                assert a.peer == w + 1
                assert next(b for b in program[n:] if b in uses).j == a.j  # right before its use
    for j in range(num_stages):
        owner = plan.owner(j)
        line = {(w, w + 1) for w in range(last) if w + 1 != owner}
        first = {(owner, 0)} if owner else set()
        assert len(line | first) == last
        for t in range(3 if last else 0):
            assert hops.pop((Kind.F, t, j)) == hops.pop((Kind.B, t, j)) == line | first
    assert not hops


def test_of_a_ring_all_messages_but_the_first_of_a_round_are_from_the_neighbour():
    plan = make_plan(**RING, num_stages=2, num_workers=4, num_steps=1)  # owned by 3 and 1
    sent = [
        sorted((w, a.peer) for w, program in enumerate(plan.programs) for a in program
               if a.kind is Kind.SEND and is_for_one_use(a) and a.j == j)
        for j in range(2)
    ]  # fmt: skip
    assert sent[0] == sorted([(3, 0), (0, 1), (1, 2)] * 2)
    assert sent[1] == sorted([(1, 0), (1, 2), (2, 3)] * 2)  # worker 1 has it itself


def test_a_copy_is_dropped_when_the_neighbour_has_it():
    plan = make_plan(**RING, num_stages=2, num_workers=3, num_steps=1)
    replay = Replay(plan)
    replay.run([plan.programs[0], (), plan.programs[2]])
    assert str(replay._workers[0].todo[0]) == "0FREE@0#0"
    replay.run([(), plan.programs[1], ()])
    replay.check_flushed(0)


def test_who_hands_on_what_it_has_dropped_is_refused():
    plan = make_plan(**RING, num_stages=2, num_workers=3, num_steps=1)
    program = list(plan.programs[0])
    n = next(n for n, a in enumerate(program) if a.kind is Kind.SEND and is_for_one_use(a))
    assert (program[n + 1].kind, program[n + 2].kind) == (Kind.F, Kind.FREE)
    program.insert(n + 2, program.pop(n))
    with pytest.raises(ValidationError, match="takes version 0 of stage 0, which is not there"):
        validate(plan, (tuple(program), *plan.programs[1:]))


def test_lockstep_can_be_sharded_too():
    plan = make_plan("lockstep_dp", num_stages=4, num_workers=2, sharding="full", num_steps=2)
    assert {a.kind for p in plan.programs for a in p} == set(Kind) - {Kind.TELL}


@pytest.mark.parametrize(
    ("num_workers", "num_stages", "axes", "relayed"),
    [
        (*sizes, axes, relayed) if (j + k) % 2 == relayed else more(*sizes, axes, relayed)
        for j, sizes in enumerate([(2, 2), (3, 3), (3, 1), (4, 8), (6, 5)])
        for k, axes in enumerate(
            [FULL, {"slack": 2, **FULL}, {"slack": 5, **FULL}, RING, {"norms": "owners", **RING}]
        )
        for relayed in (False, True)
    ],
)
def test_flushes_anywhere_leave_nothing_pending(num_workers, num_stages, axes, relayed):
    stages = tuple(range(num_stages)) if relayed else ()
    plan = make_plan(
        **axes, num_stages=num_stages, num_workers=num_workers,
        relayed=stages, relayed_until=stages, proved=False,
    )  # fmt: skip
    workers, program = range(num_workers), plan.program
    for behind in ({0, 1, 2, 3, 4}, {0}, {2, 3}, {4}):
        replay, ended = Replay(plan), -1
        for t in range(6):
            begins = t == ended + 1
            replay.run([program.step(w, t, ended=ended, starts=begins) for w in workers])
            if t in behind or t == 5:
                replay.run([program.flush(w, t, ended=ended) for w in workers])
                replay.check_flushed(t)
                ended = t


@pytest.mark.parametrize("axes", [FULL, {"slack": 2, **FULL}, {"slack": 5, **FULL}, RING])
@pytest.mark.parametrize(("num_workers", "num_stages"), [(2, 2), (3, 2), (3, 6), (8, 4), (6, 5)])
def test_nobody_waits_for_another_worker_s_next_step(num_workers, num_stages, axes):
    """Between steps all workers may meet, for a checkpoint or a value that is reduced."""
    plan = make_plan(**axes, num_stages=num_stages, num_workers=num_workers)
    replay, workers = Replay(plan), range(num_workers)
    for t in range(8):
        replay.run([plan.program.step(w, t, starts=t == 0) for w in workers])
        assert not any(worker.todo for worker in replay._workers)
