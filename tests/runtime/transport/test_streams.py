"""With fakes of streams, which note what is enqueued; and with a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, final

import pytest
import torch
from typing_extensions import override

from lightning_cyclic.errors import WaitTimeoutError
from lightning_cyclic.runtime.moments import AbstractMoment, AbstractStreams, streams_of
from lightning_cyclic.runtime.transport import streams
from lightning_cyclic.runtime.transport.base import Gone
from lightning_cyclic.runtime.transport.streams import (
    HostCopies,
    MessageStreams,
    StreamCopies,
    ask_for_queues,
    own_error_handling,
)
from tests.harness.local_transport import LocalCrew, PostOffice
from tests.runtime.transport.rings import room, some

Log = list[str]
DEVICE = torch.device("cuda", 0)


@final
class FakeMoment(AbstractMoment):
    def __init__(self, log: Log, streams: FakeStreams) -> None:
        self.log, self.streams, self.of = log, streams, streams.current
        self.has_run = False

    @override
    def join(self) -> None:
        self.log.append(f"{self.streams.current} waits for {self.of}")

    @override
    def wait(self) -> None:
        self.log.append(f"host waits for {self.of}")

    @override
    def is_here(self) -> bool:
        return self.of == self.streams.current

    @override
    def is_over(self) -> bool:
        return self.has_run


@final
class FakeStreams(AbstractStreams):
    """Note what is enqueued, by one thread."""

    def __init__(self) -> None:
        self.log: Log = []
        self.current = "compute"
        self.moments: list[FakeMoment] = []

    @override
    def new(self) -> str:
        return "a new one"

    @override
    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @override
    def now(self) -> FakeMoment:
        self.log.append(f"moment of {self.current}")
        self.moments.append(FakeMoment(self.log, self))
        return self.moments[-1]

    @override
    def keep(self, x: Any) -> None:
        self.log.append(f"buffer kept for {self.current}")


class FakeWork:
    """Be a message that torch has begun."""

    def __init__(self, streams: FakeStreams) -> None:
        self.has_run = False
        self._streams = streams

    def wait(self) -> None:
        self._streams.log.append(f"{self._streams.current} waits for it")

    def is_completed(self) -> bool:
        return self.has_run


class Fake:
    """Stand for a device, a message and its buffer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams = FakeStreams()
        self.log = self.streams.log
        self.office = PostOffice()
        self.data: Any = object()
        self.works: list[FakeWork] = []
        monkeypatch.setattr(streams, "_POLL_S", 0.01)
        monkeypatch.setattr(streams, "_WATCH_S", 0.005)

    def start(self) -> Any:
        self.log.append(f"begin behind {self.streams.current}")
        self.works.append(FakeWork(self.streams))
        return self.works[-1]

    def made(self, timeout_s: float) -> MessageStreams:
        crew = LocalCrew(self.office, 0, timeout_s)
        return MessageStreams(self.streams, crew, lambda: self.log.append("hang up"))

    def begin(self, made: MessageStreams) -> Any:
        return made.begin(self.start, self.data)

    def has_run(self) -> None:
        """Let all that is enqueued be over."""
        for enqueued in (*self.streams.moments, *self.works):
            enqueued.has_run = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


def soon(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 5
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


def named(error: OSError) -> Exception:
    return WaitTimeoutError(f"the gradients: {error}")


def test_a_receive_that_is_posted_late_is_behind_nothing(fake: Fake) -> None:
    made = fake.made(20.0)
    fake.begin(made)
    with made.aside():
        fake.begin(made)
    assert fake.log == ["begin behind compute", "begin behind a new one"]


def test_a_stream_waits_and_the_host_goes_on(fake: Fake) -> None:
    made = fake.made(20.0)
    pending = fake.begin(made)
    fake.log.clear()
    pending.join(named)
    assert fake.log == [
        "moment of compute",  # from which on its time is kept
        "compute waits for it",
        "buffer kept for compute",
    ]
    assert not pending.is_done()
    fake.has_run()
    assert pending.is_done()
    made.close()


def test_the_host_waits_where_it_is_to_read(fake: Fake) -> None:
    pending = fake.begin(fake.made(20.0))
    fake.log.clear()
    waiting = Thread(target=pending.wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    fake.has_run()
    waiting.join(5)
    assert not waiting.is_alive()
    assert fake.log == []


def test_a_message_that_a_stream_waits_for_too_long_is_named_to_whoever_comes_next(
    fake: Fake,
) -> None:
    made = fake.made(0.05)
    fake.begin(made).join(named)
    (begins,) = fake.streams.moments
    time.sleep(0.2)
    assert made.error is None  # the stream has not come to it: it computes
    begins.has_run = True
    assert soon(lambda: made.error is not None)
    assert fake.log.count("hang up") == 1
    fake.has_run()  # as NCCL lets what it aborts
    for use in (lambda: fake.begin(made).join(named), made.check, made.settle):
        with pytest.raises(WaitTimeoutError, match="gradients: it has not run"):
            use()


def test_a_host_that_is_far_ahead_waits_as_long_as_the_device_computes(fake: Fake) -> None:
    made = fake.made(0.05)
    pending = fake.begin(made)
    pending.join(named)
    waiting = Thread(target=pending.wait)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()  # beyond the limit, which counts from when the stream has come there
    assert made.error is None
    fake.has_run()
    waiting.join(5)
    assert made.error is None
    made.close()


def test_the_host_waits_for_all_at_a_flush(fake: Fake) -> None:
    made = fake.made(20.0)
    made.settle()  # nothing is waited for
    fake.begin(made).join(named)
    waiting = Thread(target=made.settle)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    fake.has_run()
    waiting.join(5)
    assert not waiting.is_alive()
    made.close()


def test_a_message_that_is_late_ends_all(fake: Fake) -> None:
    made = fake.made(0.05)
    never_waited_for, late = fake.begin(made), fake.begin(made)
    time.sleep(0.1)
    assert made.error is None  # nobody waits: a receive may be posted long before its send
    for error in (late.wait, never_waited_for.wait, made.check, fake.begin(made).wait):
        with pytest.raises(TimeoutError, match="^it has not run$"):
            error()
    assert never_waited_for.is_done()
    assert isinstance(fake.begin(made), Gone)
    assert fake.log.count("hang up") == 1


def test_what_another_thread_has_aborted_is_an_error(fake: Fake) -> None:
    made = fake.made(20.0)
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
    fake.has_run()  # as NCCL lets what it aborts
    waiting.join(5)
    assert str(caught[0]) == "another is late"


def test_the_failure_of_another_worker_ends_all(fake: Fake) -> None:
    pending = fake.begin(fake.made(20.0))
    fake.office.fail("worker 1: boom")
    with pytest.raises(ConnectionError, match="^worker 1: boom$"):
        pending.wait()
    assert "hang up" in fake.log


def test_a_message_that_cannot_begin_says_so_when_it_is_waited_for(fake: Fake) -> None:
    def start() -> Any:
        raise RuntimeError("NCCL communicator was aborted")

    pending = fake.made(20.0).begin(start, fake.data)
    with pytest.raises(ConnectionError, match="^NCCL communicator was aborted$"):
        pending.wait()


@pytest.mark.parametrize(
    ("before", "is_there", "is_used", "behind"),
    [(None, True, False, "32"), ("4", True, False, "4"), (None, True, True, None),
     (None, False, False, None)],
)  # fmt: skip
def test_a_gpu_has_all_its_queues_unless_it_is_used_or_a_number_is_chosen(
    monkeypatch: pytest.MonkeyPatch, before: str | None, is_there: bool, is_used: bool,
    behind: str | None,
) -> None:  # fmt: skip
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    ask_for_queues()
    assert os.environ.get(name) == behind


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


class Enqueued:
    """Be what a stream of its own has to do, as torch has one for each process group."""

    def __init__(self, do: Callable[[], None]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            do()
            self._ran = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._ran)

    def is_completed(self) -> bool:
        return bool(self._ran.query())


def sleep() -> None:
    torch.cuda._sleep(int(2e9))


@pytest.mark.gpu
def test_messages_run_beside_compute() -> None:
    crew = LocalCrew(PostOffice(), 0, 20.0)
    made = MessageStreams(streams_of(DEVICE), crew, lambda: None)
    data = room(1 << 20).to(DEVICE)
    torch.cuda._sleep(1)  # what has not run before is loaded, for which the GPU must be idle
    assert int(data.fill_(0).sum()) == 0

    def fill() -> None:
        torch.cuda._sleep(int(1e9))  # about half a second
        data.fill_(5)

    begin = time.monotonic()
    pending = made.begin(lambda: Enqueued(fill), data)
    assert not pending.is_done()
    assert time.monotonic() - begin < 0.3
    assert int(data.sum()) == 0  # on the compute stream, which waits for nothing
    pending.join(named)
    total = data.sum()  # behind the message
    assert not pending.is_done()  # the host is ahead
    assert int(total) == 5 << 20
    made.close()


@pytest.mark.gpu
def test_a_stream_that_waits_too_long_ends_all() -> None:
    hung_up: list[bool] = []
    crew = LocalCrew(PostOffice(), 0, 0.1)
    made = MessageStreams(streams_of(DEVICE), crew, lambda: hung_up.append(True))
    made.begin(lambda: Enqueued(sleep), room().to(DEVICE)).join(named)
    assert soon(lambda: hung_up == [True])
    with pytest.raises(WaitTimeoutError, match="gradients"):
        made.check()
    torch.cuda.synchronize()
    made.close()


@pytest.mark.gpu
def test_a_late_event_is_named() -> None:
    hung_up: list[bool] = []
    crew = LocalCrew(PostOffice(), 0, 0.1)
    made = MessageStreams(streams_of(DEVICE), crew, lambda: hung_up.append(True))
    pending = made.begin(lambda: Enqueued(sleep), room().to(DEVICE))
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
