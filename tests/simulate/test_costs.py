import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan, programs_of
from lightning_cyclic.plan.actions import Kind, Payload, parse
from lightning_cyclic.simulate import Costs, Lane, Network, simulate

COSTS = Costs(
    forward_s=(1.0, 2.0),
    backward_s=(3.0, 4.0),
    param_bytes=(5.0, 6.0),
    update_s=(7.0, 8.0),
    cut_bytes=(0.0, 9.0),
    buffer_bytes=(10.0, 11.0),
    tied_bytes=(12.0, 0.0),
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1F0@0#0", 2.0), ("0B0@0#0", 3.0), ("1UPDATE@1#0", 8.0), ("0GATHER@0#0", 0.0)],
)
def test_seconds_of_compute(text, seconds):
    assert COSTS.compute_s(parse(text)) == seconds


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1SEND_A0>1#0", 9.0), ("0RECV_G0<1#0", 9.0),  # both over the cut before stage 1
        ("0SEND_S0>1#0", 5.0), ("1SEND_T>0#0", 6.0), ("0RECV_P@1<1#0", 5.0),
        ("1SEND_R1>1#0", 11.0), ("0SEND_W1>1#0", 12.0), ("0RECV_V@1<1#0", 12.0),
        ("1SEND_D>1#0", 0.0), ("0SEND_L>0#0", 0.0),
    ],
)  # fmt: skip
def test_bytes_of_messages(text, num_bytes):
    assert COSTS.message_bytes(parse(text)) == num_bytes


def test_a_codec_is_counted_where_gradients_are_and_nowhere_else():
    costs = Costs.even(2, compute_s=3.0, model_bytes=8000.0)
    small = costs.compressed(lambda n: n / 10)  # of 1000 elements of each stage
    for text in ("0SEND_H0>1#0", "1RECV_H1<1#0"):
        assert costs.message_bytes(parse(text)) == 4000.0
        assert small.message_bytes(parse(text)) == 100.0
    assert small.message_bytes(parse("0RECV_P@1<1#0")) == 4000.0
    numbers = {"num_stages": 2, "num_workers": 2, "num_steps": 8}
    network = Network(bandwidth_bytes_per_s=1000.0)
    sums, gradients = (make_plan("cyclic_dp", to_owners=x, **numbers) for x in (False, True))
    usual = simulate(programs_of(sums), costs, network)
    coded = simulate(programs_of(gradients), small, network)
    assert coded.step_s < 0.5 * usual.step_s


def test_gradients_are_encoded_beside_the_compute_one_after_the_other():
    costs = Costs.even(2, compute_s=6.0, model_bytes=8.0)
    plan = make_plan("lockstep_dp", num_stages=2, num_workers=2, num_steps=1, to_owners=True)
    assert simulate(programs_of(plan), costs).makespan_s == 6.0
    coded = costs.compressed(lambda n: n, encode_bytes_per_s=4.0, decode_bytes_per_s=8.0)
    assert (coded.encode_s, coded.decode_s) == ((1.0, 1.0), (0.5, 0.5))
    events = [x for x in simulate(programs_of(plan), coded).events if x.lane is Lane.CODING]
    found = {(x.worker, str(x.action)): (x.start_s, x.end_s) for x in events}
    assert found == {
        (0, "1ADD0#0~sums"): (4.0, 5.5),  # its own: encoded and decoded
        (0, "1ADD1#0~sums"): (5.5, 6.0),
        (0, "0SEND_H0>1#0~sums"): (6.0, 7.0),
        (1, "1SEND_H1>0#0~sums"): (4.0, 5.0),
        (1, "0ADD0#0~sums"): (7.0, 7.5),
        (1, "0ADD1#0~sums"): (7.5, 9.0),
    }
    assert simulate(programs_of(plan), coded).makespan_s == 9.0
    late = simulate(programs_of(plan), coded, Network(latency_s=3.0)).events
    times = {
        str(x.action): (x.start_s, x.end_s)
        for x in late
        if x.worker == 0 and x.lane is Lane.CODING
    }
    # what is sent waits for what is added before it, whose message has come at 8
    assert times["1ADD1#0~sums"] == (8.0, 8.5)
    assert times["0SEND_H0>1#0~sums"] == (8.5, 9.5)


def test_new_weights_leave_behind_what_a_step_has_encoded():
    costs = Costs.even(2, compute_s=6.0, model_bytes=8.0)
    coded = costs.compressed(lambda n: n, encode_bytes_per_s=4.0)
    plan = make_plan("lockstep_dp", num_stages=2, num_workers=2, num_steps=2, to_owners=True)
    events = simulate(programs_of(plan), coded, Network(bandwidth_bytes_per_s=1.0), plan).events
    sent = [x for x in events if x.worker == 0 and x.lane is Lane.SEND]
    gradient, weights = (
        next(x for x in sent if (x.action.payload, x.action.t) == asked)
        for asked in ((Payload.H, 0), (Payload.P, 1))
    )
    # its update is made before, when the other's gradient has come
    assert weights.start_s == gradient.end_s


def test_sums_that_travel_are_rounded_where_they_are_sent():
    costs = Costs.even(1, compute_s=3.0, model_bytes=8.0).compressed(
        lambda n: 2 * n, encode_bytes_per_s=8.0
    )
    plan = make_plan("cyclic_dp", num_stages=1, num_workers=2, num_steps=1)
    sent = [x for x in simulate(programs_of(plan), costs).events if x.action.kind is Kind.SEND]
    lanes = [x.lane for x in sent if x.action.payload is Payload.S]
    assert lanes == [Lane.CODING, Lane.SEND]
    assert costs.sent_sum_bytes == (4.0,)


def test_each_codec_is_counted_whichever_is_first():
    costs = Costs.even(1, model_bytes=4000.0)
    one = costs.compressed(lambda n: n).compressed(weights=lambda n: n / 2)
    other = costs.compressed(lambda n: n, weights=lambda n: n / 2)
    assert one == other
    assert one.sent_param_bytes == (500.0,)


def test_elements_are_those_of_sums_in_float32():
    half = {"forward_s": (1.0,), "backward_s": (1.0,), "param_bytes": (2000.0,)}
    costs = Costs(**half, sent_sum_bytes=(4000.0,))  # of parameters in bfloat16
    assert costs.compressed(lambda n: n).sent_sum_bytes == (1000.0,)
    small = costs.compressed(weights=lambda n: n, encode_bytes_per_s=4.0, decode_bytes_per_s=8.0)
    assert small.sent_param_bytes == (1000.0,)
    assert small.compute_s(parse("0UPDATE@1#0")) == 1500.0
    assert small.sent_sum_bytes == costs.sent_sum_bytes


def test_even_stages_sum_up_to_the_model():
    costs = Costs.even(8, compute_s=3.0, model_bytes=80.0, update_s=0.8, cut_bytes=2.0)
    assert sum(costs.forward_s) == pytest.approx(1.0)
    assert sum(costs.backward_s) == pytest.approx(2.0)
    assert sum(costs.param_bytes) == 80.0
    assert sum(costs.update_s) == pytest.approx(0.8)
    assert costs.cut_bytes == (2.0,) * 8


def test_activations_and_their_gradients_take_what_a_codec_sends_of_each():
    small = COSTS.compressed(activations=lambda n: (n * 3, n))  # of 2 elements, and of none
    assert small.message_bytes(parse("1SEND_A0>1#0")) == 6.0
    assert small.message_bytes(parse("0RECV_G0<1#0")) == 2.0
    assert small.message_bytes(parse("0SEND_S0>1#0")) == 5.0
    assert small.cut_bytes == COSTS.cut_bytes  # which stages keep as they are


@pytest.mark.parametrize("changes", [{"param_bytes": (1.0,)}, {"update_s": (1.0, -1.0)}])
def test_costs_that_do_not_fit_are_refused(changes):
    given = {"forward_s": (1.0, 1.0), "backward_s": (1.0, 1.0), "param_bytes": (1.0, 1.0)}
    with pytest.raises(PlanError, match="2 numbers >= 0"):
        Costs(**(given | changes))


@pytest.mark.parametrize("given", [{"latency_s": -1.0}, {"bandwidth_bytes_per_s": 0.0}])
def test_networks_that_cannot_be_are_refused(given):
    with pytest.raises(PlanError, match="cannot be; allowed"):
        Network(**given)


INSIDE = Network(latency_s=0.1)


def test_messages_inside_a_host_cost_what_they_cost_there():
    network = Network(latency_s=1.0, hosts=(0, 1, 0), inside=INSIDE)
    assert network.between(0, 2) is INSIDE
    assert network.between(1, 2) is network
    assert network.slowest is network
    assert Network(hosts=(3, 3), inside=INSIDE).slowest is INSIDE
    assert INSIDE.between(0, 1) is INSIDE


@pytest.mark.parametrize("given", [{"hosts": (0, 0)}, {"inside": INSIDE}])
def test_hosts_come_with_what_messages_cost_inside(given):
    with pytest.raises(PlanError, match="allowed: both, or none of them"):
        Network(**given)


def test_hosts_are_those_of_the_workers():
    with pytest.raises(PlanError, match="of 3 workers; allowed: 3 numbers"):
        Network(hosts=(0, 0), inside=INSIDE).check(3)
