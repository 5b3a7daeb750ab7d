"""Messages: every tensor arrives bit by bit, and what does not change is one message."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import contextmanager

import pytest
import torch

from lightning_cyclic.plan.actions import Lane, Payload, parse
from lightning_cyclic.plan.passes.messages import Channel, Ring
from lightning_cyclic.runtime.messages import Message, Messages
from lightning_cyclic.runtime.transport import (
    AbstractPending,
    AbstractTransport,
    CountingTransport,
    Part,
)
from tests.harness.local_transport import LocalCrew, LocalTransport, PostOffice
from tests.harness.races import Device, noted

CPU = torch.device("cpu")
X = torch.arange(24.0).reshape(4, 6)
DEPTHS = {Ring(Channel(0, 1, Lane.MAIN), Payload.A, 1): 3}


class Pair:
    """Two workers in one thread: what one sends lies in the office until the other takes it."""

    def __init__(self):
        office = PostOffice()
        self.waited = []
        self.posted = {}
        self.transport = CountingTransport(LocalTransport(office, 0, 2, 0.5))
        self.sender = Messages(self.transport, DEPTHS, self.wait, CPU)
        self.receiver = Messages(LocalTransport(office, 1, 2, 0.5), {}, self.wait, CPU)

    def wait(self, pending, action):
        self.waited.append(str(action))
        pending.wait()

    def send(self, *tensors, key="k", facts=None, i=0, j=1, payload="A"):
        self.sender.send(parse(f"{j}SEND_{payload}{i}>1#0"), key, Message(tensors, facts))

    def post(self, key="k", i=0, j=1, payload="A"):
        action = parse(f"{j}RECV_{payload}{i}<0#0")
        self.posted[action] = self.receiver.post(action, key)

    def take(self, i=0, j=1, payload="A"):
        return self.receiver.take(self.posted.pop(parse(f"{j}RECV_{payload}{i}<0#0")))

    def receive(self, key="k", i=0, j=1, payload="A"):
        self.post(key, i, j, payload)
        return self.take(i, j, payload)

    def exchange(self, *tensors, key="k", facts=None, i=0):
        """Return what arrives, and the number of messages that it took."""
        before = self.transport.messages.total()
        self.send(*tensors, key=key, facts=facts, i=i)
        return self.receive(key, i), self.transport.messages.total() - before


def bits(x):
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    return x.reshape(-1).view(torch.uint8).tolist()


ODD = torch.tensor([1, -1, 0, 2139095041, -4194303, -(2**31)], dtype=torch.int32)
TENSORS = {
    "float": X,
    "scalar": torch.tensor(3.5),
    "odd floats": ODD.view(torch.float32),  # nans with payloads, infinities, -0.0
    "bfloat16": X.to(torch.bfloat16) / 7,
    "half": X.half(),
    "float8": X.to(torch.float8_e4m3fn),
    "bool": X > 7,
    "uint8": X.to(torch.uint8)[0, :3],
    "int64": torch.tensor([2**62 + 1, -(2**63)]),
    "complex": torch.complex(X, -X),
    "transposed": X.t(),
    "permuted": torch.arange(120.0).reshape(2, 3, 4, 5).permute(2, 0, 3, 1),
    "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "rows of it": X[1:3],
    "every second": X[:, ::2],
    "one of many": torch.arange(1000.0)[7::100],
    "expanded": X[:, :1].expand(4, 9),
    "expanded scalar": torch.tensor(2.0).expand(3, 5),
    "expanded, with gaps": X[0, ::5].expand(3, 2),
    "expanded, wide": torch.arange(1000.0)[::100].expand(3, 10),
    "windows": torch.arange(10.0).unfold(0, 4, 1),
    "empty": X[:0],
    "empty within": torch.zeros(2, 0, 3, dtype=torch.int64),
    "empty, expanded": torch.zeros(1, 0).expand(5, 0),
    "conjugate": torch.complex(X, X).conj(),
    "negative": torch.complex(X, X).conj().imag,
    "of a graph": (X.clone().requires_grad_() * 2),
    "parameter": torch.nn.Parameter(X),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_bit_by_bit(name: str):
    x, pair = TENSORS[name], Pair()
    for _ in range(2):  # as something new, and as something known
        (y,) = pair.exchange(x)[0].tensors
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
        assert bits(y) == bits(x)
        assert not y._is_view()
        assert y.is_leaf
        assert not y.requires_grad


@pytest.mark.parametrize("name", sorted(TENSORS.keys() - {"one of many", "expanded, wide"}))
def test_strides_are_kept(name: str):
    (y,) = Pair().exchange(TENSORS[name])[0].tensors
    assert y.stride() == TENSORS[name].stride()


@pytest.mark.parametrize("name", ["one of many", "expanded, wide"])
def test_wide_gaps_are_not_sent(name: str):
    pair = Pair()
    (y,) = pair.exchange(TENSORS[name])[0].tensors
    assert y.is_contiguous()
    assert pair.transport.num_bytes[Payload.A] < 2000  # of 4000


def test_all_together_arrive_in_their_order_and_aligned():
    tensors = list(TENSORS.values())
    pair = Pair()
    for _ in range(2):
        arrived = pair.exchange(*tensors)[0].tensors
        assert list(map(bits, arrived)) == list(map(bits, tensors))
        assert {x.storage_offset() * x.element_size() % 512 for x in arrived} == {0}


def test_the_gaps_of_a_large_tensor_are_not_those_of_the_next_one():
    large = torch.arange(64.0 * 80).reshape(64, 80)[:, :40]
    arrived = Pair().exchange(large, X)[0].tensors
    assert list(map(bits, arrived)) == [bits(large), bits(X)]


def test_unchanged_is_one_message_and_changed_is_description_and_content():
    pair = Pair()
    assert pair.exchange(X, facts=[1])[1] == 3
    parcel, number = pair.exchange(X + 1, facts=[1])
    assert number == 1
    assert torch.equal(parcel.tensors[0], X + 1)
    assert parcel.facts == [1]
    changes = [
        ((X.t(),), [1]), ((X.double(),), [1]), ((X, X), [1]), ((X[:1],), [1]),
        ((X.clone().requires_grad_(),), [1]), ((X,), [2]), ((X,), [1]),
    ]  # fmt: skip
    for tensors, facts in changes:
        parcel, number = pair.exchange(*tensors, facts=facts)
        assert number == 3
        assert parcel.facts == facts
        assert list(map(bits, parcel.tensors)) == list(map(bits, tensors))
        assert pair.exchange(*tensors, facts=facts)[1] == 1


def test_facts_without_tensors_need_no_content():
    pair = Pair()
    parcel, number = pair.exchange(facts={"a": [1, None, "x"]})
    assert (list(parcel.tensors), parcel.facts, number) == ([], {"a": [1, None, "x"]}, 2)
    parcel, number = pair.exchange(facts={"a": [1, None, "x"]})
    assert (parcel.facts, number) == ({"a": [1, None, "x"]}, 1)


def test_each_key_has_a_form_of_its_own():
    pair = Pair()
    assert [pair.exchange(X, key="a")[1], pair.exchange(X[:2], key="b")[1]] == [3, 3]
    for _ in range(2):
        assert [pair.exchange(X, key="a")[1], pair.exchange(X[:2], key="b")[1]] == [1, 1]


def test_stages_and_payloads_have_forms_of_their_own():
    pair = Pair()
    for j, payload, x in ((1, "A", X), (2, "A", X[:2]), (1, "G", X[:3])):
        for _ in range(2):
            pair.send(x, j=j, payload=payload)
            assert bits(pair.receive(j=j, payload=payload).tensors[0]) == bits(x)
    assert dict(pair.transport.messages) == {Payload.A: 8, Payload.G: 4}


def test_both_ends_forget_the_same_forms():
    pair = Pair()

    def number(key):
        message, needed = pair.exchange(X[: key % 4], key=key)
        assert bits(message.tensors[0]) == bits(X[: key % 4])
        return needed

    full, empty = 3, 2  # messages of a parcel with and without content
    new = [empty if key % 4 == 0 else full for key in range(400)]
    assert [number(key) for key in range(256)] == new[:256]
    assert number(0) == number(1) == 1  # all are known, and these are the latest now
    assert [number(key) for key in range(256, 300)] == new[256:300]
    assert number(0) == number(1) == number(46) == number(299) == 1
    assert number(45) == new[45]  # forgotten; now the oldest, 47, is forgotten
    assert number(47) == new[47]
    assert number(46) == 1


def test_a_form_is_forgotten_alike_where_receives_are_posted_ahead():
    pair = Pair()
    keys = (
        [k * 7 % 300 for k in range(300)] + [k % 5 * 3 for k in range(20)] + [*range(299, 9, -3)]
    )
    pair.post(keys[0])
    for key, later in zip(keys, [*keys[1:], None], strict=True):
        pair.send(X[:, : 1 + key % 5], key=key)
        assert bits(pair.take().tensors[0]) == bits(X[:, : 1 + key % 5])
        if later is not None:
            pair.post(later)


def test_no_receive_that_was_posted_ahead_takes_a_size_that_has_changed():
    pair = Pair()
    pair.exchange(X)
    for _ in range(2):  # of one size, ahead
        pair.post(i=0)
        pair.post(i=1)
        for i in range(2):
            pair.send(X + i, i=i)
        assert [bits(pair.take(i=i).tensors[0]) for i in range(2)] == [bits(X), bits(X + 1)]
    pair.post(i=0)
    pair.post(i=1)
    pair.send(X[:2], i=0)
    pair.send(X[:2], i=1)
    with pytest.raises(AssertionError, match="RECV_A0<0#0 has a new form"):
        pair.take(i=0)


def test_a_parcel_is_independent_of_what_was_sent_and_of_other_parcels():
    pair, x = Pair(), X.clone()
    arrived = []
    for k in range(3):
        pair.send(x)
        x.add_(100)
        arrived.append(pair.receive().tensors[0])
        arrived[-1].sub_(k * 100)
    assert [bits(y) for y in arrived] == [bits(X)] * 3


def test_a_wait_that_fails_comes_through_with_its_action():
    pair = Pair()
    with pytest.raises(TimeoutError):
        pair.receive(i=3)
    assert pair.waited == ["1RECV_A3<0#0"]


def test_a_send_waits_where_as_many_are_under_way_as_the_program_knows_of():
    pair = Pair()
    for i in range(3):
        pair.send(facts=i, i=i)
    assert pair.waited == []
    pair.send(facts=3, i=3)
    assert set(pair.waited) == {"1SEND_A0>1#0"}
    for i in range(3):  # two, of what the program does not name
        pair.send(facts=i, i=i, payload="G")
    assert set(pair.waited) == {"1SEND_A0>1#0", "1SEND_G0>1#0"}


def test_settling_waits_for_all_that_was_sent():
    pair = Pair()
    for i in range(2):
        pair.send(facts=i, i=i)
        pair.send(facts=i, i=i, payload="G")
    pair.sender.settle()
    assert sorted(set(pair.waited)) == [
        "1SEND_A0>1#0", "1SEND_A1>1#0", "1SEND_G0>1#0", "1SEND_G1>1#0",
    ]  # fmt: skip
    pair.waited.clear()
    pair.sender.settle()
    assert pair.waited == []


def test_messages_that_are_known_before_are_received_ahead_several_at_once():
    pair = Pair()
    for end in (pair.sender, pair.receiver):
        end.know(Payload.A, 1, end.layout([X]))
    for i in range(3):
        pair.post(None, i)
    for i in range(3):
        pair.send(X + i, key=None, i=i)
    assert pair.transport.messages.total() == 3
    for i in (2, 0, 1):  # whoever reads first
        assert torch.equal(pair.take(i).tensors[0], X + i)


class Edge(AbstractTransport):
    """Carry content of the device "meta", which has no values, and words of the host."""

    def __init__(self, office, worker, log):
        super().__init__(worker, 2, 5.0)
        self.words = LocalTransport(office, worker, 2, 5.0)
        self.log = log
        self.is_aside = threading.local()

    @property
    def control(self):
        return self.words

    def settle(self):
        self.log.append("settle")

    @contextmanager
    def aside(self):
        self.is_aside.yes = True
        yield
        self.is_aside.yes = False

    def isend(self, ring, data, part=Part.CONTENT):
        return self._carried(ring, data, part, self.words.isend)

    def irecv(self, ring, data, part=Part.CONTENT):
        # what is posted when its head has come must not be behind what the device has since then
        is_late = ring.payload is Payload.A
        assert getattr(self.is_aside, "yes", False) is is_late
        return self._carried(ring, data, part, self.words.irecv)

    def _carried(self, ring, data, part, post):
        assert data.device.type == ("cpu" if ring.channel.is_control else "meta")
        assert data.numel()  # NCCL is not asked to send nothing
        self.log.append((str(ring.payload), part))
        return post(ring, data if data.is_cpu else torch.zeros(1, dtype=torch.uint8), part)


def test_what_goes_by_control_is_in_the_memory_of_the_host():
    office, log, meta = PostOffice(), [], torch.device("meta")
    sender, receiver = (
        Messages(Edge(office, w, log), {}, lambda pending, a: pending.wait(), meta)
        for w in range(2)
    )
    x = torch.empty(2, 3, device=meta)
    for worker in (sender, receiver):
        worker.know(Payload.N, 0, worker.layout([x[:0]]))
        worker.know(Payload.P, 1, worker.layout([x, x]))
    arrived = []
    for text, tensors, there in (
        ("1{}_A0{}#0", [x, x], None), ("1{}_A1{}#0", [x, x], None),
        ("0{}_N{}#0", [x[:0]], None), ("1{}_P@1{}#0", [x, x], [True, False]),
        ("0{}_M{}#0", [torch.ones(3)], None),
    ):  # fmt: skip
        sent, comes = (parse(text.format(*ways)) for ways in (("SEND", ">1"), ("RECV", "<0")))
        incoming = receiver.post(comes, None)
        sender.send(sent, None, Message(tensors, word=3, there=there))
        arrived.append(receiver.take(incoming))
    first, second, norms, versions, metric = arrived
    for message in (first, second):
        assert [y.device.type for y in message.tensors] == ["meta", "meta"]
        assert message.tensors[0].shape == x.shape
    assert norms.word == versions.word == 3
    assert (norms.there, versions.there) == (None, [True, False])
    assert [entry for entry in log if entry[0] != "M"] == [(x, Part.CONTENT) for x in "AAAAPP"]
    assert metric.tensors[0].device.type == "cpu"
    log.clear()
    receiver.settle()
    assert log == ["settle"]  # on the device, what streams wait for
    receiver.close()


def test_a_buffer_that_one_stream_uses_is_not_written_on_another_before_that_is_over():
    device = Device()
    with noted(device):
        messages = Messages(None, {}, lambda pending, a: pending.wait(), CPU)
        layout = messages.layout([X])
        first = messages.room(layout)
        first.write([X])
        first.let_go()
        with device.on(device.new()):
            assert messages.room(layout) is not first
        assert messages.room(layout) is first  # on its stream, behind its use
        first.let_go()
        device.see(device.clock(device.current))
        with device.on(device.new()):
            assert messages.room(layout) is first


class Told(AbstractPending):
    """End when the test says so, and know it, as gloo does, when somebody has waited."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.waited = threading.Event()

    def wait(self) -> None:
        assert self.told.wait(5)
        self.waited.set()

    def is_done(self) -> bool:
        return self.waited.is_set()


class Slow(AbstractTransport):
    """Take what is sent, and have it leave later."""

    def __init__(self) -> None:
        super().__init__(0, 2, LocalCrew(PostOffice(), 0, 5.0))
        self.sent: list[Told] = []

    def isend(self, ring, data, part=Part.CONTENT):
        self.sent.append(Told())
        return self.sent[-1]

    def irecv(self, ring, data, part=Part.CONTENT):
        raise NotImplementedError


def test_memory_that_is_not_kept_goes_when_it_has_left_though_nothing_else_is_sent():
    slow = Slow()
    messages = Messages(slow, DEPTHS, lambda pending, action: pending.wait(), CPU)
    layout = messages.layout([X], keeps=False)
    messages.know(Payload.A, 1, layout)
    data = []
    for i in range(2):
        buffer = messages.room(layout)
        data.append(weakref.ref(buffer.data))
        messages.send(
            parse(f"1SEND_A{i}>1#0"), None, Message(buffer.tensors, buffer=buffer, leaves=True)
        )
        del buffer
    assert [x() is None for x in data] == [False, False]
    slow.sent[0].told.set()
    waited = time.monotonic()
    while data[0]() is not None and time.monotonic() < waited + 5:
        time.sleep(0.001)
    assert [x() is None for x in data] == [True, False]
    slow.sent[1].told.set()
    messages.settle()
    assert data[1]() is None
    messages.close()


def test_a_buffer_that_has_left_is_used_again_though_nobody_of_the_step_has_waited():
    slow = Slow()
    messages = Messages(slow, DEPTHS, lambda pending, action: pending.wait(), CPU)
    layout = messages.layout([X])
    messages.know(Payload.A, 1, layout)
    first = messages.room(layout)
    messages.send(parse("1SEND_A0>1#0"), None, Message(first.tensors, buffer=first, leaves=True))
    assert messages.room(layout) is not first
    slow.sent[0].told.set()
    assert slow.sent[0].waited.wait(5)
    assert messages.room(layout) is first
    messages.close()


def test_a_buffer_that_several_are_sent_has_left_when_the_slowest_has_it():
    slow = Slow()
    messages = Messages(slow, DEPTHS, lambda pending, action: pending.wait(), CPU)
    layout = messages.layout([X])
    messages.know(Payload.A, 1, layout)
    buffer = messages.room(layout)
    for peer in (1, 2, 3):
        message = Message(buffer.tensors, buffer=buffer, leaves=peer == 3)
        messages.send(parse(f"1SEND_A0>{peer}#0"), None, message)
    for told in slow.sent[1:]:
        told.waited.set()
    assert messages.room(layout) is not buffer
    slow.sent[0].waited.set()
    assert messages.room(layout) is buffer
    for told in slow.sent:
        told.told.set()
    messages.close()
