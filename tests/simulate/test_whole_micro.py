"""Where in a program workers that run whole micro-batches have what."""

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind, Payload
from lightning_cyclic.simulate.whole_micro import (
    Span,
    most_at_once,
    series,
    spans,
)

GRADIENTS = (Payload.S, Payload.T, Payload.H)
PRESETS = ("cyclic_dp", "cyclic_dp_v1", "lockstep_dp", "cyclic_zero")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("n", "num_stages"), [(2, 2), (3, 5), (4, 8)])
def test_every_gradient_and_every_sum_has_one_place(preset, n, num_stages):
    plan = make_plan(preset, num_stages=num_stages, num_workers=n, num_steps=6)
    for program, found in zip(plan.programs, spans(plan), strict=True):
        backwards = [(m, a.j) for m, a in enumerate(program) if a.kind is Kind.B]
        own = [(x.begin, x.j) for x in found if x.kind == "gradients"]
        assert sorted(own) == backwards
        left = sum(a.kind is Kind.SEND and a.payload in GRADIENTS for a in program)
        used = sum(a.kind is Kind.UPDATE for a in program)
        came = [a.i for a in program if a.kind is Kind.RECV and a.payload is Payload.H]
        added = len(came) - came.count(0)  # the first becomes the sum
        assert sum(x.kind == "sums" for x in found) == left + used + added
        assert all(0 <= x.begin < x.end for x in found)


@pytest.mark.parametrize(
    ("preset", "payload", "w"), [("cyclic_zero", Payload.H, 0), ("lockstep_dp", Payload.S, 0)]
)
def test_what_is_sent_waits_until_its_receiver_waits_for_it(preset, payload, w):
    plan = make_plan(preset, num_stages=2, num_workers=2, num_steps=6)
    program, found = plan.programs[w], spans(plan)[w]

    def is_it(a, kind):
        return a.kind is kind and a.payload is payload and a.t == 2

    n, sent = next((n, a) for n, a in enumerate(program) if is_it(a, Kind.SEND))
    (taken,) = (a.s for a in plan.programs[1 - w] if is_it(a, Kind.RECV) and a.j == sent.j)
    (span,) = (x for x in found if x.kind == "sums" and x.end == _end(program, max(taken, sent.s)))
    assert span.begin <= n < span.end


def _end(program, slot):
    """Return the first place behind a slot."""
    return next(n for n, a in enumerate(program) if a.s > slot)


def test_stages_of_others_are_there_from_their_receive_to_their_free():
    plan = make_plan("cyclic_zero", num_stages=4, num_workers=2, num_steps=6)
    for program, found in zip(plan.programs, spans(plan), strict=True):
        fetched = [x for x in found if x.kind == "fetched"]
        frees = [n for n, a in enumerate(program) if a.kind is Kind.FREE]
        assert [x.end for x in fetched] == frees
        for x in fetched:
            assert (program[x.begin].kind, program[x.begin].payload) == (Kind.RECV, Payload.P)
            assert {program[x.begin].j, program[x.end].j} == {x.j}


def test_what_is_there_at_once_is_counted():
    found = (
        Span("sums", 0, 0, 2), Span("sums", 0, 1, 3), Span("sums", 1, 1, 2),
        Span("gradients", 0, 0, 9),
    )  # fmt: skip
    assert most_at_once(found, "sums") == {0: 2, 1: 1}
    assert series(found, "sums", (10.0, 1.0), 4) == [10, 21, 10, 0]
    assert series(found, "gradients", (10.0, 1.0), 4) == [10] * 4
