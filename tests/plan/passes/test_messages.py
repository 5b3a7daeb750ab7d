"""Messages: to which step they belong, and what they share."""

import pytest

from lightning_cyclic.plan.actions import Lane, parse
from lightning_cyclic.plan.passes.messages import (
    Channel,
    begins_of_steps,
    channel_of,
    ring_of,
    step_of,
)


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
