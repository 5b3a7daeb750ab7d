"""parameters brings versions to all who read them, in the order in which they need them."""

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Kind, Payload


def messages(plan, payload):
    """List stage, version, from and to of the sends of a payload."""
    return sorted(
        (a.j, a.v, w, a.peer)
        for w, program in enumerate(plan.programs)
        for a in program
        if a.kind is Kind.SEND and a.payload is payload
    )


def test_parameters_travel_in_the_order_of_need():
    plan = make_plan("cyclic_dp", num_stages=4, num_workers=4)
    assert [plan.chain(j) for j in range(4)] == [
        (3, 0, 1, 2),
        (2, 3, 0, 1),
        (1, 2, 3, 0),
        (0, 1, 2, 3),
    ]
    late = make_plan("cyclic_dp", num_stages=4, num_workers=4, sharding="none")
    assert [late.chain(j) for j in range(4)] == [
        (3, 0, 1, 2),
        (3, 2, 0, 1),
        (3, 1, 2, 0),
        (3, 0, 1, 2),
    ]


def test_an_owner_sends_to_the_same_stage_of_every_replica():
    plan = make_plan("gpipe", num_stages=3, num_workers=6, replicas=3, num_steps=2)
    assert [plan.owner(j) for j in range(3)] == [0, 0, 1]
    assert messages(plan, Payload.P) == [
        (j, v, plan.owner(j), plan.owner(j) + 2 * replica)
        for j in range(3)
        for v in (1, 2)
        for replica in (1, 2)
    ]


def test_tied_parameters_go_to_those_who_do_not_hold_their_stage():
    plan = make_plan(
        "1f1b", num_stages=4, num_workers=8, replicas=2, num_steps=1, tied=((0, 2, 3), (1, 3))
    )
    assert messages(plan, Payload.V) == [
        (0, 1, 0, 2), (0, 1, 0, 3), (0, 1, 0, 6), (0, 1, 0, 7), (1, 1, 1, 3), (1, 1, 1, 7),
    ]  # fmt: skip


@pytest.mark.parametrize("weights", ["freshest", "stashed"])
def test_places_receive_what_they_skip(weights):
    plan = make_plan("cyclic_mp", num_stages=3, num_workers=6, num_steps=3, weights=weights)
    assert [m[:2] for m in messages(plan, Payload.P)] == [
        (j, v) for j in range(2) for v in (1, 2, 3) for _ in range(2 - j)
    ]
