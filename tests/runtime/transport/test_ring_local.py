from __future__ import annotations

import threading

import pytest

from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.runtime.transport.base import Part
from tests.local_transport import LocalTransport, PostOffice
from tests.runtime.transport.rings import SUMS, ring, room, some


def pair(timeout_s: float = 20.0) -> tuple[LocalTransport, LocalTransport]:
    office = PostOffice()
    return LocalTransport(office, 0, 2, timeout_s), LocalTransport(office, 1, 2, timeout_s)


def test_messages_are_matched_by_ring_and_part_in_their_order() -> None:
    sender, receiver = pair()
    other = ring(SUMS, Payload.S, 1)
    first, second, head, late = room(), room(), room(), room()
    waits = [receiver.irecv(ring(), first), receiver.irecv(ring(), second)]
    sent = some(1)
    done = [sender.isend(ring(), sent), sender.isend(ring(), some(2), Part.HEAD)]
    sent.fill_(9)  # which the message does not see
    done += [sender.isend(other, some(3)), sender.isend(ring(), some(4))]
    waits += [receiver.irecv(ring(), head, Part.HEAD), receiver.irecv(other, late)]
    for pending in (*reversed(waits), *done):
        assert pending.is_done()
        pending.wait()
    assert (int(first), int(second), int(head), int(late)) == (1, 4, 2, 3)
    first.fill_(7)
    waits[0].wait()  # which is no second copy
    assert first == 7


def test_a_wait_ends_at_its_limit() -> None:
    pending = pair(0.05)[1].irecv(ring(SUMS, Payload.S, 2), room(), Part.HEAD)
    assert not pending.is_done()
    with pytest.raises(TimeoutError, match="^no message within 0.05 s$"):
        pending.wait()


def test_a_failure_wakes_who_waits_and_who_will() -> None:
    sender, receiver = pair()
    errors: list[str] = []

    def wait() -> None:
        with pytest.raises(ConnectionError) as caught:
            pending.wait()
        errors.append(str(caught.value))

    pending = receiver.irecv(ring(), room())
    thread = threading.Thread(target=wait)
    thread.start()
    sender.isend(ring(j=1), some(5))
    sender.crew.tell("worker 0: boom")
    sender.crew.tell("worker 0: and then this")
    thread.join(5)
    assert errors == ["worker 0: boom"]
    with pytest.raises(ConnectionError):
        receiver.irecv(ring(), room()).wait()
    there = room()
    receiver.irecv(ring(j=1), there).wait()  # which was sent before
    assert there == 5
    assert receiver.crew.failure() == "worker 0: boom"
    receiver.close()


def test_only_ends_of_a_channel_may_use_it() -> None:
    sender, receiver = pair()
    with pytest.raises(AssertionError, match="worker 1 sends on"):
        receiver.isend(ring(), room())
    with pytest.raises(AssertionError, match="worker 0 receives on"):
        sender.irecv(ring(), room())
