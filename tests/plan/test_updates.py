"""Where versions are made, and who is told of the norms before."""

from __future__ import annotations

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan, make_plan, programs_of
from lightning_cyclic.plan.actions import Action, Kind, Payload
from lightning_cyclic.plan.passes.updates import updates


def updated(plan):
    programs = [[] for _ in range(plan.num_workers)]
    for _, w, a in plan.timetable:
        programs[w].append(a)
    in_time = tuple(tuple(sorted(program, key=plan.time)) for program in programs)
    return [" ".join(map(str, program)) for program in updates(plan, in_time)]


def test_every_replica_moves_on_right_before_it_reads():
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, num_steps=2)
    assert updated(plan) == [
        "0F0@0#0 1F0@0#0 1B0@0#0 0B0@0#0 0F0@0#1 1UPDATE@1#0 1F0@1#1 1B0@1#1 0B0@0#1",
        "0F1@0#0 1F1@0#0 1B1@0#0 0B1@0#0 0UPDATE@1#0 0F1@1#1 1UPDATE@1#0 1F1@1#1 1B1@1#1 0B1@1#1",
    ]


def test_an_owner_updates_what_it_reads_next_at_once():
    plan = make_plan("cyclic_dp", num_stages=4, num_workers=2, num_steps=2)
    assert [plan.owner(j) for j in range(4)] == [1, 1, 0, 0]
    first, last = updated(plan)
    assert "1F0@0#1 2UPDATE@1#0 3UPDATE@1#0 2F0@1#1 3F0@1#1" in first
    assert "0UPDATE@1#0 1UPDATE@1#0 0F1@1#1 1F1@1#1 2UPDATE@1#0 2F1@1#1" in last


def test_an_owner_that_reads_late_updates_when_its_step_ends():
    plan = make_plan("cyclic_dp_v1", num_stages=2, num_workers=2, num_steps=1)
    assert updated(plan)[1] == "0F1@0#0 1F1@0#0 1B1@0#0 0B1@0#0 0UPDATE@1#0 1UPDATE@1#0"


def test_lockstep_moves_on_after_the_last_backward():
    plan = make_plan("lockstep_dp", num_stages=2, num_workers=1, num_steps=1)
    assert updated(plan) == ["0F0@0#0 1F0@0#0 1B0@0#0 0B0@0#0 0UPDATE@1#0 1UPDATE@1#0"]


def test_pipelines_with_a_flush_update_all_stages_of_a_worker_at_the_end():
    plan = make_plan("gpipe", num_stages=4, num_workers=2, num_microbatches=1, num_steps=1)
    assert updated(plan) == [
        "0F0@0#0 1F0@0#0 1B0@0#0 0B0@0#0 0UPDATE@1#0 1UPDATE@1#0",
        "2F0@0#0 3F0@0#0 3B0@0#0 2B0@0#0 2UPDATE@1#0 3UPDATE@1#0",
    ]


def test_pipelines_without_a_flush_update_in_the_slot_after_the_last_backward():
    plan = make_plan("pipedream", num_stages=2, num_workers=1, num_steps=2)
    program = updated(plan)[0]
    assert "1B0@0#0 1UPDATE@1#0 0B0@0#0" in program
    assert "0B0@0#0 1F0@1#1 0UPDATE@1#0" in program


def test_late_updates_wait_for_the_first_reader():
    plan = make_plan("pipedream_2bw", num_stages=2, num_workers=2, num_steps=4, late_updates=True)
    first = updated(plan)[0].split()
    assert first.index("0UPDATE@1#0") + 1 == first.index("0F0@1#2")


@pytest.mark.parametrize("rounds", [1, 2])
def test_owners_that_meet_update_behind_their_step_before_they_hand_buffers_on(rounds):
    numbers = {
        "num_stages": 3,
        "num_workers": 3,
        "num_microbatches": 3 * rounds,
        "norms": "owners",
    }
    plan = make_plan("cyclic_dp", relayed=[0], relayed_until=[2], **numbers)
    assert plan.updates_meet
    assert not make_plan(
        "cyclic_dp", relayed=[0], **numbers | {"num_microbatches": 3}
    ).updates_meet
    for w, program in enumerate(programs_of(plan)):
        updates = [a for a in program if a.kind is Kind.UPDATE]
        assert {plan.owner(a.j) for a in updates} == {w}
        for a in updates:
            before = program[: program.index(a)]
            assert {b.t for b in before if b.kind in {Kind.F, Kind.B}} == set(range(a.t + 1))


def test_owners_of_sharded_weights_that_meet_do_so_where_the_first_worker_reads_new_ones():
    numbers = {"num_stages": 2, "num_workers": 2, "num_microbatches": 6, "relayed": [0]}
    plan = make_plan("cyclic_zero", norms="owners", **numbers)
    assert plan.updates_meet
    assert not make_plan("cyclic_zero", **numbers).updates_meet
    first = min(
        a.s for program in programs_of(plan) for a in program if a.kind is Kind.F and a.v == 1
    )
    for program in programs_of(plan):
        (slot,) = {a.s for a in program if a.kind is Kind.UPDATE and a.v == 1}
        served = [a for a in program if a.payload is Payload.P and a.kind is Kind.SEND]
        assert slot >= first
        early = [a for a in served if a.s < first]
        place = next(n for n, a in enumerate(program) if a.kind is Kind.UPDATE)
        assert early
        assert all(program.index(a) < place for a in early)


def test_what_can_not_be_proved_with_norms_of_all_is_refused_by_name():
    said = r"buffers of stages \[0, 1, 2, 3\] that travel .* clip_norm='stage'"
    with pytest.raises(PlanError, match=said):
        make_plan(
            "cyclic_zero", num_stages=4, num_workers=4, norms="owners", relayed=[0, 1, 2, 3],
            relayed_until=[3, 3, 3, 3],
        )  # fmt: skip


def heard(plan: Plan, w: int) -> dict[int, set[int]]:
    """Return step -> stages of whose norms a worker hears."""
    found: dict[int, set[int]] = {}
    for a in programs_of(plan)[w]:
        if a.kind is Kind.RECV and a.payload is Payload.N:
            found.setdefault(a.t, set()).add(a.j)
    return found


def begins(plan: Plan, w: int, t: int) -> int:
    """Return where a worker makes the version of step t, or, if it makes none, runs B again."""
    owns = any(a.kind is Kind.UPDATE for a in programs_of(plan)[w])
    kind, step = (Kind.UPDATE, t) if owns else (Kind.B, t + 1)
    return next(n for n, a in enumerate(programs_of(plan)[w]) if a.kind is kind and a.t == step)


def last_heard(plan: Plan, w: int, t: int) -> int:
    each = enumerate(programs_of(plan)[w])
    return max(n for n, a in each if _is_heard(a) and a.t == t)


def _is_heard(a: Action) -> bool:
    return a.kind is Kind.RECV and a.payload is Payload.N


@pytest.mark.parametrize(
    ("preset", "num_workers", "replicas"),
    [("1f1b", 2, 1), ("1f1b", 4, 1), ("gpipe", 4, 1), ("1f1b", 4, 2), ("gpipe", 6, 3)],
)
def test_all_workers_of_a_pipeline_with_a_flush_hear_before_the_new_version(
    preset: str, num_workers: int, replicas: int
) -> None:
    plan = make_plan(
        preset, num_stages=4, num_workers=num_workers, replicas=replicas,
        num_microbatches=4 * replicas,
        norms="all", num_steps=3,
    )  # fmt: skip
    for w in range(num_workers):
        others = {j for j in range(4) if plan.owner(j) != w}
        assert heard(plan, w) == dict.fromkeys(range(3), others)
        assert all(last_heard(plan, w, t) < begins(plan, w, t) for t in range(2))


def test_owners_alone_hear_where_they_alone_clip() -> None:
    plan = make_plan(
        "1f1b",
        num_stages=2,
        num_workers=4,
        replicas=2,
        num_microbatches=4,
        norms="owners",
        num_steps=2,
    )
    owners = {plan.owner(j) for j in range(2)}
    assert [bool(heard(plan, w)) for w in range(4)] == [w in owners for w in range(4)]


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize(
    ("preset", "weights"),
    [("pipedream_2bw", "delayed"), ("cyclic_mp", "delayed"), ("cyclic_mp", "freshest")],
)
def test_the_first_backward_of_a_step_waits_for_those_that_its_scale_follows_from(
    preset: str, weights: str, num_steps: int
) -> None:
    plan = make_plan(
        preset, num_stages=4, num_workers=4, num_microbatches=4, norms="all", weights=weights,
        late_updates=weights == "delayed", num_steps=num_steps,
    )  # fmt: skip
    for w in range(4):
        known = -1
        for a in programs_of(plan)[w]:
            known = max(known, a.t) if _is_heard(a) else known
            if a.kind is Kind.B:
                assert known >= plan.ended_before(a.t) - 1


def test_owners_tell_the_norms_of_totals_that_come_long_before_they_are_applied() -> None:
    """Else each owner would wait with its own update for the norms that another tells late."""
    plan = make_plan(
        "cyclic_mp", num_stages=3, num_workers=3, num_microbatches=4, weights="delayed",
        norms="all",
        late_updates=True, num_steps=4,
    )  # fmt: skip
    told = 0
    for w, program in enumerate(programs_of(plan)):
        for a in program:
            if a.payload is Payload.N and a.kind is Kind.SEND:
                s = plan.slot(Kind.B, a.t, plan.num_microbatches - 1, a.j)
                update = next(u for u in program if (u.kind, u.t, u.j) == (Kind.UPDATE, a.t, a.j))
                came = plan.worker_of(plan.num_microbatches - 1, a.j, a.t) != w
                told += came
                assert a.s == s + came < update.s
    assert told > 0


@pytest.mark.parametrize(
    ("preset", "slack", "late"),
    [("lockstep_dp", 0, 0), ("cyclic_dp", 0, 1), ("cyclic_dp_v1", 0, 1),
     ("cyclic_dp", 4, 1), ("cyclic_zero", 0, 1)],
)  # fmt: skip
def test_whole_steps_know_of_the_updates_that_all_workers_have_read(
    preset: str, slack: int, late: int
) -> None:
    plan = make_plan(preset, num_stages=4, num_workers=4, slack=slack)
    for t in range(6):
        read = [plan.reads(t, i, j) for i in range(4) for j in range(4)]
        assert plan.ended_before(t) == min(read) == max(t - late, 0)


@pytest.mark.parametrize("num_microbatches", [3, 4, 7])
def test_no_stage_waits_for_a_norm(num_microbatches: int) -> None:
    plan = make_plan(
        "pipedream_2bw", num_stages=4, num_workers=4, num_microbatches=num_microbatches,
        num_steps=6,
        late_updates=True,
    )  # fmt: skip
    ends = [
        plan.slot(Kind.B, 2, num_microbatches - 1, j) for j in range(4)
    ]  # the last, of stage 0
    for program in programs_of(plan):
        (update,) = [a for a in program if a.kind is Kind.UPDATE and a.t == 2]
        first = next(a for a in program if a.kind is Kind.F and a.v == 3)
        assert max(ends) < update.s == first.s


def test_gradients_of_the_next_step_come_before_a_late_update() -> None:
    """So runs would fail the tests of clipping if a stage mixed the two that it holds then."""
    plan = make_plan("pipedream_2bw", num_stages=4, num_workers=4, num_steps=6, late_updates=True)
    program = [a for a in programs_of(plan)[3] if a.kind in (Kind.B, Kind.UPDATE)]
    at = next(n for n, a in enumerate(program) if a.kind is Kind.UPDATE and a.t == 2)
    assert {a.t for a in program[:at] if a.kind is Kind.B} == {0, 1, 2, 3}


def test_replicas_exchange_gradients_once_per_update() -> None:
    plan = make_plan("pipedream_2bw", num_stages=2, num_workers=6, num_microbatches=12, replicas=3)
    for w, program in enumerate(programs_of(plan)):
        replica, stage = divmod(w, 2)
        of_step = [a for a in program if a.t == 2]
        sums = [(a.kind, a.peer) for a in of_step if a.payload in (Payload.S, Payload.T)]
        before, after = (Kind.RECV, w - 2), (Kind.SEND, w + 2)
        assert sums == [before] * (replica > 0) + [after] * (replica < 2)
        versions = [a for a in program if a.payload is Payload.P and a.v == 3]
        assert [a.kind for a in versions] == ([Kind.SEND] * 2 if replica == 2 else [Kind.RECV])
        assert plan.owner(stage) == 4 + stage
