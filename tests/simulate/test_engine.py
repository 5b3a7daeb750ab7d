import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import parse
from lightning_cyclic.simulate import Costs, Event, Lane, Network, simulate
from lightning_cyclic.simulate.engine import summarise

# Three stages: a forward takes 1 s, a backward 2 s, any message 1 s and 0.5 s of latency.
COSTS = Costs(
    forward_s=(1.0, 1.0, 1.0),
    backward_s=(2.0, 2.0, 2.0),
    param_bytes=(10.0, 10.0, 10.0),
    update_s=(0.25, 0.25, 0.25),
    cut_bytes=(0.0, 10.0, 10.0),
)
NETWORK = Network(latency_s=0.5, bandwidth_bytes_per_s=10.0)


TIED = make_plan("1f1b", num_stages=3, num_workers=3, tied=((0, 1, 2),))


def run(*programs, network=NETWORK, plan=None):
    """Return the simulation of programs given as text, one action after the other."""
    return simulate([[parse(text) for text in program.split()] for program in programs],
                    COSTS, network, plan)  # fmt: skip


def times(result):
    """Return start and end of each action, by worker and text."""
    return {(e.worker, str(e.action)): (e.start_s, e.end_s) for e in result.events}


def test_activations_there_and_gradients_back():
    result = run(
        "0F0@0#0 1SEND_A0>1#0 0RECV_G0<1#0 0B0@0#0",
        "1RECV_A0<0#0 1F0@0#0 1B0@0#0 0SEND_G0>0#0",
    )
    assert times(result) == {
        (0, "0F0@0#0"): (0.0, 1.0),
        (0, "1SEND_A0>1#0"): (1.0, 2.0),
        (1, "1RECV_A0<0#0"): (1.5, 2.5),
        (1, "1F0@0#0"): (2.5, 3.5),
        (1, "1B0@0#0"): (3.5, 5.5),
        (1, "0SEND_G0>0#0"): (5.5, 6.5),
        (0, "0RECV_G0<1#0"): (6.0, 7.0),
        (0, "0B0@0#0"): (7.0, 9.0),
    }
    assert result.makespan_s == 9.0
    assert result.busy_s == (3.0, 3.0)


ROOM = "0GATHER@0#0 0RECV_P{0}@0<0#0~weights 0F{0}@0#0"


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        # a sum is added beside the backward that does not need it; the next forward does not wait
        (("0F0@0#0 0F1@0#0 0F2@0#0 0B0@0#0 0SEND_S0>1#0",
          "0F1@0#0 0B1@0#0 0RECV_S0<0#0 0ADD1#0 0SEND_S1>2#0 1F1@0#0", "0RECV_S1<1#0"),
         {(1, "1F1@0#0"): (3.0, 4.0), (1, "0RECV_S0<0#0"): (5.5, 6.5),
          (1, "0SEND_S1>2#0"): (6.5, 7.5)}),
        # a sum waits for the own backward
        (("0B0@0#0 0SEND_S0>1#0", "0F1@0#0 1F1@0#0 0B1@0#0 0RECV_S0<0#0 0ADD1#0 0SEND_S1>2#0",
          "0RECV_S1<1#0"),
         {(1, "0RECV_S0<0#0"): (2.5, 3.5), (1, "0SEND_S1>2#0"): (4.0, 5.0)}),
        # a relay leaves as soon as the version has come, while the backward runs
        (("0UPDATE@1#0 0SEND_P@1>1#1",
          "1F0@0#0 1B0@0#0 0RECV_P@1<0#1 0SEND_P@1>2#1 0F0@1#1", "0RECV_P@1<1#1 0F0@1#1"),
         {(0, "0UPDATE@1#0"): (0.0, 0.25), (1, "0RECV_P@1<0#1"): (0.75, 1.75),
          (1, "0SEND_P@1>2#1"): (1.75, 2.75), (1, "0F0@1#1"): (3.0, 4.0),
          (2, "0F0@1#1"): (3.25, 4.25)}),
        # an owner sends what is for one use when it has computed what comes before, and waits not
        (("0F0@0#0 0SEND_P1@0>1#0~weights 1F0@0#0", ROOM.format(1)),
         {(0, "0SEND_P1@0>1#0~weights"): (1.0, 2.0), (0, "1F0@0#0"): (1.0, 2.0),
          (1, "0F1@0#0"): (2.5, 3.5)}),
        # what is for one use leaves when its sender has heard of room for it, and no other waits
        (("0SEND_P1@0>1#0~weights 0SEND_P2@0>2#0~weights", f"1F1@0#0 1B1@0#0 {ROOM.format(1)}",
          ROOM.format(2)),
         {(1, "0GATHER@0#0"): (3.0, 3.0), (0, "0SEND_P1@0>1#0~weights"): (3.5, 4.5),
          (0, "0SEND_P2@0>2#0~weights"): (0.5, 1.5), (1, "0F1@0#0"): (5.0, 6.0)}),
        # only the reader of a version waits for it
        (("0B0@0#0 0SEND_S0>1#0 0SEND_P@1>1#0", "0RECV_P@1<0#0 0F0@0#0 0F1@1#0 0RECV_S0<0#0"),
         {(1, "0F0@0#0"): (0.0, 1.0), (1, "0F1@1#0"): (1.5, 2.5)}),
        # an update waits for the total
        (("0B0@0#0 0SEND_T>1#0", "0RECV_T<0#0 0UPDATE@1#0 0F0@1#1"),
         {(1, "0RECV_T<0#0"): (2.5, 3.5), (1, "0UPDATE@1#0"): (3.5, 3.75),
          (1, "0F0@1#1"): (3.75, 4.75)}),
        # messages of one payload leave in program order, and others pass them
        (("0SEND_P@0>1#0 0B0@0#0 0SEND_S0>1#0 1SEND_S0>1#0 1SEND_P@0>1#0",
          "0RECV_P@0<0#0 1RECV_P@0<0#0 0RECV_S0<0#0 1RECV_S0<0#0"),
         {(0, "0SEND_P@0>1#0"): (0.0, 1.0), (0, "1SEND_P@0>1#0"): (1.0, 2.0),
          (0, "0SEND_S0>1#0"): (2.0, 3.0), (0, "1SEND_S0>1#0"): (3.0, 4.0)}),
        # a free port serves first what the program lists first, of all that is ready
        (("0SEND_P@0>1#0 0F0@0#0 1SEND_A0>1#0 1SEND_T>1#0",
          "0RECV_P@0<0#0 1RECV_T<0#0 1RECV_A0<0#0"),
         {(0, "0SEND_P@0>1#0"): (0.0, 1.0), (0, "1SEND_A0>1#0"): (1.0, 2.0),
          (0, "1SEND_T>1#0"): (2.0, 3.0)}),
        # a port receives one message at a time
        (("0SEND_S0>2#0", "1SEND_S0>2#0", "1RECV_S0<1#0 0RECV_S0<0#0"),
         {(0, "0SEND_S0>2#0"): (0.0, 1.0), (1, "1SEND_S0>2#0"): (0.0, 1.0),
          (2, "1RECV_S0<1#0"): (0.5, 1.5), (2, "0RECV_S0<0#0"): (1.5, 2.5)}),
        # relayed buffers hold up the forward that reads them: of no bytes, by a latency
        (("0F0@0#0 0SEND_R1>1#0 1F0@0#0", "0RECV_R1<0#0 0F1@0#0"), {(1, "0F1@0#0"): (1.5, 2.5)}),
        # a batch takes a latency to the others
        (("1SEND_D>1#0 0F0@0#0", "1RECV_D<0#0 1F0@0#0"),
         {(0, "0F0@0#0"): (0.0, 1.0), (1, "1F0@0#0"): (0.5, 1.5)}),
        # losses leave after the last forward and hold up nobody
        (("0F0@0#0 0F1@0#0 0RECV_L<1#0 0UPDATE@1#0", "1F0@0#0 1F1@0#0 0SEND_L>0#0 1B0@0#0"),
         {(1, "0SEND_L>0#0"): (2.0, 2.0), (0, "0RECV_L<1#0"): (2.5, 2.5),
          (0, "0UPDATE@1#0"): (2.0, 2.25)}),
        # tied gradients leave after their backward and hold up the first stage
        (("0RECV_W0<1#0 0B0@0#0 0RECV_W1<1#0 0B1@0#0",
          "1B0@0#0 0SEND_W0>0#0 1B1@0#0 0SEND_W1>0#0"),
         {(1, "0SEND_W0>0#0"): (2.0, 2.0), (0, "0B0@0#0"): (2.5, 4.5),
          (0, "0B1@0#0"): (4.5, 6.5)}),
        # those of several workers are all waited for
        (("0RECV_W0<2#0 0RECV_W0<1#0 0B0@0#0", "1B0@0#0 0SEND_W0>0#0",
          "1F1@0#0 2B0@0#0 0SEND_W0>0#0"), {(0, "0B0@0#0"): (3.5, 5.5)}),
        # a tied version follows its update and is waited for
        (("0UPDATE@1#0 0SEND_V@1>1#1", "1F0@0#0 1F1@0#0 0RECV_V@1<0#1 1F0@1#1"),
         {(0, "0SEND_V@1>1#1"): (0.25, 0.25), (1, "1F0@1#1"): (2.0, 3.0)}),
        (("0B0@0#0 0UPDATE@1#0 0SEND_V@1>1#1", "0RECV_V@1<0#1 1F0@1#1"),
         {(1, "1F0@1#1"): (2.75, 3.75)}),
    ],
)  # fmt: skip
def test_what_waits_for_what(programs, expected):
    is_tied = any("_W" in text or "_V" in text for text in programs)
    result = times(run(*programs, plan=TIED if is_tied else None))
    assert {key: result[key] for key in expected} == expected


def test_lanes_of_events():
    lanes = {event.lane for event in run("0B0@0#0 0SEND_T>1#0", "0RECV_T<0#0").events}
    assert lanes == {Lane.COMPUTE, Lane.SEND, Lane.RECEIVE}


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (("0SEND_T>1#0", "0F0@0#0"), r"0SEND_T>1#0 of worker 0 is sent and never received"),
        (("0F0@0#0", "0RECV_T<0#0"), r"0RECV_T<0#0 of worker 1 is received and never sent"),
        (
            ("0RECV_P@1<1#0 0SEND_P@1>1#0", "0RECV_P@1<0#0 0SEND_P@1>0#0"),
            r"worker 0 waits for ever before 0RECV_P@1<1#0",
        ),
    ],
)
def test_programs_that_cannot_run_are_refused(programs, message):
    with pytest.raises(PlanError, match=message):
        run(*programs)


def test_no_actions_take_no_time():
    assert simulate([[], []], COSTS).makespan_s == 0.0


def test_a_message_inside_a_host_is_faster():
    near = Network(latency_s=0.25, bandwidth_bytes_per_s=20.0)
    network = Network(latency_s=0.5, bandwidth_bytes_per_s=10.0, hosts=(0, 0, 1), inside=near)
    result = run(
        "0F0@0#0 1SEND_A0>1#0 1SEND_A0>2#0",
        "1RECV_A0<0#0",
        "1RECV_A0<0#0",
        network=network,
    )
    got = times(result)
    assert got[0, "1SEND_A0>1#0"] == (1.0, 1.5)
    assert got[1, "1RECV_A0<0#0"] == (1.25, 1.75)
    assert got[0, "1SEND_A0>2#0"] == (1.0, 2.0)  # through another port
    assert got[2, "1RECV_A0<0#0"] == (1.5, 2.5)


def compute(worker, text, start_s, end_s):
    return Event(worker, Lane.COMPUTE, parse(text), start_s, end_s)


def test_the_first_and_last_steps_do_not_count():
    # Steps end at 10, 14, 18, 19; the window is from the end of step 1 to that of step 2.
    ends = [10.0, 14.0, 18.0, 19.0]
    events = [compute(0, f"0F0@0#{t}", end - 1, end) for t, end in enumerate(ends)]
    result = summarise(events, 1)
    assert result.step_s == 4.0
    assert result.bubble == (0.75,)
    assert result.makespan_s == 19.0
    assert result.busy_s == (4.0,)


def test_the_slowest_worker_sets_the_step():
    events = [compute(w, f"0F0@0#{t}", t * (w + 1), (t + 1) * (w + 1))
              for w in range(2) for t in range(2)]  # fmt: skip
    result = summarise(events, 2)
    assert result.step_s == 2.0
    assert result.bubble == (0.5, 0.0)


def test_a_message_behind_the_last_compute_counts_to_the_makespan():
    message = Event(0, Lane.SEND, parse("0SEND_T>1#0"), 1.0, 5.0)
    result = summarise([compute(0, "0B0@0#0", 0.0, 1.0), message], 1)
    assert (result.makespan_s, result.step_s) == (5.0, 1.0)
