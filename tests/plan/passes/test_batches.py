"""batches hands out the batch first and the losses last, inside each replica."""

import pytest

from lightning_cyclic.errors import ValidationError
from lightning_cyclic.plan import PRESETS, make_plan
from lightning_cyclic.plan.actions import Kind, Payload, parse
from lightning_cyclic.plan.check.proof import validate
from tests.program_texts import from_text, to_text

PIPELINED = [name for name, preset in PRESETS.items() if preset.placement == "pipelined"]


def of(plan, payload):
    """List step, stage, from and to of the sends of a payload."""
    return sorted(
        (a.t, a.j, w, a.peer)
        for w, program in enumerate(plan.programs)
        for a in program
        if a.kind is Kind.SEND and a.payload is payload
    )


def moved(plan, w, text, behind):
    """Return the programs with one action of worker w moved behind another."""
    programs = [list(program) for program in from_text(to_text(plan.programs))]
    programs[w].remove(parse(text))
    programs[w].insert(programs[w].index(parse(behind)) + 1, parse(text))
    return tuple(map(tuple, programs))


def test_who_sends_to_whom():
    plan = make_plan("gpipe", num_stages=5, num_workers=6, replicas=2, num_steps=2)
    assert of(plan, Payload.D) == [
        (t, j, w, w + hop) for t in (0, 1) for j, hop in ((2, 1), (4, 2)) for w in (0, 3)
    ]
    assert of(plan, Payload.L) == [
        (t, j, w, w - hop) for t in (0, 1) for j, hop in ((0, 2), (2, 1)) for w in (2, 5)
    ]


@pytest.mark.parametrize("preset", PIPELINED)
@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_the_batch_comes_first_and_losses_leave_behind_the_last_forward(preset, num_workers):
    plan = make_plan(preset, num_stages=5, num_workers=num_workers, num_steps=3)
    for w, program in enumerate(plan.programs):
        for t in range(3):
            compute = [n for n, a in enumerate(program) if a.t == t and a.kind in (Kind.F, Kind.B)]
            batches = [n for n, a in enumerate(program) if a.t == t and a.payload is Payload.D]
            losses = [n for n, a in enumerate(program) if a.t == t and a.payload is Payload.L]
            assert len(batches) == (num_workers - 1 if w == 0 else 1)
            assert max(batches) < compute[0]
            assert len(losses) == (num_workers - 1 if w == num_workers - 1 else 1)
            if w == num_workers - 1:
                assert min(losses) > max(n for n in compute if program[n].kind is Kind.F)
            else:  # posted early, behind the batch
                assert min(losses) > max(batches)


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_zero", "lockstep_dp"])
def test_other_placements_need_neither(preset):
    plan = make_plan(preset, num_stages=3, num_workers=3)
    assert of(plan, Payload.D) == of(plan, Payload.L) == []


def test_places_have_the_batch_from_who_begins_the_step():
    plan = make_plan("cyclic_mp", num_stages=3, num_workers=6, num_microbatches=4, num_steps=4)
    for t in range(4):
        begins = plan.worker_of(0, 0, t)
        sent = [(w, a.peer) for w, program in enumerate(plan.programs) for a in program
                if a.kind is Kind.SEND and a.payload is Payload.D and a.t == t]  # fmt: skip
        assert sent == [(begins, w) for w in range(6) if w != begins]


def test_a_replica_of_one_worker_needs_neither():
    plan = make_plan("gpipe", num_stages=3, num_workers=2, replicas=2)
    assert of(plan, Payload.D) == of(plan, Payload.L) == []


@pytest.mark.parametrize(
    ("w", "text", "behind"),
    [
        (1, "1RECV_D<0#0", "1F0@0#0"),  # after its first use: behind a message sent after it
        (1, "0SEND_L>0#0", "1F0@0#0"),  # before the last loss
    ],
)
def test_what_comes_too_late_or_leaves_too_early_is_refused(w, text, behind):
    plan = make_plan("gpipe", num_stages=2, num_workers=2, num_microbatches=2, num_steps=1)
    with pytest.raises(ValidationError, match="before what it needs is there|takes what was sent"):
        validate(plan, moved(plan, w, text, behind))
