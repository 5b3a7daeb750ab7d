"""What travels: activations, sums, versions, batches and losses, tied gradients."""

from collections import defaultdict

import pytest

from lightning_cyclic.plan import PRESETS, make_plan, programs_of
from lightning_cyclic.plan.actions import COMPUTE, Kind, Lane, Payload
from lightning_cyclic.plan.passes.messages import Channel, channel_of
from lightning_cyclic.plan.roles import first_users, later_users
from tests.harness.programs import sent, shaped


def traffic(plan):
    sent, received = defaultdict(list), defaultdict(list)
    for w, program in enumerate(programs_of(plan)):
        for a in program:
            if a.kind is Kind.SEND:
                sent[channel_of(a, w)].append((a.payload, a.t, a.i, a.j, a.v))
            elif a.kind is Kind.RECV:
                received[channel_of(a, w)].append((a.payload, a.t, a.i, a.j, a.v))
    return sent, received


def test_neighbouring_stages_on_one_worker_exchange_nothing():
    plan = make_plan("gpipe", num_stages=4, num_workers=2, num_microbatches=2, num_steps=1)
    sent, _ = traffic(plan)
    assert dict(sent) == {
        Channel(0, 1, Lane.MAIN): [
            (Payload.D, 0, None, 2, None), (Payload.A, 0, 0, 2, None), (Payload.A, 0, 1, 2, None)
        ],
        Channel(1, 0, Lane.MAIN): [
            (Payload.G, 0, 0, 1, None), (Payload.L, 0, None, 0, None), (Payload.G, 0, 1, 1, None)
        ],
    }  # fmt: skip


@pytest.mark.parametrize("preset", ["cyclic_dp", "lockstep_dp", "cyclic_mp"])
def test_sums_travel_in_the_order_of_micro_batches(preset):
    plan = make_plan(preset, num_stages=3, num_workers=3, num_steps=1)
    for j in range(3):
        hops = sorted(
            (a.i, w, a.peer)
            for w, program in enumerate(programs_of(plan))
            for a in program
            if a.kind is Kind.SEND and a.payload is Payload.S and a.j == j
        )
        for i, source, target in hops:
            assert (source, target) == (plan.worker_of(i, j), plan.worker_of(i + 1, j))


PIPELINED = [name for name, preset in PRESETS.items() if preset.placement == "pipelined"]


def of(plan, payload):
    return [(t, j, w, peer) for t, j, _, w, peer in sent(plan, payload)]


def test_who_sends_to_whom():
    plan = make_plan("gpipe", num_stages=5, num_workers=6, replicas=2, num_steps=2)
    assert of(plan, Payload.D) == [
        (t, j, w, w + hop) for t in (0, 1) for j, hop in ((2, 1), (4, 2)) for w in (0, 3)
    ]
    assert of(plan, Payload.L) == [
        (t, j, w, w - hop) for t in (0, 1) for j, hop in ((0, 2), (2, 1)) for w in (2, 5)
    ]


@pytest.mark.parametrize("preset", PIPELINED)
@pytest.mark.parametrize(("num_stages", "num_workers"), [(6, 2), (6, 3), (5, 5)])
def test_the_batch_comes_first_and_losses_leave_behind_the_last_forward(
    preset, num_stages, num_workers
):
    plan = make_plan(preset, **shaped(preset, num_stages, num_workers), num_steps=3)
    num_workers, teller = plan.num_workers, plan.worker_of(0, plan.num_stages - 1)
    for w, program in enumerate(programs_of(plan)):
        for t in range(3):
            compute = [n for n, a in enumerate(program) if a.t == t and a.kind in COMPUTE]
            batches = [n for n, a in enumerate(program) if a.t == t and a.payload is Payload.D]
            losses = [n for n, a in enumerate(program) if a.t == t and a.payload is Payload.L]
            assert len(batches) == (num_workers - 1 if w == 0 else 1)
            assert max(batches) < compute[0]
            assert len(losses) == (num_workers - 1 if w == teller else 1)
            if w == teller:
                last = plan.num_stages - 1
                ends = [n for n in compute if program[n].j == last and program[n].kind is Kind.F]
                assert min(losses) > max(ends)
            else:  # posted early, behind the batch
                assert min(losses) > max(batches)


def test_places_have_the_batch_from_who_begins_the_step():
    plan = make_plan("cyclic_mp", num_stages=3, num_workers=6, num_microbatches=4, num_steps=4)
    for t in range(4):
        begins = plan.worker_of(0, 0, t)
        found = [(w, peer) for step, _, w, peer in of(plan, Payload.D) if step == t]
        assert sorted(found) == [(begins, w) for w in range(6) if w != begins]


@pytest.mark.parametrize(
    ("preset", "numbers"),
    [
        ("cyclic_dp", {}), ("cyclic_zero", {}), ("lockstep_dp", {}),
        ("gpipe", {"num_workers": 2, "replicas": 2}),
    ],
)  # fmt: skip
def test_a_worker_that_runs_all_stages_needs_neither(preset, numbers):
    plan = make_plan(preset, **{"num_stages": 3, "num_workers": 3} | numbers)
    assert of(plan, Payload.D) == of(plan, Payload.L) == []


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
    assert sorted(m[1:] for m in sent(plan, Payload.P)) == [
        (j, v, plan.owner(j), plan.owner(j) + 2 * replica)
        for j in range(3)
        for v in (1, 2)
        for replica in (1, 2)
    ]


def test_tied_parameters_go_to_those_who_do_not_hold_their_stage():
    plan = make_plan(
        "1f1b", num_stages=4, num_workers=8, replicas=2, num_steps=1, tied=((0, 2, 3), (1, 3))
    )
    assert [m[1:] for m in sent(plan, Payload.V)] == [
        (0, 1, 0, 2), (0, 1, 0, 3), (0, 1, 0, 6), (0, 1, 0, 7), (1, 1, 1, 3), (1, 1, 1, 7),
    ]  # fmt: skip


@pytest.mark.parametrize("weights", ["freshest", "stashed"])
def test_places_receive_what_they_skip(weights):
    plan = make_plan("cyclic_mp", num_stages=3, num_workers=6, num_steps=3, weights=weights)
    assert sorted(m[1:3] for m in sent(plan, Payload.P)) == [
        (j, v) for j in range(2) for v in (1, 2, 3) for _ in range(2 - j)
    ]


def plan_of(num_stages=4, num_workers=4, **numbers):
    numbers = {"num_microbatches": 2, "num_steps": 1, "tied": ((0, 3),)} | numbers
    return make_plan("gpipe", num_stages=num_stages, num_workers=num_workers, **numbers)


def text_of(plan, w, *payloads):
    """Print what a worker does with its backwards, updates and messages of some payloads."""
    kept = [
        a
        for a in programs_of(plan)[w]
        if a.payload in payloads or (a.payload is None and a.kind is not Kind.F)
    ]
    return " ".join(map(str, kept))


def test_gradients_meet_where_the_parameter_is_used_first():
    plan = plan_of()
    assert text_of(plan, 3, Payload.W) == (
        "3B0@0#0 0SEND_W0>0#0 3B1@0#0 0SEND_W1>0#0 3TELL#0 3UPDATE@1#0"
    )
    assert text_of(plan, 0, Payload.W) == (
        "0RECV_W0<3#0 0B0@0#0 0RECV_W1<3#0 0B1@0#0 0TELL#0 0UPDATE@1#0"
    )
    assert not any(a.payload is Payload.W for w in (1, 2) for a in programs_of(plan)[w])


def test_a_new_version_is_there_before_it_is_read():
    plan = plan_of(num_steps=2)
    assert "0UPDATE@1#0 0SEND_V@1>3#1" in text_of(plan, 0, Payload.V)
    last = [str(a) for a in programs_of(plan)[3]]
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
        payload: [row[3:] for row in sent(plan, payload)] for payload in (Payload.W, Payload.V)
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
    payloads = {a.payload for program in programs_of(plan) for a in program}
    assert not payloads & {Payload.W, Payload.V}


def test_replicas_exchange_nothing_either():
    plan = make_plan("lockstep_dp", num_stages=3, num_workers=3, tied=((0, 2),))
    assert not {a.payload for p in programs_of(plan) for a in p} & {Payload.W, Payload.V}


def test_users_of_several_groups():
    plan = plan_of(tied=((0, 3), (0, 1, 3), (1, 2)))
    assert [first_users(plan, j) for j in range(4)] == [(), (0,), (1,), (0,)]
    assert [later_users(plan, j) for j in range(4)] == [(3, 1), (2,), (), ()]
    assert plan.tied == ((0, 1, 3), (0, 3), (1, 2))


def test_one_worker_may_read_any_version():
    plan = plan_of(num_workers=1, placement="single", weights="stashed")
    assert not any(a.peer is not None for a in programs_of(plan)[0])
