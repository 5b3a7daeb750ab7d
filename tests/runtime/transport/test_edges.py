from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.plan.passes.messages import Channel, Ring
from lightning_cyclic.runtime.transport.base import Part
from lightning_cyclic.runtime.transport.crew import Crew
from lightning_cyclic.runtime.transport.edges import EdgeTransport
from lightning_cyclic.runtime.transport.named import NamedTransport
from tests.harness import processes
from tests.runtime.transport.rings import (
    BACK,
    SUMS,
    THERE,
    backwards,
    channels_of,
    join,
    reason_of,
    ring,
    room,
    some,
)

pytestmark = pytest.mark.multi

CPU = torch.device("cpu")

Log = list[tuple[str, Channel]]


def edges(channels: Sequence[Channel], timeout_s: float) -> EdgeTransport:
    control = NamedTransport({c.lane for c in channels}, Crew(timeout_s))
    return EdgeTransport(channels, control, CPU, "gloo")


def exchange(preset: str) -> tuple[Log, dict[Channel, list[int]]]:
    """Send three messages on each channel; return the posts of the warm-up, and what came."""
    _, num = join()
    channels = channels_of(preset, num)
    log: Log = []
    post = EdgeTransport._post

    def logged(self: EdgeTransport, way: Any, channel: Channel, *args: Any) -> Any:
        log.append((way, channel))
        return post(self, way, channel, *args)

    EdgeTransport._post = logged  # type: ignore[method-assign]
    control = NamedTransport({c.lane for c in channels}, Crew(20.0), partial(backwards, num))
    transport = EdgeTransport(channels, control, CPU, "gloo")
    EdgeTransport._post = post  # type: ignore[method-assign]
    worker, sent, posted = transport.worker, [], {}
    for n, channel in enumerate(channels):
        payload = Payload.K if channel.is_control else Payload.P
        rings = [Ring(channel, payload, j) for j in (2, 0, 1)]
        if channel.target == worker:
            buffers = [room() for _ in rings]
            posted[channel] = (buffers, list(map(transport.irecv, rings, buffers)))
        elif channel.source == worker:
            sent += [transport.isend(r, some(10 * n + r.j)) for r in rings]
    for pending in (*(p for _, waits in posted.values() for p in waits), *sent):
        pending.wait()
        assert pending.is_done()
    transport.close()
    transport.control.close()
    return log, {c: [int(b) for b in buffers] for c, (buffers, _) in posted.items()}


def use_no_names() -> list[int]:
    """Receive other rings than are sent: what comes is what was sent first."""
    rank, _ = join()
    transport = edges((THERE, SUMS), 20.0)
    got = [room(), room(), room(), room()]
    rings = [ring(THERE, Payload.A, 1), ring(THERE, Payload.R, 2), ring(SUMS, Payload.S, 0)]
    with pytest.raises(AssertionError, match=r"HEAD of .* has to go by control"):
        transport.isend(ring(THERE), room(), Part.HEAD)
    head = ring(THERE, Payload.X)
    if rank == 0:
        sends = [transport.isend(r, some(n)) for n, r in enumerate(rings, start=1)]
        sends += [transport.control.isend(head, some(9), Part.HEAD)]
    else:
        rings[0], rings[1] = rings[1], rings[0]
        sends = [transport.control.irecv(head, got[3], Part.HEAD)]
        sends += [transport.irecv(r, b) for r, b in zip(rings, got, strict=False)]
    for pending in sends:
        pending.wait()
    transport.close()
    transport.control.close()
    return [int(b) for b in got]


def wait_in_vain() -> None:
    """Time out on one channel; the others go on."""
    rank, _ = join()
    transport = edges((THERE, BACK, SUMS), 0.3)
    if rank == 1:
        with pytest.raises(TimeoutError):
            transport.irecv(ring(SUMS, Payload.S, 4), room()).wait()
    torch.distributed.barrier()
    byte = some(7) if rank == 0 else room()
    (transport.isend if rank == 0 else transport.irecv)(ring(THERE), byte).wait()
    assert byte == 7
    transport.close()
    transport.control.close()


def fail_on_the_last() -> tuple[float, str | None]:
    rank, num = join()
    channels = channels_of("cyclic_dp", num)
    transport = edges(channels, 30.0)
    if rank == num - 1:
        time.sleep(0.2)
        transport.crew.tell("worker 3: boom")
        time.sleep(6)  # its end would close channels, too
        return 0.0, None
    start = time.monotonic()
    channel = next(c for c in channels if {rank, num - 1} == set(c[:2]) and not c.is_control)
    post = transport.isend if channel.source == rank else transport.irecv
    with pytest.raises(OSError):  # noqa: PT011  (a time-out, to gloo, where this rank hung up)
        post(ring(channel), room(1 << 22)).wait()
    waited, reason = time.monotonic() - start, reason_of(transport.crew)
    time.sleep(1)  # the store that the others read ends with rank 0
    return waited, reason


@pytest.mark.parametrize(
    ("preset", "num_ranks"), [("cyclic_dp", 2), ("cyclic_dp", 4), ("1f1b", 4)]
)
def test_channels_are_warmed_up_and_used_in_order(preset: str, num_ranks: int) -> None:
    channels = channels_of(preset, num_ranks)
    for rank, (log, got) in enumerate(processes.run(exchange, num_ranks, preset)):
        worker = backwards(num_ranks, rank)
        mine = [c for c in channels if worker in c[:2] and not c.is_control]
        assert log == [("send" if c.source == worker else "recv", c) for c in mine]
        assert got == {
            c: [10 * n + j for j in (2, 0, 1)]
            for n, c in enumerate(channels)
            if c.target == worker
        }


def test_messages_have_no_names_but_by_control() -> None:
    assert processes.run(use_no_names, 2) == [[0, 0, 0, 0], [1, 2, 3, 9]]


def test_a_time_out_breaks_its_channel_only() -> None:
    processes.run(wait_in_vain, 2)


def test_a_failure_wakes_all_who_wait() -> None:
    for waited, reason in processes.run(fail_on_the_last, 4)[:3]:
        assert waited < 5
        assert reason == "worker 3: boom"
