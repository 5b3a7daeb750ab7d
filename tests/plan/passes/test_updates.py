"""updates makes each version once per holder, together where a worker has several due."""

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind, Payload
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


def test_each_version_is_made_once():
    plan = make_plan("cyclic_dp", num_stages=8, num_workers=3, num_steps=5)
    made = [(a.j, a.v) for p in plan.programs for a in p if a.kind is Kind.UPDATE]
    assert sorted(made) == [(j, v) for j in range(8) for v in range(1, 6)]


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
    for w, program in enumerate(plan.programs):
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
    first = min(a.s for program in plan.programs for a in program if a.kind is Kind.F and a.v == 1)
    for program in plan.programs:
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
