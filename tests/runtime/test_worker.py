"""The worker: receives wait where they are read, lanes run beside, and nothing is taken twice."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from lightning_cyclic.errors import CyclicError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Action, Lane, parse
from lightning_cyclic.plan.dataflow import Dataflow
from lightning_cyclic.runtime.flight_recorder import FlightRecorder
from lightning_cyclic.runtime.messages import Message, Messages
from lightning_cyclic.runtime.moments import keep
from lightning_cyclic.runtime.transport import AbstractTransport
from lightning_cyclic.runtime.worker import LaneThread, Worker, _Arrival
from tests.harness.local_transport import LocalTransport, PostOffice
from tests.harness.races import Device, Streams, Watched, noted

CPU = torch.device("cpu")
PLAN = make_plan("cyclic_dp", num_stages=2, num_workers=2)


class Log:
    """Stand for all that a worker asks, and note what it asks for."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, a: Action) -> None:
        self.seen.append(str(a))

    forward = backward = update = tell = add = note

    def free(self, a: Action) -> None:
        raise AssertionError("nothing is freed here")

    def move(self, a: Action) -> None:
        self.seen.append(str(a))

    def hold(self, a: Action) -> None:
        self.seen.append(f"hold {a}")

    def let_go(self, a: Action) -> None:
        self.seen.append(f"let go {a}")

    def key(self, a: Action) -> None:
        return None

    def room(self, a: Action) -> None:
        return None

    def give(self, a: Action) -> Message:
        self.note(a)
        return Message([torch.tensor([float(a.v or 0)])])

    def take(self, a: Action, message: Message) -> None:
        self.seen.append(f"took {a}: {float(message.tensors[0])}")


class Pair:
    """Two workers of one process."""

    def __init__(
        self, *lanes: Lane, timeout_s: float = 0.5, log: type[Log] = Log,
        device: Device | None = None,
    ) -> None:  # fmt: skip
        office = PostOffice()
        self.logs = [log(), log()]
        self._device = device
        self.flights = [FlightRecorder(), FlightRecorder()]
        self.workers = [self._worker(office, w, lanes, timeout_s) for w in range(2)]

    def _worker(self, office: PostOffice, w: int, lanes: Any, timeout_s: float) -> Worker:
        log, transport = self.logs[w], self._transport(office, w, timeout_s)
        messages = Messages(transport, {}, lambda pending, a: pending.wait(), CPU)
        flow, limit_s = Dataflow(PLAN, w), lambda: timeout_s
        return Worker(flow, messages, log, log, log, self.flights[w], lanes, limit_s)

    def _transport(self, office: PostOffice, w: int, timeout_s: float) -> AbstractTransport:
        transport = LocalTransport(office, w, 2, timeout_s)
        return transport if self._device is None else Watched(transport, self._device)

    def run(self, w: int, *texts: str) -> None:
        self.workers[w].run(map(parse, texts))


def test_what_waits_for_a_message_is_the_first_action_that_reads_it() -> None:
    pair = Pair()
    pair.run(1, "0RECV_P@1<0#1", "1F1@0#1")  # of another stage: nothing has been sent yet
    pair.run(0, "0SEND_P@1>1#1")
    pair.run(1, "0F1@1#1", "0B1@1#1")
    assert pair.logs[1].seen == ["1F1@0#1", "took 0RECV_P@1<0#1: 1.0", "0F1@1#1", "0B1@1#1"]


def test_a_message_that_does_not_come_fails_its_reader_and_nobody_before() -> None:
    pair = Pair(timeout_s=0.05)
    pair.run(1, "0RECV_P@1<0#1", "1F1@0#1")
    with pytest.raises(TimeoutError):
        pair.run(1, "0F1@1#1")
    assert pair.logs[1].seen == ["1F1@0#1"]


def test_all_that_need_a_message_that_does_not_come_fail_for_the_same_reason() -> None:
    pair = Pair(Lane.WEIGHTS, timeout_s=0.2)
    pair.run(1, "0RECV_P@1<0#1", "0SEND_P@1>0#1~weights")  # the lane waits for the message first
    for _ in range(2):  # then, or meanwhile, the main thread
        with pytest.raises(TimeoutError, match="no message"):
            pair.run(1, "0F1@1#1")
    with pytest.raises(CyclicError, match="no message"):
        pair.workers[1].settle()
    for worker in pair.workers:
        worker.close()


def test_settling_takes_what_nobody_has_read() -> None:
    pair = Pair()
    pair.run(0, "0SEND_P@1>1#1", "0SEND_P@2>1#2")
    pair.run(1, "0RECV_P@1<0#1", "0RECV_P@2<0#2")
    pair.workers[1].settle()
    assert pair.logs[1].seen == ["took 0RECV_P@1<0#1: 1.0", "took 0RECV_P@2<0#2: 2.0"]


def test_a_lane_hands_on_what_the_main_thread_receives_later_and_both_read_one_message() -> None:
    pair = Pair(Lane.WEIGHTS, timeout_s=5.0)
    pair.run(1, "0SEND_P@1>0#1~weights")  # before its receive, which needs room
    assert "0SEND_P@1>0#1~weights" not in pair.logs[1].seen
    pair.run(1, "0RECV_P@1<0#1")
    pair.run(0, "0SEND_P@1>1#1")
    pair.run(1, "0F1@1#1")
    pair.workers[1].settle()
    seen = pair.logs[1].seen
    assert seen[0] == "hold 0SEND_P@1>0#1~weights"
    assert seen.count("took 0RECV_P@1<0#1: 1.0") == 1
    assert seen.index("took 0RECV_P@1<0#1: 1.0") < seen.index("0SEND_P@1>0#1~weights")
    assert seen.index("took 0RECV_P@1<0#1: 1.0") < seen.index("0F1@1#1")
    assert seen.index("let go 0SEND_P@1>0#1~weights") > seen.index("0SEND_P@1>0#1~weights")
    for worker in pair.workers:
        worker.close()


def test_a_lane_hands_on_outer_weights_that_another_thread_receives_later() -> None:
    pair = Pair(Lane.WEIGHTS, timeout_s=5.0)
    seen = pair.logs[1].seen
    pair.run(1, "0SEND_U>0#1~weights")
    time.sleep(0.05)  # in which the lane would send what it has
    assert seen == ["hold 0SEND_U>0#1~weights"]
    pair.run(1, "0RECV_U<0#1~sums")
    pair.run(0, "0SEND_U>1#1~sums")
    pair.workers[1].settle()
    came = ["took 0RECV_U<0#1~sums: 0.0", "0SEND_U>0#1~weights", "let go 0SEND_U>0#1~weights"]
    assert seen[1:] == came
    for worker in pair.workers:
        worker.close()


def test_a_message_that_two_have_found_on_its_way_is_taken_in_by_the_first() -> None:
    device, took = Device(), list[int]()
    with noted(device):
        lane, a = device.new(), parse("0RECV_P@1<0#1")
        arrival = _Arrival(a, None, Streams(device))  # type: ignore[arg-type]  # it passes it on
        with device.on(lane):
            x = torch.zeros(1)

        def take_in(a: Action, incoming: Any) -> None:
            took.append(device.current)
            x.add_(1)

        with device.on(lane):
            arrival.take(take_in)
        arrival.take(take_in)
        keep([x])
        x.add_(1)
    assert took == [lane]
    device.check()


class Computing(Log):
    """Compute with what comes, on whichever stream takes it in and reads it."""

    def take(self, a: Action, message: Message) -> None:
        self.came = message.tensors[0] * 2
        self.seen.append(f"took {a}")

    def give(self, a: Action) -> Message:
        return Message([self.came + 1 if hasattr(self, "came") else torch.ones(1)])

    def forward(self, a: Action) -> None:
        self.note(a)
        keep([self.came])
        self.came = self.came + 1


def test_what_a_lane_takes_in_first_is_waited_for_by_the_stream_of_who_reads_it_next() -> None:
    device = Device()
    with noted(device):
        pair = Pair(Lane.WEIGHTS, timeout_s=5.0, log=Computing, device=device)
        pair.run(0, "0SEND_P@1>1#1")
        pair.run(1, "0RECV_P@1<0#1", "0SEND_P@1>0#1~weights")
        sent = "let go 0SEND_P@1>0#1~weights"
        until = time.monotonic() + 5.0
        while sent not in pair.logs[1].seen and time.monotonic() < until:
            time.sleep(0.001)
        pair.run(1, "0F1@1#1")
        assert pair.logs[1].seen[-2:] == [sent, "0F1@1#1"]
        for worker in pair.workers:
            worker.close()
    device.check()
    assert device.operations >= 5


def test_the_main_thread_waits_for_a_lane_that_is_to_make_what_it_reads() -> None:
    pair = Pair(Lane.SUMS, timeout_s=5.0)
    pair.run(1, "0RECV_S0<0#1~sums", "0ADD1#1~sums")
    late = threading.Timer(0.1, pair.run, (0, "0SEND_S0>1#1~sums"))
    late.start()
    pair.run(1, "0UPDATE@2#1")
    assert pair.logs[1].seen[-3:] == ["took 0RECV_S0<0#1~sums: 0.0", "0ADD1#1~sums", "0UPDATE@2#1"]
    late.join()
    for worker in pair.workers:
        worker.close()


def test_an_error_on_a_lane_reaches_the_main_thread() -> None:
    pair = Pair(Lane.SUMS, timeout_s=0.05)
    pair.run(1, "0RECV_S0<0#1~sums", "0ADD1#1~sums")
    with pytest.raises(CyclicError, match="cyclic-sums failed: TimeoutError"):
        pair.run(1, "0UPDATE@2#1")
    pair.workers[1].close()


ACTIONS = tuple(parse(f"0ADD{i}#0~sums") for i in range(1, 5))


def test_who_waits_for_an_action_waits_for_none_behind_it() -> None:
    goes_on, seen = threading.Event(), list[Action]()

    def do(a: Action) -> None:
        if a == ACTIONS[2]:
            assert goes_on.wait(20)
        seen.append(a)

    lane = LaneThread("lane", do)
    lane.put(ACTIONS[:1])
    lane.put(ACTIONS[1:])
    lane.wait_for(2)  # of a batch whose third action waits for this thread
    assert seen == list(ACTIONS[:2])
    goes_on.set()
    lane.wait_for(lane.num_put)
    assert seen == list(ACTIONS)
    lane.close()
