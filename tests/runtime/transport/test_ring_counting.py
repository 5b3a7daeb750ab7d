from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.runtime.transport.base import CountingTransport, Part
from tests.harness.local_transport import LocalTransport, PostOffice
from tests.runtime.transport.rings import SUMS, THERE, ring, room


def test_messages_and_bytes_are_counted_from_all_threads() -> None:
    office = PostOffice()
    transport = CountingTransport(LocalTransport(office, 0, 2))
    with ThreadPoolExecutor(4) as lanes:
        for n in range(400):
            channel = (THERE, SUMS)[n % 2]
            lanes.submit(transport.isend, ring(channel, Payload.S), room(3))
    transport.isend(ring(), room(5), Part.HEAD)
    assert transport.messages == {Payload.S: 400, Payload.A: 1}
    assert transport.num_bytes == {Payload.S: 1200, Payload.A: 5}
    assert (transport.worker, transport.num_workers, transport.control) == (0, 2, None)


def test_what_goes_by_control_is_counted_too() -> None:
    class WithControl(LocalTransport):
        control = LocalTransport(PostOffice(), 0, 2)

    transport = CountingTransport(WithControl(PostOffice(), 0, 2))
    assert transport.control is not None
    transport.control.isend(ring(), room(4), Part.HEAD)
    transport.isend(ring(), room(6))
    assert transport.num_bytes == {Payload.A: 10}
