"""updates makes each version once per holder, together where a worker has several due."""

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
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
    plan = make_plan("gpipe", num_stages=4, num_workers=2, num_micro=1, num_steps=1)
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
