import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import parse
from lightning_cyclic.simulate import Costs, Event, Lane, Network, simulate
from lightning_cyclic.simulate.engine import summarise

# Two stages: a forward takes 1 s, a backward 2 s, any message 1 s and 0.5 s of latency.
COSTS = Costs(
    forward_s=(1.0, 1.0),
    backward_s=(2.0, 2.0),
    param_bytes=(10.0, 10.0),
    update_s=(0.25, 0.25),
    cut_bytes=(0.0, 10.0),
)
NETWORK = Network(latency_s=0.5, bandwidth_bytes_per_s=10.0)


TIED = make_plan("1f1b", num_stages=2, num_workers=2, tied=((0, 1),))


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


def test_a_partial_sum_is_added_beside_the_backward_that_does_not_need_it():
    late = "0F0@0#0 0F1@0#0 0F2@0#0 0B0@0#0 0SEND_S0>1#0"
    result = times(
        run(late, "0F1@0#0 0B1@0#0 0RECV_S0<0#0 0ADD1#0 0SEND_S1>2#0 1F1@0#0", "0RECV_S1<1#0")
    )
    assert result[1, "1F1@0#0"] == (3.0, 4.0)  # before the sum has come
    assert result[1, "0RECV_S0<0#0"] == (5.5, 6.5)
    assert result[1, "0SEND_S1>2#0"] == (6.5, 7.5)  # own gradient and received sum


def test_a_partial_sum_waits_for_the_own_backward():
    result = times(
        run("0B0@0#0 0SEND_S0>1#0", "0F1@0#0 1F1@0#0 0B1@0#0 0RECV_S0<0#0 0ADD1#0 0SEND_S1>2#0",
            "0RECV_S1<1#0")
    )  # fmt: skip
    assert result[1, "0RECV_S0<0#0"] == (2.5, 3.5)
    assert result[1, "0SEND_S1>2#0"] == (4.0, 5.0)


def test_a_relay_leaves_as_soon_as_the_version_has_come():
    result = times(
        run(
            "0UPDATE@1#0 0SEND_P@1>1#1",
            "1F0@0#0 1B0@0#0 0RECV_P@1<0#1 0SEND_P@1>2#1 0F0@1#1",
            "0RECV_P@1<1#1 0F0@1#1",
        )
    )
    assert result[0, "0UPDATE@1#0"] == (0.0, 0.25)
    assert result[1, "0RECV_P@1<0#1"] == (0.75, 1.75)
    assert result[1, "0SEND_P@1>2#1"] == (1.75, 2.75)  # while the backward runs
    assert result[1, "0F0@1#1"] == (3.0, 4.0)
    assert result[2, "0F0@1#1"] == (3.25, 4.25)


def test_an_owner_sends_what_is_for_one_use_when_it_has_computed_what_comes_before():
    owner = "0F0@0#0 0SEND_P1@0>1#0~weights 1F0@0#0"
    result = times(run(owner, "0GATHER@0#0 0RECV_P1@0<0#0~weights 0F1@0#0"))
    assert result[0, "0SEND_P1@0>1#0~weights"] == (1.0, 2.0)
    assert result[0, "1F0@0#0"] == (1.0, 2.0)  # which waits for no message
    assert result[1, "0F1@0#0"] == (2.5, 3.5)


def test_what_is_for_one_use_leaves_when_its_sender_has_heard_of_room_for_it():
    busy = "1F1@0#0 1B1@0#0 0GATHER@0#0 0RECV_P1@0<0#0~weights 0F1@0#0"
    free = "0GATHER@0#0 0RECV_P2@0<0#0~weights 0F2@0#0"
    result = times(run("0SEND_P1@0>1#0~weights 0SEND_P2@0>2#0~weights", busy, free))
    assert result[1, "0GATHER@0#0"] == (3.0, 3.0)
    assert result[0, "0SEND_P1@0>1#0~weights"] == (3.5, 4.5)
    assert result[0, "0SEND_P2@0>2#0~weights"] == (0.5, 1.5)  # which waits for no other
    assert result[1, "0F1@0#0"] == (5.0, 6.0)


def test_only_the_reader_of_a_version_waits_for_it():
    result = times(run("0B0@0#0 0SEND_S0>1#0 0SEND_P@1>1#0",
                       "0RECV_P@1<0#0 0F0@0#0 0F1@1#0 0RECV_S0<0#0"))  # fmt: skip
    assert result[1, "0F0@0#0"] == (0.0, 1.0)
    assert result[1, "0F1@1#0"] == (1.5, 2.5)


def test_an_update_waits_for_the_total():
    result = times(run("0B0@0#0 0SEND_T>1#0", "0RECV_T<0#0 0UPDATE@1#0 0F0@1#1"))
    assert result[1, "0RECV_T<0#0"] == (2.5, 3.5)
    assert result[1, "0UPDATE@1#0"] == (3.5, 3.75)
    assert result[1, "0F0@1#1"] == (3.75, 4.75)


def test_messages_of_one_payload_leave_in_program_order_and_others_pass_them():
    result = times(
        run("0SEND_P@0>1#0 0B0@0#0 0SEND_S0>1#0 1SEND_S0>1#0 1SEND_P@0>1#0",
            "0RECV_P@0<0#0 1RECV_P@0<0#0 0RECV_S0<0#0 1RECV_S0<0#0")
    )  # fmt: skip
    assert result[0, "0SEND_P@0>1#0"] == (0.0, 1.0)
    assert result[0, "1SEND_P@0>1#0"] == (1.0, 2.0)  # passes the sums
    assert result[0, "0SEND_S0>1#0"] == (2.0, 3.0)
    assert result[0, "1SEND_S0>1#0"] == (3.0, 4.0)  # had nothing to wait for but its turn


def test_a_free_port_serves_first_what_the_program_lists_first():
    result = times(
        run(
            "0SEND_P@0>1#0 0F0@0#0 1SEND_A0>1#0 1SEND_T>1#0",
            "0RECV_P@0<0#0 1RECV_T<0#0 1RECV_A0<0#0",
        )
    )
    assert result[0, "0SEND_P@0>1#0"] == (0.0, 1.0)
    assert result[0, "1SEND_A0>1#0"] == (1.0, 2.0)  # just in time
    assert result[0, "1SEND_T>1#0"] == (2.0, 3.0)  # has been ready since the start


def test_a_port_receives_one_message_at_a_time():
    result = times(run("0SEND_S0>2#0", "1SEND_S0>2#0", "1RECV_S0<1#0 0RECV_S0<0#0"))
    assert result[0, "0SEND_S0>2#0"] == result[1, "1SEND_S0>2#0"] == (0.0, 1.0)
    assert result[2, "1RECV_S0<1#0"] == (0.5, 1.5)
    assert result[2, "0RECV_S0<0#0"] == (1.5, 2.5)


def test_relayed_buffers_hold_up_the_forward_that_reads_them():
    result = times(run("0F0@0#0 0SEND_R1>1#0 1F0@0#0", "0RECV_R1<0#0 0F1@0#0"))
    assert result[1, "0F1@0#0"] == (1.5, 2.5)  # buffers of no bytes cost a latency


def test_a_batch_takes_a_latency_to_the_others():
    result = times(run("1SEND_D>1#0 0F0@0#0", "1RECV_D<0#0 1F0@0#0"))
    assert result[0, "0F0@0#0"] == (0.0, 1.0)
    assert result[1, "1F0@0#0"] == (0.5, 1.5)


def test_losses_leave_after_the_last_forward_and_hold_up_nobody():
    result = times(
        run(
            "0F0@0#0 0F1@0#0 0RECV_L<1#0 0UPDATE@1#0",
            "1F0@0#0 1F1@0#0 0SEND_L>0#0 1B0@0#0",
        )
    )
    assert result[1, "0SEND_L>0#0"] == (2.0, 2.0)
    assert result[0, "0RECV_L<1#0"] == (2.5, 2.5)
    assert result[0, "0UPDATE@1#0"] == (2.0, 2.25)


def test_tied_gradients_leave_after_their_backward_and_hold_up_the_first_stage():
    result = times(
        run(
            "1B0@0#0 0SEND_W0>1#0 1B1@0#0 0SEND_W1>1#0",
            "0RECV_W0<0#0 0B0@0#0 0RECV_W1<0#0 0B1@0#0",
            plan=TIED,
        )
    )
    assert result[0, "0SEND_W0>1#0"] == (2.0, 2.0)  # no bytes are known of them
    assert result[1, "0B0@0#0"] == (2.5, 4.5)
    assert result[1, "0B1@0#0"] == (4.5, 6.5)


def test_tied_gradients_of_several_workers_are_all_waited_for():
    result = times(
        run(
            "1B0@0#0 0SEND_W0>2#0",
            "1F0@0#0 1B0@0#0 0SEND_W0>2#0",
            "0RECV_W0<1#0 0RECV_W0<0#0 0B0@0#0",
            plan=TIED,
        )
    )
    assert result[2, "0B0@0#0"] == (3.5, 5.5)


def test_a_tied_version_follows_its_update_and_is_waited_for():
    programs = "0UPDATE@1#0 0SEND_V@1>1#1", "1F0@0#0 1F1@0#0 0RECV_V@1<0#1 1F0@1#1"
    result = times(run(*programs, plan=TIED))
    assert result[0, "0SEND_V@1>1#1"] == (0.25, 0.25)
    assert result[1, "1F0@1#1"] == (2.0, 3.0)
    programs = "0B0@0#0 0UPDATE@1#0 0SEND_V@1>1#1", "0RECV_V@1<0#1 1F0@1#1"
    late = times(run(*programs, plan=TIED))
    assert late[1, "1F0@1#1"] == (2.75, 3.75)


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
