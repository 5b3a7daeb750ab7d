"""ties moves gradients and versions of shared parameters between the stages that use them."""

import pytest

from lightning_cyclic.errors import ValidationError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind, Payload, parse
from lightning_cyclic.plan.check.proof import validate
from lightning_cyclic.plan.passes.sums import first_users, later_users
from tests.program_texts import from_text, to_text


def plan_of(num_stages=4, num_workers=4, **numbers):
    numbers = {"num_microbatches": 2, "num_steps": 1, "tied": ((0, 3),)} | numbers
    return make_plan("gpipe", num_stages=num_stages, num_workers=num_workers, **numbers)


def text_of(plan, w, *payloads):
    """Print what a worker does with its backwards, updates and messages of some payloads."""
    kept = [
        a
        for a in plan.programs[w]
        if a.payload in payloads or (a.payload is None and a.kind is not Kind.F)
    ]
    return " ".join(map(str, kept))


def swapped(plan, w, first, second):
    programs = [list(program) for program in from_text(to_text(plan.programs))]
    m, n = programs[w].index(parse(first)), programs[w].index(parse(second))
    programs[w][m], programs[w][n] = programs[w][n], programs[w][m]
    return tuple(map(tuple, programs))


def test_gradients_meet_where_the_parameter_is_used_first():
    plan = plan_of()
    assert text_of(plan, 3, Payload.W) == (
        "3B0@0#0 0SEND_W0>0#0 3B1@0#0 0SEND_W1>0#0 3TELL#0 3UPDATE@1#0"
    )
    assert text_of(plan, 0, Payload.W) == (
        "0RECV_W0<3#0 0B0@0#0 0RECV_W1<3#0 0B1@0#0 0TELL#0 0UPDATE@1#0"
    )
    assert not any(a.payload is Payload.W for w in (1, 2) for a in plan.programs[w])


def test_a_new_version_is_there_before_it_is_read():
    plan = plan_of(num_steps=2)
    assert "0UPDATE@1#0 0SEND_V@1>3#1" in text_of(plan, 0, Payload.V)
    last = [str(a) for a in plan.programs[3]]
    assert last.index("0RECV_V@1<0#1") < last.index("3F0@1#1")
    assert "0RECV_V@2<0#2" in last  # all end with the same weights


def test_a_worker_sends_one_gradient_for_all_of_its_stages():
    plan = plan_of(num_workers=2, tied=((0, 2, 3), (1, 2)))
    assert text_of(plan, 1, Payload.W).split()[:5] == [
        "3B0@0#0", "2B0@0#0", "1SEND_W0>0#0", "0SEND_W0>0#0", "3B1@0#0",
    ]  # fmt: skip


def test_later_stages_add_to_the_gradient_in_the_order_of_backwards():
    plan = plan_of(tied=((0, 1, 3),))
    assert text_of(plan, 0, Payload.W).startswith("0RECV_W0<3#0 0RECV_W0<1#0 0B0@0#0")


def test_gradients_stay_in_their_replica_and_versions_go_to_all():
    plan = plan_of(num_stages=2, num_workers=4, replicas=2, tied=((0, 1),))
    ways = {
        payload: sorted(
            (w, a.peer)
            for w, program in enumerate(plan.programs)
            for a in program
            if a.kind is Kind.SEND and a.payload is payload
        )
        for payload in (Payload.W, Payload.V)
    }
    assert ways == {Payload.W: [(1, 0), (3, 2)], Payload.V: [(0, 1), (0, 3)]}


@pytest.mark.parametrize(
    "numbers",
    [
        {"num_workers": 2, "tied": ((0, 1), (2, 3))},
        {"num_workers": 1, "placement": "single"},
        {"num_workers": 2, "replicas": 2},
    ],
)
def test_stages_of_one_worker_exchange_nothing(numbers):
    plan = plan_of(**numbers)
    payloads = {a.payload for program in plan.programs for a in program}
    assert not payloads & {Payload.W, Payload.V}


def test_replicas_exchange_nothing_either():
    plan = make_plan("lockstep_dp", num_stages=3, num_workers=3, tied=((0, 2),))
    assert not {a.payload for p in plan.programs for a in p} & {Payload.W, Payload.V}


def test_users_of_several_groups():
    plan = plan_of(tied=((0, 3), (0, 1, 3), (1, 2)))
    assert [first_users(plan, j) for j in range(4)] == [(), (0,), (1,), (0,)]
    assert [later_users(plan, j) for j in range(4)] == [(3, 1), (2,), (), ()]
    assert plan.tied == ((0, 1, 3), (0, 3), (1, 2))


@pytest.mark.parametrize(
    ("w", "first", "second"),
    [
        (3, "3B0@0#0", "0SEND_W0>0#0"),  # sent before it is made
        (0, "0RECV_W0<3#0", "0B0@0#0"),  # received after it is added
        (0, "0UPDATE@1#0", "0SEND_V@1>3#1"),  # a version that is not made yet
        (3, "0RECV_V@1<0#1", "3F0@1#1"),  # read before it has come
    ],
)
def test_what_is_out_of_order_is_refused(w, first, second):
    plan = plan_of(num_steps=2)
    with pytest.raises(ValidationError, match="before what it needs|which is not there"):
        validate(plan, swapped(plan, w, first, second))


def test_one_worker_may_read_any_version():
    plan = plan_of(num_workers=1, placement="single", weights="stashed")
    assert not any(a.peer is not None for a in plan.programs[0])
