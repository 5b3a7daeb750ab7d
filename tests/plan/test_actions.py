"""The text of actions and of programs, there and back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cyclic.errors import ActionSyntaxError
from lightning_cyclic.plan.actions import COMPUTE, Action, Kind, Lane, Payload, parse

numbers = st.integers(0, 10_000)


@st.composite
def actions(draw):
    kind = draw(st.sampled_from(Kind))
    is_message = kind in (Kind.SEND, Kind.RECV)
    payload = draw(st.sampled_from(Payload)) if is_message else None
    if payload is Payload.O or kind in (Kind.FETCH, Kind.EVICT):  # which no message carries
        kind, is_message = draw(st.sampled_from([Kind.FETCH, Kind.EVICT, Kind.FREE])), False
        payload = draw(st.sampled_from([Payload.A, Payload.O]))
    what = payload or kind
    has_micro = what in (
        *COMPUTE, Kind.ADD, Payload.A, Payload.G, Payload.S, Payload.H, Payload.R, Payload.W
    )  # fmt: skip
    has_version = what in (Kind.UPDATE, Kind.GATHER, Kind.FREE, Payload.P, Payload.V)
    maybe = what in (*COMPUTE, Payload.X) and draw(st.booleans())
    maybe_micro = what in (Payload.P, Payload.X) and draw(st.booleans())
    return Action(
        kind=kind,
        payload=payload,
        t=draw(numbers),
        j=draw(numbers),
        i=draw(numbers) if has_micro or maybe_micro else None,
        v=draw(numbers) if has_version or maybe else None,
        peer=draw(numbers) if is_message else None,
        lane=draw(st.sampled_from(Lane)),
        s=draw(numbers),
    )


@settings(deadline=None)
@given(actions())
def test_parse_is_the_inverse_of_str_but_for_the_slot(action):
    assert parse(str(action)) == action


def test_texts_as_documented():
    assert parse("2F0@3#4") == Action(kind=Kind.F, j=2, i=0, v=3, t=4)
    assert parse("2SEND_S0>1#4") == Action(
        kind=Kind.SEND, payload=Payload.S, j=2, i=0, peer=1, t=4
    )
    assert parse("2RECV_P@3<0#4") == Action(
        kind=Kind.RECV, payload=Payload.P, j=2, v=3, peer=0, t=4
    )
    assert parse(" 2UPDATE@4#3\n") == Action(kind=Kind.UPDATE, j=2, v=4, t=3)
    assert parse("12FREE@3#4").j == 12
    assert parse("0SEND_W1>3#4") == Action(
        kind=Kind.SEND, payload=Payload.W, j=0, i=1, peer=3, t=4
    )
    assert parse("0RECV_V@3<0#3") == Action(
        kind=Kind.RECV, payload=Payload.V, j=0, v=3, peer=0, t=3
    )
    assert parse("2SEND_D>1#4") == Action(kind=Kind.SEND, payload=Payload.D, j=2, peer=1, t=4)
    assert parse("0RECV_L<3#4") == Action(kind=Kind.RECV, payload=Payload.L, j=0, peer=3, t=4)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0@3#4",  # no stage
        "2F@3#4",  # no micro-batch
        "2F0@3",  # no step
        "2X0@3#4",  # no such kind
        "2SEND_S0<1#4",  # the arrow of a receive
        "2RECV_P@3>0#4",
        "2SEND_Q0>1#4",  # no such payload
        "2SEND_S>1#4",  # a sum without its micro-batch
        "2SEND_P>1#4",  # parameters without their version
        "2SEND_S0@1>1#4",  # a sum has no version
        "2SEND_W>1#4",  # a gradient without its micro-batch
        "2SEND_V>1#4",  # tied parameters without their version
        "2SEND_D0>1#4",  # a batch is of a whole step
        "2RECV_L@1<3#4",  # losses have no version
        "2UPDATE0@4#3",  # an update has no micro-batch
        "2UPDATE#3",
        "2F0@3>1#4",  # a forward has no peer
        "-2F0@3#4",
        "٢F0@3#4",  # digits of another script
        "2F0@3#4 2F1@3#4",
    ],
)
def test_what_is_not_an_action_is_refused_with_examples(text):
    with pytest.raises(ActionSyntaxError, match=r"is not an action; an action is .* write one of"):
        parse(text)
