"""updates makes each version once per holder, where it is first read; drain ends the program."""

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind
from lightning_cyclic.plan.passes.updates import drain, updates
from lightning_cyclic.plan.passes.versions import versions


def updated(plan):
    cells = [[] for _ in range(plan.num_workers)]
    for cell in sorted(plan._cells(plan.num_steps), key=plan._time):
        cells[plan.worker_of(cell.i, cell.j, cell.t)].append(cell)
    programs = updates(plan, tuple(tuple(versions(plan, c)) for c in cells))
    return [" ".join(map(str, program)) for program in programs]


def test_every_replica_moves_on_right_before_it_reads():
    plan = make_plan("cyclic_dp", num_stages=2, num_workers=2, num_steps=2)
    assert updated(plan) == [
        "0F0@0#0 1F0@0#0 1B0@0#0 0B0@0#0 0F0@0#1 1UPDATE@1#0 1F0@1#1 1B0@1#1 0B0@0#1",
        "0F1@0#0 1F1@0#0 1B1@0#0 0B1@0#0 0UPDATE@1#0 0F1@1#1 1UPDATE@1#0 1F1@1#1 1B1@1#1 0B1@1#1",
    ]


def test_lockstep_moves_on_after_the_last_backward():
    plan = make_plan("lockstep_dp", num_stages=2, num_workers=1, num_steps=1)
    assert updated(plan) == ["0F0@0#0 1F0@0#0 1B0@0#0 0B0@0#0 0UPDATE@1#0 1UPDATE@1#0"]


def test_pipelines_update_in_the_slot_after_the_last_backward():
    plan = make_plan("gpipe", num_stages=2, num_workers=2, num_micro=2, num_steps=1)
    assert updated(plan) == [
        "0F0@0#0 0F1@0#0 0B0@0#0 0B1@0#0 0UPDATE@1#0",
        "1F0@0#0 1F1@0#0 1B0@0#0 1B1@0#0 1UPDATE@1#0",
    ]


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1", "lockstep_dp"])
def test_after_the_drain_no_computation_and_every_version(preset):
    plan = make_plan(preset, num_stages=4, num_workers=2, num_steps=3, sharding="optimizer")
    last_compute = [
        max(n for n, a in enumerate(p) if a.kind in (Kind.F, Kind.B)) for p in plan.programs
    ]
    assert all(a.t < 3 for p, n in zip(plan.programs, last_compute, strict=True) for a in p[:n])
    made = [(a.j, a.v) for p in plan.programs for a in p if a.kind is Kind.UPDATE]
    assert sorted(made) == [(j, v) for j in range(4) for v in (1, 2, 3)]
    assert drain(plan, plan.programs) == plan.programs
