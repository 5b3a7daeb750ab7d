"""Optimizer state that is in memory only for its update, as part of a program."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

from lightning_cyclic.errors import ValidationError
from lightning_cyclic.plan import PRESETS, make_plan, programs_of
from lightning_cyclic.plan.actions import Kind, Payload, parse
from lightning_cyclic.plan.check.proof import proof_of
from lightning_cyclic.plan.check.replay import Replay
from lightning_cyclic.plan.lower import computed
from lightning_cyclic.plan.tiers import Tiers
from lightning_cyclic.simulate import Costs, memory, simulate
from lightning_cyclic.simulate.memory import memory_by_slot

STAGES = 4
ENDS_WITH = r"ends with (new state|state) \(2, 0\), which nobody takes"


def tiered(preset, *, ahead=1, moved=(8,) * STAGES, kept=(0,) * STAGES, **numbers):
    plan = make_plan(preset, num_stages=STAGES, **numbers)
    return replace(plan, tiers=Tiers(moved=moved, kept=kept, ahead=ahead))


def play(plan, program):
    replay = Replay(plan)
    replay.run([program])
    replay.check_flushed(plan.num_steps - 1)


def workers_of(preset):
    return {"interleaved_1f1b": 2, "zb_v": 2, "dualpipe_v": 2}.get(preset, STAGES)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize(
    "preset", [name for name in PRESETS if PRESETS[name].weights != "local"]
)  # which is refused: an update before an exchange is no action
def test_every_preset_is_proved_with_state_that_comes_and_goes(preset, ahead):
    plan = tiered(preset, ahead=ahead, num_workers=workers_of(preset), num_steps=3)
    assert "replayed" in str(proof_of(plan))
    for w, program in enumerate(programs_of(plan)):
        moves = [a for a in program if a.payload is Payload.O]
        updates = [(a.j, a.t) for a in program if a.kind is Kind.UPDATE]
        for kind in (Kind.FETCH, Kind.EVICT, Kind.FREE):
            assert sorted((a.j, a.t) for a in moves if a.kind is kind) == sorted(updates), w


def test_state_comes_ahead_of_its_update_and_goes_behind_the_next():
    plan = tiered("cyclic_dp", num_workers=1, num_steps=1)
    text = " ".join(map(str, programs_of(plan)[0]))
    assert text == (
        "0F0@0#0 1F0@0#0 2F0@0#0 3F0@0#0 3B0@0#0 2B0@0#0 1B0@0#0 0FETCH_O#0~tiers 0B0@0#0 "
        "1FETCH_O#0~tiers 0UPDATE@1#0 0EVICT_O#0~tiers 2FETCH_O#0~tiers 1UPDATE@1#0 "
        "1EVICT_O#0~tiers 0FREE_O#0 3FETCH_O#0~tiers 2UPDATE@1#0 2EVICT_O#0~tiers 1FREE_O#0 "
        "3UPDATE@1#0 3EVICT_O#0~tiers 2FREE_O#0 3FREE_O#0"
    )
    assert [str(parse(x)) for x in text.split()] == text.split()


@pytest.mark.parametrize("preset", ["cyclic_dp", "lockstep_dp"])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_one_worker_may_update_each_stage_right_behind_its_backward(preset, ahead):
    late = tiered(preset, ahead=ahead, num_workers=1, num_steps=3)
    plan = replace(late, tiers=replace(late.tiers, early=True))
    assert "replayed" in str(proof_of(plan))
    cells = [a for a in programs_of(plan)[0] if a.kind in (Kind.F, Kind.B, Kind.UPDATE)]
    behind = [(a.j, b.kind, b.j) for a, b in pairwise(cells) if a.kind is Kind.B]
    assert behind == [(j, Kind.UPDATE, j) for j in (3, 2, 1, 0)] * 3


def test_what_stays_has_no_moves():
    plan = tiered("cyclic_dp", moved=(0, 8, 0, 0), kept=(8, 0, 8, 8), num_workers=1)
    moved = {a.j for a in programs_of(plan)[0] if a.payload is Payload.O}
    assert moved == {1}


@pytest.mark.parametrize("left_out", [Kind.FETCH, Kind.EVICT, Kind.FREE])
def test_a_program_that_leaves_a_move_out_is_refused(left_out):
    plan = tiered("cyclic_dp", num_workers=1, num_steps=1)
    program = [
        a for a in programs_of(plan)[0]
        if not (a.payload is Payload.O and a.kind is left_out and a.j == 2)
    ]  # fmt: skip
    with pytest.raises(ValidationError, match=rf"before what it needs|{ENDS_WITH}"):
        play(plan, program)


def test_state_that_is_fetched_before_its_copy_is_made_is_refused():
    plan = tiered("cyclic_dp", num_workers=1, num_steps=2)
    program = list(programs_of(plan)[0])
    late = next(a for a in program if str(a) == "3EVICT_O#0~tiers")
    gone = next(a for a in program if str(a) == "3FREE_O#0")
    early = next(a for a in program if str(a) == "3FETCH_O#1~tiers")
    rest = [a for a in program if a not in (late, gone, early)]
    place = 1 + next(n for n, a in enumerate(rest) if str(a) == "3UPDATE@1#0")
    order = [*rest[:place], early, late, gone, *rest[place:]]
    with pytest.raises(ValidationError, match=r"before what it needs(.|\n)*action 3FETCH_O#1"):
        play(plan, order)


def most_by_walking(program, activation, state):
    """Return the most bytes that a worker of a pipeline has, action by action."""
    changes = {Kind.F: activation, Kind.B: -activation, Kind.FETCH: state, Kind.FREE: -state}
    return max(accumulate(changes.get(a.kind, 0) for a in program))


@pytest.mark.parametrize("activation", [0, 4])
@pytest.mark.parametrize(
    ("preset", "ahead", "most"),
    [
        ("1f1b", 0, 8), ("1f1b", 1, 24), ("gpipe", 2, 32),
        ("pipedream_2bw", 0, 8), ("pipedream_2bw", 1, 16),
    ],
)  # fmt: skip
def test_memory_of_pipelines_is_that_of_the_moment_with_the_most(preset, ahead, most, activation):
    plan = tiered(preset, ahead=ahead, num_workers=1, num_steps=8, num_microbatches=4)
    costs = Costs.even(STAGES, model_bytes=0, activation_bytes=activation * STAGES)
    (kept,) = memory(plan, costs)
    assert kept.total == most_by_walking(computed(plan)[0], activation, 8)
    if not activation:
        assert kept.optimizer == most
    slots = memory_by_slot(plan, costs)[0]
    assert max(m.optimizer for m in slots) == most


@pytest.mark.parametrize("preset", ["1f1b", "gpipe", "pipedream_2bw"])
def test_copies_of_pipelines_overlap_the_end_of_a_step_and_the_begin_of_the_next(preset):
    costs = replace(Costs.even(STAGES, compute_s=12.0, update_s=0.0), moved_s=(1.0,) * STAGES)
    seconds = {}
    for ahead in (None, 0, STAGES):
        plan = tiered(preset, ahead=ahead or 0, num_workers=1, num_steps=6, num_microbatches=4)
        plan = replace(plan, tiers=None) if ahead is None else plan
        seconds[ahead] = simulate(programs_of(plan), costs, plan=plan).makespan_s
    assert seconds[0] == seconds[None] + 6 * STAGES * (1 + 1)
    # behind the last updates state has to go: of all stages, or of the one that is updated last
    assert seconds[STAGES] == seconds[None] + (1 if preset == "pipedream_2bw" else STAGES)


@pytest.mark.parametrize("preset", ["gpipe", "pipedream"])
def test_graphs_and_state_use_one_lane(preset):
    plan = replace(tiered(preset, num_workers=1, num_steps=4, num_microbatches=4), offloads=True)
    assert "replayed" in str(proof_of(plan))
    kinds = {a.payload for a in programs_of(plan)[0] if a.kind is Kind.EVICT}
    assert kinds == {Payload.A, Payload.O}


@pytest.mark.parametrize(("ahead", "most"), [(0, 8.0), (1, 24.0), (2, 32.0)])
def test_memory_counts_what_is_there_at_each_place(ahead, most):
    plan = tiered("cyclic_dp", ahead=ahead, num_workers=1, num_steps=4)
    costs = Costs.even(STAGES, model_bytes=4 * STAGES, activation_bytes=0.0)
    (kept,) = memory(plan, costs)
    whole = memory(replace(plan, tiers=None), costs)[0]
    assert whole.optimizer == 8.0 * STAGES
    assert kept.optimizer == most
    assert kept.parameters == whole.parameters


def test_copies_overlap_what_is_computed_meanwhile():
    costs = replace(
        Costs.even(STAGES, compute_s=12.0, update_s=8.0), moved_s=(1.0,) * STAGES
    )  # an update takes as long as state to go, and to come
    seconds = {}
    for ahead in (0, 1):
        plan = tiered("cyclic_dp", ahead=ahead, num_workers=1, num_steps=6)
        seconds[ahead] = simulate(programs_of(plan), costs, plan=plan).makespan_s
    # without anything ahead, each of four updates waits for its state to come and to go
    assert seconds[0] == 6 * (12 + 8 + 8)
    assert seconds[1] == 6 * (12 + 8) + 1  # behind the last update its state has to go


# ---------------------------------------------------------------------- weights


def with_weights(*, ahead=1, early=True, weights=(8,) * STAGES, num_steps=3):
    plan = tiered("lockstep_dp", ahead=ahead, num_workers=1, num_steps=num_steps)
    return replace(plan, tiers=replace(plan.tiers, weights=weights, early=early))


def moves_of_weights(program):
    return [a for a in program if a.payload is Payload.P]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("early", [True, False])
def test_weights_are_there_for_every_use_and_for_no_other(ahead, early):
    plan = with_weights(ahead=ahead, early=early)
    assert "replayed" in str(proof_of(plan))
    there = set()
    for a in programs_of(plan)[0]:
        if a.kind in (Kind.F, Kind.B, Kind.UPDATE):
            assert a.j in there
            assert len(there) <= 1 + 2 * ahead
        elif a.payload is Payload.P and a.kind is Kind.FETCH:
            assert a.j not in there
            there.add(a.j)
        elif a.payload is Payload.P and a.kind is Kind.FREE:
            there.remove(a.j)
    assert not there


def test_the_last_stage_comes_once_and_others_come_again_for_their_backward():
    plan = with_weights(num_steps=1)
    comes = [a.j for a in moves_of_weights(programs_of(plan)[0]) if a.kind is Kind.FETCH]
    assert comes == [0, 1, 2, 3, 2, 1, 0]


def test_what_a_forward_has_not_changed_is_not_written_back():
    plan = with_weights(num_steps=1)
    goes = [str(a) for a in moves_of_weights(programs_of(plan)[0]) if a.kind is Kind.EVICT]
    assert goes == [f"{j}EVICT_P@1#0~tiers" for j in (3, 2, 1, 0)]


def test_weights_that_stay_have_no_moves():
    plan = with_weights(weights=(0, 8, 0, 8))
    assert {a.j for a in moves_of_weights(programs_of(plan)[0])} == {1, 3}
    assert "replayed" in str(proof_of(plan))


def test_moves_of_weights_print_and_parse():
    for a in programs_of(with_weights())[0]:
        assert parse(str(a)) == a


@pytest.mark.parametrize("left_out", [Kind.FETCH, Kind.EVICT, Kind.FREE])
def test_a_program_that_leaves_a_move_of_weights_out_is_refused(left_out):
    plan = with_weights(num_steps=2)
    program = list(programs_of(plan)[0])
    gone = next(a for a in moves_of_weights(program) if a.kind is left_out and a.j == 2)
    with pytest.raises(ValidationError, match=r"before what it needs|which is not there"):
        play(plan, [a for a in program if a is not gone])


def test_memory_counts_weights_that_are_there():
    costs = Costs.even(STAGES, model_bytes=8.0 * STAGES, activation_bytes=0.0)
    most = {}
    for ahead in (0, 1):
        plan = with_weights(ahead=ahead)
        alone = replace(plan, tiers=replace(plan.tiers, moved=(0,) * STAGES))
        most[ahead] = memory(alone, costs)[0].parameters
    assert most == {0: 8.0, 1: 16.0}  # one that is used, one that comes or leaves


def test_a_copy_of_weights_takes_its_time_beside_what_is_computed():
    slow = replace(Costs.even(STAGES, compute_s=12.0), weights_moved_s=(1.0,) * STAGES)
    seconds = {}
    for ahead in (0, 1):
        plan = with_weights(ahead=ahead, num_steps=4)
        seconds[ahead] = simulate(programs_of(plan), slow, plan=plan).makespan_s
    moves = 2 * STAGES - 1 + STAGES  # of a step, each waited for
    assert seconds[0] == 4 * (12 + moves)
    assert seconds[1] < 4 * (12 + moves / 2)
