"""With a fake of torch.cuda, which notes what is enqueued; and with a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_cyclic.runtime.transport import streams
from lightning_cyclic.runtime.transport.base import Gone
from lightning_cyclic.runtime.transport.streams import (
    ChannelStreams,
    HostCopies,
    StreamCopies,
    own_error_handling,
)
from tests.harness.local_transport import LocalCrew, PostOffice
from tests.runtime.transport.rings import SUMS, THERE, room, some

Log = list[str]
DEVICE = torch.device("cuda", 0)


class FakeEvent:
    def __init__(self, name: str) -> None:
        self.name = name
        self.has_run = False

    def query(self) -> bool:
        return self.has_run


class FakeStream:
    def __init__(self, log: Log, name: str) -> None:
        self.log = log
        self.name = name
        self.event = FakeEvent(name)

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> FakeEvent:
        self.log.append(f"event on {self.name}")
        return self.event


class Fake:
    """Stand for torch.cuda, a message and its buffer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: Log = []
        self.current = FakeStream(self.log, "compute")
        self.made: list[FakeStream] = []
        self.office = PostOffice()
        monkeypatch.setattr(streams, "_POLL_S", 0.01)
        monkeypatch.setattr(streams, "stream_on", self.make)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        self.data: Any = SimpleNamespace(record_stream=self.record)

    def make(self, device: torch.device) -> FakeStream:
        self.made.append(FakeStream(self.log, f"channel {len(self.made)}"))
        return self.made[-1]

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def record(self, stream: FakeStream) -> None:
        self.log.append(f"buffer kept for {stream.name}")

    def start(self) -> Any:
        self.log.append(f"begin on {self.current.name}")
        return SimpleNamespace(wait=lambda: self.log.append(f"{self.current.name} waits for it"))

    def streams(self, timeout_s: float) -> ChannelStreams:
        return ChannelStreams(
            (THERE, SUMS),
            DEVICE,
            LocalCrew(self.office, 0, timeout_s),
            lambda: self.log.append("hang up"),
        )

    def begin(self, made: ChannelStreams) -> Any:
        return made.begin(SUMS, self.start, self.data)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


def soon(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 5
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


def test_a_message_runs_on_the_stream_of_its_channel(fake: Fake) -> None:
    made = fake.streams(20.0)
    pending = fake.begin(made)
    assert fake.log == [
        "channel 1 waits for compute",
        "begin on channel 1",
        "channel 1 waits for it",
        "buffer kept for channel 1",
        "event on channel 1",
    ]
    assert not pending.is_done()
    fake.made[1].event.has_run = True
    assert pending.is_done()


def test_the_host_waits_and_no_stream_does(fake: Fake) -> None:
    pending = fake.begin(fake.streams(20.0))
    fake.log.clear()
    waiting = Thread(target=pending.wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    fake.made[1].event.has_run = True
    waiting.join(5)
    assert not waiting.is_alive()
    assert fake.log == []


def test_a_message_that_is_late_ends_all(fake: Fake) -> None:
    made = fake.streams(0.05)
    never_waited_for, late = fake.begin(made), fake.begin(made)
    time.sleep(0.1)
    assert not made.has_failed  # nobody waits: a receive may be posted long before its send
    for error in (late.wait, never_waited_for.wait, made.check, fake.begin(made).wait):
        with pytest.raises(TimeoutError, match="^it has not run$"):
            error()
    assert never_waited_for.is_done()
    assert isinstance(fake.begin(made), Gone)
    assert fake.log.count("hang up") == 1


def test_what_another_thread_has_aborted_is_an_error(fake: Fake) -> None:
    made = fake.streams(20.0)
    pending = fake.begin(made)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            pending.wait()
        except TimeoutError as error:
            caught.append(error)

    waiting = Thread(target=wait)
    waiting.start()
    made._end(TimeoutError("another is late"))
    fake.made[1].event.has_run = True  # as NCCL lets what it aborts
    waiting.join(5)
    assert str(caught[0]) == "another is late"


def test_the_failure_of_another_worker_ends_all(fake: Fake) -> None:
    pending = fake.begin(fake.streams(20.0))
    fake.office.fail("worker 1: boom")
    with pytest.raises(ConnectionError, match="^worker 1: boom$"):
        pending.wait()
    assert "hang up" in fake.log


def test_a_message_that_cannot_begin_says_so_when_it_is_waited_for(fake: Fake) -> None:
    def start() -> Any:
        raise RuntimeError("NCCL communicator was aborted")

    made = fake.streams(20.0)
    pending = made.begin(SUMS, start, fake.data)
    with pytest.raises(ConnectionError, match="^NCCL communicator was aborted$"):
        pending.wait()


@pytest.mark.parametrize("before", [None, "3"])
def test_error_handling_is_ours_for_the_groups_made_inside(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with own_error_handling():
        assert os.environ[name] == "0"
    assert os.environ.get(name) == before


@pytest.mark.gpu
def test_channels_run_beside_each_other_and_beside_compute() -> None:
    made = ChannelStreams((THERE, SUMS), DEVICE, LocalCrew(PostOffice(), 0, 20.0), lambda: None)
    data = room(1 << 20).to(DEVICE)
    torch.cuda._sleep(1)  # what has not run before is loaded, for which the GPU must be idle
    assert int(data.fill_(0).sum()) == 0

    def start() -> Any:
        torch.cuda._sleep(int(1e9))  # about half a second
        data.fill_(5)
        return SimpleNamespace(wait=lambda: None)

    begin = time.monotonic()
    pending = made.begin(THERE, start, data)
    other = made.begin(SUMS, lambda: SimpleNamespace(wait=lambda: None), data)
    assert soon(other.is_done)  # behind no other channel
    assert not pending.is_done()
    assert time.monotonic() - begin < 0.3
    assert int(data.sum()) == 0  # on the compute stream, which waits for nothing
    pending.wait()
    assert pending.is_done()
    assert bool((data == 5).all())


@pytest.mark.gpu
def test_a_late_event_is_named() -> None:
    hung_up: list[bool] = []
    made = ChannelStreams(
        (THERE,), DEVICE, LocalCrew(PostOffice(), 0, 0.1), lambda: hung_up.append(True)
    )

    def start() -> Any:
        torch.cuda._sleep(int(2e9))
        return SimpleNamespace(wait=lambda: None)

    pending = made.begin(THERE, start, room().to(DEVICE))
    with pytest.raises(TimeoutError):
        pending.wait()
    assert hung_up == [True]
    torch.cuda.synchronize()


def test_copies_on_the_host_are_complete_at_once() -> None:
    copies, data = HostCopies(), some(1, 2)
    host, copied = copies.to_host(data)
    data.zero_()
    assert (host.tolist(), copied, copies.now()) == ([1, 2], None, None)
    copies.to_device(host, data, None)
    assert data.tolist() == [1, 2]
    assert copies.room(data).shape == data.shape


@pytest.mark.gpu
def test_a_buffer_is_written_only_when_it_is_free() -> None:
    copies = StreamCopies(torch.device("cuda", 0))
    data = (room(1 << 20) + 3).cuda()
    host, copied = copies.to_host(data)
    copied.synchronize()
    assert host.is_pinned()
    torch.cuda._sleep(1)
    _ = data + 1  # what has not run before is loaded, for which the GPU must be idle
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1e9))
    read = data + 1  # enqueued, and still to run
    free = copies.now()
    with torch.cuda.stream(torch.cuda.Stream()):
        copies.to_device(host.zero_(), data, free)
        assert not free.query()
    torch.cuda.synchronize()
    assert bool((read == 4).all())
    assert bool((data == 0).all())
