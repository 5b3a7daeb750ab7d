"""What forwards leave for their backwards, which is away meanwhile, as part of a program."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import PlanError, ValidationError
from lightning_cyclic.plan import PRESETS, make_plan, programs_of
from lightning_cyclic.plan.actions import COMPUTE, GO_BACK, Kind, Payload, parse
from lightning_cyclic.plan.check.proof import proof_of
from lightning_cyclic.plan.check.replay import Replay
from lightning_cyclic.plan.dataflow import absences, live_activations
from lightning_cyclic.simulate import Costs, memory, memory_by_slot, simulate

PIPELINES = [name for name, preset in PRESETS.items() if preset.placement == "pipelined"]
ONE_EACH = ("pipedream", "pipeoptim", "spectrain")
MOVES = (Kind.EVICT, Kind.FREE, Kind.FETCH)


def moving(preset, num_stages=4, num_workers=4, num_microbatches=8, **numbers):
    if preset in ONE_EACH:
        num_microbatches = 1
    return make_plan(
        preset, num_stages=num_stages, num_workers=num_workers,
        num_microbatches=num_microbatches, offloads=True, **numbers,
    )  # fmt: skip


def moves_of(program):
    return [a for a in program if a.payload is Payload.A and a.kind in MOVES]


def play(plan, program):
    replay = Replay(plan)
    replay.run([program])
    replay.check_flushed(plan.num_steps - 1)


def test_a_graph_leaves_while_one_thing_is_computed_and_comes_while_one_is():
    plan = make_plan(
        "1f1b", num_stages=2, num_workers=1, num_microbatches=2, num_steps=1, offloads=True
    )
    text = " ".join(map(str, programs_of(plan)[0]))
    assert text == (
        "0F0@0#0 0EVICT_A0#0~tiers 0F1@0#0 0EVICT_A1#0~tiers 0FREE_A0#0 1F0@0#0 0FREE_A1#0 "
        "0FETCH_A0#0~tiers 1B0@0#0 0B0@0#0 1F1@0#0 0FETCH_A1#0~tiers 1B1@0#0 0TELL#0 0B1@0#0 "
        "0UPDATE@1#0 1UPDATE@1#0"
    )
    assert [str(parse(x)) for x in text.split()] == text.split()


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("preset", PIPELINES)
def test_every_pipeline_is_proved_and_moves_what_has_the_time(preset, num_workers):
    each = 2 if preset in ("interleaved_1f1b", "zb_v", "dualpipe_v") else 1
    plan = moving(preset, max(4, each * num_workers), num_workers, num_steps=16)
    steady = range(plan.num_steps // 2)  # behind which a flush brings things nearer to each other
    assert "replayed" in str(proof_of(plan))
    for program in programs_of(plan):
        cells = [(a.kind, (a.t, a.i, a.j)) for a in program if a.kind in COMPUTE]
        moves = [a for a in moves_of(program) if a.t in steady]
        begins = {cell: n for n, (kind, cell) in enumerate(cells) if kind is Kind.F}
        ends = {cell: n for n, (kind, cell) in enumerate(cells) if kind in GO_BACK}
        expected = [
            cell for cell, n in begins.items() if ends[cell] - n >= 4 and cell[0] in steady
        ]
        for kind in MOVES:
            found = [(a.t, a.i, a.j) for a in moves if a.kind is kind]
            assert sorted(found) == sorted(expected)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(PIPELINES), st.integers(1, 3), st.integers(1, 8))
def test_at_least_one_thing_is_computed_while_a_graph_is_away(preset, workers, micros):
    plan = moving(preset, 2 * workers, workers, max(micros, 2 * workers), num_steps=12)
    for program in programs_of(plan):
        for (t, *_), (leaves, comes) in absences(program).items():
            assert t >= 6 or any(a.kind in COMPUTE for a in program[leaves:comes])


def test_without_it_nothing_moves():
    assert not any(map(moves_of, programs_of(replace(moving("gpipe"), offloads=False))))


def test_workers_of_whole_micro_batches_are_refused():
    with pytest.raises(PlanError, match="offloads=True with placement 'replicated'"):
        make_plan("cyclic_dp", num_stages=2, num_workers=2, offloads=True)


@pytest.mark.parametrize("left_out", MOVES)
def test_a_program_that_leaves_a_move_out_is_refused(left_out):
    plan = moving("gpipe", num_workers=1, num_steps=1)
    program = [
        a for a in programs_of(plan)[0]
        if not (a in moves_of([a]) and a.kind is left_out and (a.i, a.j) == (1, 2))
    ]  # fmt: skip
    with pytest.raises(ValidationError, match=r"before what it needs|ends with graph \(0, 1, 2\)"):
        play(plan, program)


def test_no_backward_runs_before_its_graph_has_come_back():
    plan = moving("gpipe", num_workers=1, num_steps=1)
    program = list(programs_of(plan)[0])
    late = next(a for a in program if str(a) == "2FETCH_A1#0~tiers")
    program.remove(late)
    place = next(n for n, a in enumerate(program) if str(a) == "2B1@0#0")
    with pytest.raises(ValidationError, match=r"before what it needs(.|\n)*2B1@0#0"):
        play(plan, [*program[: place + 1], late, *program[place + 1 :]])


@pytest.mark.parametrize(
    ("preset", "activations"),
    [
        ("gpipe", [3, 3, 3, 3]), ("1f1b", [3, 3, 2, 1]), ("pipedream", [3, 3, 2, 1]),
        ("zb_h1", [3, 3, 4, 4]),
    ],
)  # fmt: skip
def test_memory_counts_activations_while_they_are_there(preset, activations):
    plan = moving(preset, num_steps=12)
    costs = Costs.even(4, model_bytes=4.0, activation_bytes=4.0, cut_bytes=1.0)
    kept = memory(plan, costs)
    assert [worker.activations for worker in kept] == activations
    assert list(map(live_activations, programs_of(plan))) == activations
    whole = memory(replace(plan, offloads=False), costs)
    assert [worker.inputs for worker in kept] == [worker.inputs for worker in whole]
    assert [x.parameters for x in kept] == [x.parameters for x in whole]
    by_slot = memory_by_slot(plan, costs)
    assert [max(m.activations for m in row) for row in by_slot] == activations


def test_copies_overlap_what_is_computed_and_cost_what_has_no_room_there():
    costs = Costs.even(1, compute_s=3.0)  # a forward takes one second, a backward two
    plan = moving("gpipe", 1, 1, num_steps=1)
    seconds = {}
    for put_away_s in (0.0, 1.0, 3.0):
        priced = replace(costs, put_away_s=(put_away_s,))
        seconds[put_away_s] = simulate(programs_of(plan), priced, plan=plan).makespan_s
    assert seconds[0.0] == 8 * 3
    assert seconds[1.0] == 8 * 3 + 1  # the first comes when the last that leaves has gone
    assert seconds[3.0] > 8 * 3 + 1
