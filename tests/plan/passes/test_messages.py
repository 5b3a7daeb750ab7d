"""Messages are received in the order of the sends, and no later than they are needed."""

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import parse
from lightning_cyclic.plan.passes.messages import in_order_of_sends


def ordered(*programs):
    """Put programs given as text in order; return them as text."""
    parsed = tuple(tuple(map(parse, program.split())) for program in programs)
    return [" ".join(map(str, program)) for program in in_order_of_sends(parsed)]


def test_what_was_sent_before_is_taken_before():
    sender = "0SEND_W0>1#0 1SEND_W0>1#0 0SEND_W1>1#0"
    receiver = "1RECV_W0<0#0 1B0#0 0RECV_W0<0#0 0B0#0 0RECV_W1<0#0 0B1#0"
    assert ordered(sender, receiver) == [
        sender,
        "0RECV_W0<0#0 1RECV_W0<0#0 1B0#0 0B0#0 0RECV_W1<0#0 0B1#0",
    ]


def test_other_payloads_and_other_senders_have_an_order_of_their_own():
    programs = (
        "0SEND_W0>2#0 0SEND_S0>2#0",
        "0SEND_W0>2#0",
        "0RECV_S0<0#0 0RECV_W0<1#0 0RECV_W0<0#0",
    )
    assert ordered(*programs) == list(programs)


def test_a_receive_that_is_early_takes_the_slot_of_its_place():
    sender = tuple(map(parse, ["0SEND_T>1#0", "1SEND_T>1#0"]))
    program = (parse("1RECV_T<0#0"), parse("0RECV_T<0#0"))
    late = tuple(type(a)(**{**{f: getattr(a, f) for f in a.__slots__}, "s": 7}) for a in program)
    assert [a.s for a in in_order_of_sends((sender, late))[1]] == [7, 7]


def test_totals_are_received_in_the_order_of_backwards():
    plan = make_plan(
        "cyclic_dp_v1", num_stages=3, num_workers=2, num_steps=1, sharding="optimizer"
    )
    tail = [str(a) for a in plan.programs[0]][-9:]
    assert tail == [
        "2RECV_T<1#0",
        "1RECV_T<1#0",
        "0RECV_T<1#0",
        "0UPDATE@1#0",
        "0SEND_P@1>1#2",
        "1UPDATE@1#0",
        "1SEND_P@1>1#2",
        "2UPDATE@1#0",
        "2SEND_P@1>1#2",
    ]
