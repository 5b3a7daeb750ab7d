from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.plan.passes.messages import Ring
from lightning_cyclic.runtime.transport.base import AbstractPending, AbstractTransport, Part
from lightning_cyclic.runtime.transport.crew import Crew
from lightning_cyclic.runtime.transport.host_staged import HostStagedTransport
from lightning_cyclic.runtime.transport.named import NamedTransport
from tests.harness import processes
from tests.harness.local_transport import LocalCrew, LocalTransport, PostOffice
from tests.runtime.transport.rings import BACK, SUMS, THERE, join, reason_of, ring, room, some

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


class Slow(AbstractTransport):
    """Keep senders waiting until it is told to go on; note the order of the sends."""

    def __init__(self) -> None:
        super().__init__(0, 2, LocalCrew(PostOffice(), 0, 0.2))
        self.go_on = threading.Event()
        self.sent: list[tuple[Ring, list[int], Part]] = []

    def isend(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        self.go_on.wait(5)
        self.sent.append((ring, data.tolist(), part))
        raise RuntimeError("no line")

    def irecv(self, ring: Ring, data: Tensor, part: Part = Part.CONTENT) -> AbstractPending:
        raise NotImplementedError


def pair() -> tuple[HostStagedTransport, HostStagedTransport]:
    office = PostOffice()
    inner = (LocalTransport(office, worker, 2, 5.0) for worker in range(2))
    sender, receiver = map(HostStagedTransport, inner)
    return sender, receiver


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_messages_come_in_order_and_when_they_are_waited_for(device: str) -> None:
    sender, receiver = pair()
    buffers = [room(1000).to(device) for _ in range(6)]
    rings = [ring(THERE, Payload.A, 1), ring(SUMS, Payload.S, 0), ring(THERE, Payload.A, 1)] * 2
    waits = [receiver.irecv(r, b) for r, b in zip(rings, buffers, strict=True)]
    for n, r in enumerate(rings):
        data = torch.full((1000,), n, dtype=torch.uint8, device=device)
        sent = sender.isend(r, data)
        sent.wait()
        data.fill_(99)  # which the message does not see
        assert sent.is_done()
    for pending in reversed(waits):
        pending.wait()
        assert pending.is_done()
    assert [int(b.unique()) for b in buffers] == list(range(6))
    for pending, buffer in zip(waits, buffers, strict=True):
        buffer.fill_(77)
        pending.wait()  # once more, which leaves what was written since
        assert int(buffer.unique()) == 77
    sender.close()
    receiver.close()


def test_the_host_goes_on_and_errors_come_with_the_wait() -> None:
    slow = Slow()
    transport = HostStagedTransport(slow)
    first, second = transport.isend(ring(), some(1)), transport.isend(ring(), some(2), Part.HEAD)
    assert not first.is_done()
    with pytest.raises(TimeoutError):
        first.wait()
    slow.go_on.set()
    for pending in (first, second):
        with pytest.raises(RuntimeError, match="no line"):
            pending.wait()
        assert pending.is_done()
    assert slow.sent == [(ring(), [1], Part.CONTENT), (ring(), [2], Part.HEAD)]


def test_messages_that_wait_are_dropped_with_the_transport() -> None:
    slow = Slow()
    transport = HostStagedTransport(slow)
    transport.isend(ring(), some(1))
    dropped = transport.isend(ring(), some(2))
    transport.close()
    slow.go_on.set()
    with pytest.raises(ConnectionError, match="the transport is closed"):
        dropped.wait()
    assert dropped.is_done()


def exchange(device: str) -> tuple[list[int], str | None, float]:
    """Swap messages between two ranks, then let one fail while the other waits."""
    rank, _ = join()
    inner = NamedTransport({THERE.lane, SUMS.lane}, Crew(20.0))
    transport = HostStagedTransport(inner)
    out, into = (THERE, BACK) if rank == 0 else (BACK, THERE)
    got = [room(4).to(device) for _ in range(8)]
    waits = [transport.irecv(ring(into, Payload.P, n % 2), b) for n, b in enumerate(got)]
    for n in range(8):
        data = torch.full((4,), n, dtype=torch.uint8, device=device)
        waits.append(transport.isend(ring(out, Payload.P, n % 2), data))
    for pending in waits:
        pending.wait()
    start = time.monotonic()
    if rank == 1:
        transport.crew.tell("worker 1: boom")
        time.sleep(1)
    else:
        with pytest.raises(ConnectionError):
            transport.irecv(ring(into), room().to(device)).wait()
    waited, reason = time.monotonic() - start, reason_of(transport.crew)
    transport.close()
    return [int(b.unique()) for b in got], reason, waited


@pytest.mark.multi
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_processes_may_share_a_device(device: str) -> None:
    for got, reason, waited in processes.run(exchange, 2, device):
        assert got == list(range(8))
        assert reason == "worker 1: boom"
        assert waited < 5


@pytest.mark.gpu
def test_the_copy_waits_for_what_computes_and_the_host_does_not() -> None:
    sender, receiver = pair()
    data, there = room(1 << 20).cuda(), room(1 << 20).cuda()
    for _ in range(2):  # pinned memory and kernels, once made, are used again: that stops the GPU
        data.fill_(4)
        first = receiver.irecv(ring(), there)
        sender.isend(ring(), data).wait()
        first.wait()
        torch.cuda.synchronize()
    arrives = receiver.irecv(ring(), there)
    torch.cuda.synchronize()
    start = time.monotonic()
    torch.cuda._sleep(int(1e9))  # about half a second
    data.fill_(5)
    sent = sender.isend(ring(), data)
    assert time.monotonic() - start < 0.2
    assert not sent.is_done()
    arrives.wait()
    assert bool((there + 1 == 6).all())  # on the current stream, with no other wait
    sent.wait()
