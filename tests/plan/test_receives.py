"""Where receives are posted, and what messages belong to."""

import pytest

from lightning_cyclic.plan import make_plan, program_of, programs_of
from lightning_cyclic.plan.actions import Lane, Payload, parse
from lightning_cyclic.plan.passes.messages import (
    Channel,
    begins_of_steps,
    channel_of,
    ring_of,
    step_of,
)
from lightning_cyclic.plan.passes.receives import receives

PIPELINE = make_plan("1f1b", num_stages=4, num_workers=4, tied=((0, 3),))
REPLICAS = make_plan("cyclic_dp", num_stages=2, num_workers=2)


def posted(plan, *programs):
    """Put receives of programs given as text where they are posted; return them as text."""
    parsed = tuple(tuple(map(parse, program.split())) for program in programs)
    return [" ".join(map(str, program)) for program in receives(plan, parsed)]


def test_a_message_is_posted_behind_the_reader_of_the_last_of_its_kind():
    sender = "1SEND_A0>1#0 1SEND_A1>1#0 1SEND_A2>1#0"
    receiver = "1RECV_A0<0#0 1F0#0 1B0#0 1RECV_A1<0#0 1F1#0 1B1#0 1RECV_A2<0#0 1F2#0"
    assert posted(PIPELINE, sender, receiver)[1] == (
        "1RECV_A0<0#0 1F0#0 1RECV_A1<0#0 1B0#0 1F1#0 1RECV_A2<0#0 1B1#0 1F2#0"
    )


def test_no_message_is_posted_before_its_step_begins_or_before_its_batch():
    sender = "1SEND_D>1#0 1SEND_A0>1#0 1SEND_D>1#1 1SEND_A0>1#1"
    receiver = "1RECV_D<0#0 1RECV_A0<0#0 1F0#0 1B0#0 1RECV_D<0#1 1RECV_A0<0#1 1F0#1"
    assert posted(PIPELINE, sender, receiver)[1] == (
        "1RECV_D<0#0 1RECV_A0<0#0 1F0#0 1B0#0 1RECV_D<0#1 1RECV_A0<0#1 1F0#1"
    )


def test_what_was_sent_before_is_posted_before_whatever_it_carries():
    sender = "0SEND_V@1>3#1 1SEND_W0>3#0"
    receiver = "1RECV_W0<0#0 1B0#0 0RECV_V@1<0#1 3F0@1#1"
    assert posted(PIPELINE, sender, "", "", receiver)[3] == (
        "0RECV_V@1<0#1 1RECV_W0<0#0 1B0#0 3F0@1#1"
    )


def test_other_senders_have_an_order_of_their_own():
    programs = "0SEND_W0>2#0", "0SEND_W0>2#0", "0RECV_W0<1#0 0RECV_W0<0#0 0B0#0"
    assert posted(PIPELINE, *programs) == list(programs)


def test_versions_of_replicas_have_two_buffers():
    sender = "0SEND_P@1>1#1 0SEND_P@2>1#2 0SEND_P@3>1#3"
    receiver = (
        "0F1@0#0 0B1@0#0 0RECV_P@1<0#1 0F1@1#1 0B1@1#1 0RECV_P@2<0#2 0F1@2#2 0B1@2#2 "
        "0RECV_P@3<0#3 0F1@3#3"
    )
    assert posted(REPLICAS, sender, receiver)[1] == (
        "0RECV_P@1<0#1 0F1@0#0 0B1@0#0 0RECV_P@2<0#2 0F1@1#1 0B1@1#1 0RECV_P@3<0#3 0F1@2#2 "
        "0B1@2#2 0F1@3#3"
    )


def test_nothing_is_posted_ahead_of_its_step():
    for preset in ("cyclic_dp", "cyclic_dp_v1", "1f1b", "pipedream", "cyclic_mp"):
        plan = make_plan(preset, num_stages=4, num_workers=4, num_steps=5, relayed=[1])
        for w in range(4):
            for t in range(5):
                assert all(step_of(a) <= t for a in program_of(plan).step(w, t))
            begins = begins_of_steps(programs_of(plan)[w])
            assert begins == sorted(begins)


def test_totals_are_received_in_the_order_of_backwards():
    plan = make_plan(
        "cyclic_dp_v1", num_stages=3, num_workers=2, num_steps=1, sharding="optimizer"
    )
    totals = [str(a) for a in programs_of(plan)[0] if a.payload is Payload.T]
    assert totals == [f"{j}RECV_T<1#0~sums" for j in (2, 1, 0)]
    assert [str(a) for a in programs_of(plan)[0]][-6:] == [
        "0UPDATE@1#0", "1UPDATE@1#0", "2UPDATE@1#0",
        "0SEND_P@1>1#2", "1SEND_P@1>1#2", "2SEND_P@1>1#2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "t"),
    [
        ("2F0@3#4", 4),
        ("2UPDATE@5#4", 4),
        ("2SEND_P@3>1#6", 2),  # a version is that of its update
        ("2SEND_P0@3>1#6", 6),  # but where it is fetched for one use
        ("0RECV_V@3<1#4", 2),
        ("2SEND_R0>1#4", 3),  # left by the last micro-batch of the step before
        ("2SEND_R1>1#4", 4),
    ],
)
def test_a_message_belongs_to_the_step_without_which_it_would_not_be(text, t):
    assert step_of(parse(text)) == t


def test_both_ends_of_a_message_name_one_channel_and_ring():
    send, receive = parse("2SEND_S0>1#4~sums"), parse("2RECV_S0<0#4~sums")
    assert channel_of(send, 0) == channel_of(receive, 1) == Channel(0, 1, Lane.SUMS)
    assert ring_of(send, 0) == ring_of(receive, 1)
    assert channel_of(parse("0SEND_K>1#4"), 0).is_control


def test_begins_of_steps():
    program = tuple(map(parse, ["0F0#0", "0F0#2", "0B0#0", "0F0#3"]))
    assert begins_of_steps(program) == [0, 1, 1, 3]
